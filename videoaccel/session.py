"""One request on an accelerated pipeline, from start to end, and the receipt that says how it went."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from videoaccel.config import AccelConfig
from videoaccel.environment import device_name
from videoaccel.errors import RequestError
from videoaccel.forward import Controller
from videoaccel.pipelines.family import Family, Run
from videoaccel.pipelines.request import CancelFlag, Cancelled, Clip, OnProgress, Request
from videoaccel.pipelines.run import is_out_of_memory
from videoaccel.protocols import Technique
from videoaccel.receipt import Memory, Receipt, Recorder, Status, attach, recording


def serve(
    pipe: Any,
    family: Family,
    request: Request,
    *,
    config: AccelConfig,
    techniques: Mapping[str, Technique],
    model: str,
    weights: str,
    prompt_embeds: torch.Tensor | None = None,
    decode: bool = True,
    on_progress: OnProgress | None = None,
    cancel: CancelFlag | None = None,
    notes: tuple[str, ...] = (),
) -> tuple[Clip, Receipt]:
    """Runs a request; the arguments are those of `Handle.run`.

    Args:
        techniques: what is installed, by the key of its section; those in `config` take part.
    """
    device = torch.device(pipe._execution_device)
    with peak_memory(device) as peak:
        run = family.start(pipe, request, prompt_embeds=prompt_embeds, decode=decode)
        controllers: dict[str, Controller] = {}
        with recording(config) as recorder:
            recorder.describe(model=model, weights=weights)
            for note in (*run.plan.notes, *notes):
                recorder.note(note)
            # A stage that was skipped because its result was given is not booked.
            book_encode = prompt_embeds is None
            try:
                controllers |= _begin(techniques, config, run, recorder)
                run.make_latents(on_progress=on_progress, cancel=cancel, controllers=controllers)
                clip = run.make_clip(on_progress=on_progress, cancel=cancel) if decode else run.undecoded()
            except BaseException as raised:
                error = raised
                if is_out_of_memory(raised):
                    error = RequestError(
                        f"{device} ran out of memory; no clip was made: use a smaller canvas (--res), "
                        "fewer seconds or a larger device"
                    )
                stopped = isinstance(error, Cancelled | KeyboardInterrupt)
                status: Status = "cancelled" if stopped else "failed"
                recorder.describe(status=status, error=in_words(error))
                attach(error, _receipt(recorder, family, run, book_encode, peak))
                if error is not raised:
                    raise error from raised
                raise
            finally:
                # The run is kept alive by whoever keeps the error's traceback; techniques' state is not.
                controllers.clear()
            return clip, _receipt(recorder, family, run, book_encode, peak)


class Peak:
    """The device's peak memory while one request runs on it.

    Attributes:
        alone: whether no other request ran on the device meanwhile. One count serves the whole device, so the
            peak of requests that overlap is nobody's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.alone = True

    def read(self) -> dict[str, int]:
        """The peaks for `Memory`, bytes so far; none of a request that was not alone, or on a CPU."""
        if self._device.type != "cuda" or not self.alone:
            return {}
        return {
            "peak_allocated": torch.cuda.max_memory_allocated(self._device),
            "peak_reserved": torch.cuda.max_memory_reserved(self._device),
        }


_PEAKS: dict[torch.device, list[Peak]] = {}
_PEAKS_LOCK = threading.Lock()


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Counts a request among those that run on a device; the first one there resets the device's peak."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    peak = Peak(device)
    with _PEAKS_LOCK:
        running = _PEAKS.setdefault(device, [])
        for other in running:
            other.alone = peak.alone = False
        if peak.alone and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        running.append(peak)
    try:
        yield peak
    finally:
        with _PEAKS_LOCK:
            running.remove(peak)


def _begin(
    techniques: Mapping[str, Technique], config: AccelConfig, run: Run, recorder: Recorder
) -> dict[str, Controller]:
    begun: dict[str, Controller | None] = {}
    try:
        for key, section in config.sections().items():
            begun[key] = techniques[key].begin(run, recorder, section)
    except BaseException:
        # This frame stays on the error's traceback; what had begun must not.
        begun.clear()
        raise
    return {key: controller for key, controller in begun.items() if controller is not None}


def in_words(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _receipt(recorder: Recorder, family: Family, run: Run, book_encode: bool, peak: Peak) -> Receipt:
    """The record of a run that has ended, wherever it came to."""
    plan, times = run.plan, run.timings
    device = torch.device(run.pipe._execution_device)
    for seconds in times.step_s:
        recorder.step(seconds)
    recorder.count(**run.forwards)
    if book_encode:
        recorder.add_seconds("encode", times.encode_s)
    # The loop's own time is known once it has ended; of one that was broken off, that of its steps.
    recorder.add_seconds("denoise", times.denoise_s or sum(times.step_s))
    recorder.add_seconds("decode", times.decode_s)
    recorder.describe(
        family=family.name,
        task=plan.task,
        device=device_name(device),
        width=plan.width,
        height=plan.height,
        frames=plan.num_frames,
        fps=plan.fps,
        seed=plan.seed,
        shift=plan.shift,
        sigmas=plan.sigmas,
        # Rows are packed by `encode`; a request that ended before has none yet.
        rows={s.role: run.layout.count(s.role) for s in run.layout.segments} if run.encoded else {},
        steps=plan.steps,
        memory=Memory(state=recorder.state_bytes, **peak.read()),
    )
    return recorder.receipt()
