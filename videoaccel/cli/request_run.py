"""One request on a loaded pipeline, end to end: encode, denoise, decode, mux, receipt."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from videoaccel.environment import device_name
from videoaccel.install import Handle
from videoaccel.media import write_video
from videoaccel.pipelines.family import Run
from videoaccel.pipelines.request import CancelFlag, Clip, OnProgress, Request
from videoaccel.receipt import Memory, Receipt, recording

GATE: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a request made.

    Attributes:
        clip: frames and sound; None where decoding was left out.
        receipt: the record.
        run: the finished run, for its latents and layout.
        latency_s: from submission to the written file, waiting for the device included.
    """

    clip: Clip | None
    receipt: Receipt
    run: Run
    latency_s: float


def run_request(
    handle: Handle,
    request: Request,
    *,
    model: str,
    weights: str,
    out: str | os.PathLike[str] | None,
    prompt_embeds: torch.Tensor | None = None,
    decode: bool = True,
    on_progress: OnProgress | None = None,
    cancel: CancelFlag | None = None,
    on_mux: Callable[[], None] | None = None,
    device_gate: AbstractContextManager[Any] = GATE,
    notes: tuple[str, ...] = (),
) -> Outcome:
    """Runs a request and writes its clip.

    Args:
        handle: what `accelerate` returned.
        request: what to make.
        model, weights: for the receipt.
        out: the mp4; None writes none.
        prompt_embeds: `(1, L, D)`, for a pipeline without a text encoder; encoding is then not booked.
        decode: False stops after denoising.
        on_progress: see `OnProgress`.
        cancel: asked before each stage and each step; True stops the request.
        on_mux: called before the mp4 is written.
        device_gate: held while the device is in use, so that the muxing of one request overlaps the next.
        notes: further notes for the receipt.

    Raises:
        UserError: as `Family.start`, or the output can't be written.
        RequestError: the latents, or what they decode to, are not finite.
        Cancelled: `cancel` returned True; no file was written.
    """
    submitted = time.perf_counter()
    pipe, family = handle.pipe, handle.family
    device = torch.device(pipe._execution_device)
    with recording(handle.config) as recorder:
        clip: Clip | None = None
        with device_gate:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            run = family.start(pipe, request, prompt_embeds=prompt_embeds, decode=decode)
            run.make_latents(on_progress=on_progress, cancel=cancel)
            if decode:
                clip = run.make_clip(on_progress=on_progress, cancel=cancel)
            peak: dict[str, int] = {}
            if device.type == "cuda":
                peak["peak_allocated"] = torch.cuda.max_memory_allocated(device)
                peak["peak_reserved"] = torch.cuda.max_memory_reserved(device)
        if clip is not None and out is not None:
            if on_mux is not None:
                on_mux()
            with recorder.stage("mux"):
                write_video(out, clip.frames, fps=clip.fps, audio=clip.audio, rate=clip.sampling_rate)
        plan, layout = run.plan, run.layout
        for step, seconds in zip(run.steps, run.timings.step_s, strict=True):
            recorder.step(seconds, dense=len(step.branches))
        if prompt_embeds is None:
            recorder.add_seconds("encode", run.timings.encode_s)
        recorder.add_seconds("denoise", run.timings.denoise_s)
        recorder.add_seconds("decode", run.timings.decode_s)
        recorder.describe(
            model=model,
            weights=weights,
            family=family.name,
            task=plan.task,
            device=device_name(device),
            width=plan.width,
            height=plan.height,
            frames=plan.num_frames,
            fps=plan.fps,
            seed=plan.seed,
            rows={segment.role: layout.count(segment.role) for segment in layout.segments},
            steps=plan.steps,
            memory=Memory(state=recorder.state_bytes, **peak),
        )
        for note in (*plan.notes, *notes):
            recorder.note(note)
        receipt = recorder.receipt()
    return Outcome(clip=clip, receipt=receipt, run=run, latency_s=time.perf_counter() - submitted)


def noise_digest(run: Run) -> str:
    """SHA-256 over the initial noise, stream by stream: equal seeds give equal digests on any machine."""
    digest = hashlib.sha256()
    for stream in sorted(run.initial_noise):
        digest.update(run.initial_noise[stream].float().contiguous().numpy().tobytes())
    return digest.hexdigest()
