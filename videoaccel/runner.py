"""One request to a file: `Handle.run`, then the mp4, with the device free for the next one meanwhile."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from videoaccel.config import AccelConfig
from videoaccel.install import Handle
from videoaccel.media import write_video
from videoaccel.pipelines.request import CancelFlag, Clip, OnProgress, Request
from videoaccel.receipt import Receipt, Status, attach
from videoaccel.session import in_words

GATE: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a request made.

    Attributes:
        clip: frames and sound; without frames where decoding was left out.
        receipt: the record, muxing included.
        latency_s: from submission to the written file, waiting for the device included.
    """

    clip: Clip
    receipt: Receipt
    latency_s: float


def run_request(
    handle: Handle,
    request: Request,
    *,
    out: str | os.PathLike[str] | None,
    config: AccelConfig | None = None,
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
        request, config, prompt_embeds, decode, on_progress, cancel, notes: as for `Handle.run`.
        out: the mp4; None writes none.
        on_mux: called before the mp4 is written.
        device_gate: held while the device is in use, so that the muxing of one request overlaps the next.

    Raises:
        UserError: as `Handle.run`, or the output can't be written.
        RequestError, Cancelled: as `Handle.run`; no file was written.
    """
    submitted = time.perf_counter()
    with device_gate:
        clip, receipt = handle.run(
            request,
            config=config,
            prompt_embeds=prompt_embeds,
            decode=decode,
            on_progress=on_progress,
            cancel=cancel,
            notes=notes,
        )
    if decode and out is not None:
        if on_mux is not None:
            on_mux()
        start = time.perf_counter()
        try:
            write_video(out, clip.frames, fps=clip.fps, audio=clip.audio, rate=clip.sampling_rate)
        except BaseException as error:
            status: Status = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
            attach(error, replace(receipt, status=status, error=in_words(error)))
            raise
        muxed = replace(receipt.timings, mux_s=time.perf_counter() - start)
        receipt = replace(receipt, timings=muxed)
    return Outcome(clip=clip, receipt=receipt, latency_s=time.perf_counter() - submitted)


def noise_digest(clip: Clip) -> str:
    """SHA-256 over the initial noise, stream by stream: equal seeds give equal digests on any machine."""
    digest = hashlib.sha256()
    for stream in sorted(clip.initial_noise):
        digest.update(clip.initial_noise[stream].float().contiguous().numpy().tobytes())
    return digest.hexdigest()
