"""One request in progress: what every family's run has, and how its forwards reach the controllers."""

from __future__ import annotations

import time
import types
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from videoaccel.errors import RequestError, UserError
from videoaccel.forward import Controller, ForwardCall, Kind, answer
from videoaccel.pipelines.layout import Layout
from videoaccel.pipelines.request import (
    NOT_FINITE,
    CancelFlag,
    Cancelled,
    Clip,
    OnProgress,
    Plan,
    Progress,
    Request,
    RunStage,
    RunTimings,
    StepInfo,
    Streams,
)

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's on a device, and what it raises on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # On a CPU torch raises a bare RuntimeError.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


_STAGES: tuple[RunStage, ...] = ("encode", "denoise", "decode")
NO_CONTROLLERS: Mapping[str, Controller] = types.MappingProxyType({})


class Run(ABC):
    """One request in progress: all of its state, made at its start and dropped at its end.

    The stages run in order, each once: `encode`, `denoise`, `decode`; any other order is a `UserError`.
    Nothing is stored on the pipeline, its modules or its schedulers, so a run that raises or is cancelled
    leaves nothing behind, and two runs can share one pipeline, from two threads as well.

    Attributes:
        pipe: the pipeline.
        id: the request's identity, unlike any other's.
        request, plan: what was asked and what is served.
        steps: the denoising steps, in order.
        encoded: whether `make_latents` has come past `encode`.
        timings: seconds so far.
        forwards: forwards so far by kind, as the receipt counts them: what a controller had run, and what it
            answered without ("reused"). A technique that runs part of a transformer itself, to decide, counts
            that here as "probe".
        controllers: the controllers of `denoise`, by key, in the order in which they compose.
    """

    def __init__(self, pipe: Any, request: Request, plan: Plan, steps: tuple[StepInfo, ...]) -> None:
        self.pipe = pipe
        self.request = request
        self.plan = plan
        self.steps = steps
        self.id = uuid.uuid4().hex
        self.encoded = False
        self.timings = RunTimings()
        self.forwards: Counter[str] = Counter()
        self.controllers = NO_CONTROLLERS
        self._begun = 0
        self._started = time.perf_counter()

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The packed sequence of this request; available after `encode`."""

    @property
    @abstractmethod
    def initial_noise(self) -> Streams:
        """The starting noise of the generated streams, on the CPU; available after `encode`."""

    @property
    @abstractmethod
    def latents(self) -> Streams:
        """The current latents, one a generated stream, on the pipeline's device; after `denoise`."""

    @abstractmethod
    def encode(self) -> None:
        """Text, keyframes and references to conditions; layout, schedules and initial noise."""

    @abstractmethod
    def denoise(
        self,
        *,
        on_progress: OnProgress | None = None,
        cancel: CancelFlag | None = None,
        controllers: Mapping[str, Controller] = NO_CONTROLLERS,
    ) -> None:
        """Run every step.

        Args:
            on_progress: told of every step.
            cancel: asked before every step.
            controllers: what decides about each forward, by key; `Controller` says how several compose. With
                none, every forward is dense.

        Raises:
            Cancelled: `cancel` returned True; checked before every step.
        """

    @abstractmethod
    def decode(self) -> Clip:
        """Latents to frames and sound."""

    def undecoded(self) -> Clip:
        """The clip as latents alone: no frames, `(0, H, W, 3)`, and no sound. After `denoise`.

        Raises:
            UserError: nothing was denoised yet.
        """
        if self._begun < _STAGES.index("decode"):
            raise UserError("there are no latents yet; run encode() and denoise() first")
        frames = np.empty((0, self.plan.height, self.plan.width, 3), np.uint8)
        return self._clip(frames, None, None)

    def stock_call(self) -> float | None:
        """Seconds of diffusers' own pipeline call for this request: encode, denoise and decode.

        On a run of which nothing else was called, the device synchronised at both ends. None for a family
        that has not wired it up.
        """
        return None

    def stock_loop(self) -> float | None:
        """Seconds of diffusers' own denoise loop after `encode`, as `stock_call`."""
        return None

    def make_latents(
        self,
        *,
        on_progress: OnProgress | None = None,
        cancel: CancelFlag | None = None,
        controllers: Mapping[str, Controller] = NO_CONTROLLERS,
    ) -> None:
        """`encode` and `denoise`, with progress and cancel before each.

        Raises:
            Cancelled: `cancel` returned True before a stage or a step.
            RequestError: a final latent holds a NaN or an infinity: no clip is made of it.
        """
        self._check(cancel)
        self._tell(on_progress, "encode", 0, 1)
        self.encode()
        self.encoded = True
        self._tell(on_progress, "encode", 1, 1)
        self._check(cancel)
        self._tell(on_progress, "denoise", 0, len(self.steps))
        self.denoise(on_progress=on_progress, cancel=cancel, controllers=controllers)
        for stream, latent in self.latents.items():
            if not bool(torch.isfinite(latent).all()):
                raise RequestError(
                    f"the {stream} latent is not finite after {len(self.steps)} forwards; no clip was made: "
                    f"{NOT_FINITE}"
                )

    def make_clip(self, *, on_progress: OnProgress | None = None, cancel: CancelFlag | None = None) -> Clip:
        """`decode`, with progress, and cancel before it.

        Raises:
            Cancelled: `cancel` returned True.
            RequestError: a decoded frame or the sound holds a NaN or an infinity.
        """
        self._check(cancel)
        self._tell(on_progress, "decode", 0, 1)
        clip = self.decode()
        self._tell(on_progress, "decode", 1, 1)
        return clip

    def _enter(self, stage: RunStage) -> None:
        """What every stage begins with: UserError where it is not this stage's turn."""
        if _STAGES.index(stage) != self._begun:
            due = f"{_STAGES[self._begun]}() is next" if self._begun < len(_STAGES) else "this run is over"
            raise UserError(
                f"a run's stages are encode, denoise and decode, in this order and each once: {due}, not "
                f"{stage}(); for another clip call Family.start again"
            )
        self._begun += 1

    def _ask(self, branch: str, latents: Streams, run_model: Callable[[], Streams]) -> Streams:
        """The velocity of the forward at hand: from the controllers, or from `run_model` without any."""
        ran = False

        def dense(kind: Kind = "dense") -> Streams:
            nonlocal ran
            ran = True
            self.forwards[kind] += 1
            return run_model()

        call = ForwardCall(
            request_id=self.id,
            plan=self.plan,
            layout=self.layout,
            step=self.steps[len(self.timings.step_s)],
            branch=branch,
            latents=latents,
            controllers=self.controllers,
            dense=dense,
        )
        velocity = answer(call)
        if not ran:
            self.forwards["reused"] += 1
        return velocity

    def _corrections(self, step: StepInfo, latents: Streams) -> Streams:
        """The streams that controllers correct after a step."""
        changed: Streams = {}
        for controller in self.controllers.values():
            changed |= controller.after_step(step, latents | changed) or {}
        return changed

    def _clip(
        self, frames: np.ndarray[Any, Any], audio: np.ndarray[Any, Any] | None, rate: int | None
    ) -> Clip:
        return Clip(
            frames=frames,
            audio=audio,
            sampling_rate=rate,
            fps=self.plan.fps,
            latents={name: value.cpu() for name, value in self.latents.items()},
            initial_noise=self.initial_noise,
            layout=self.layout,
            plan=self.plan,
            timings=self.timings,
        )

    def _timed(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, the device synchronised at both ends."""
        self._synchronise()
        start = time.perf_counter()
        work()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        device = torch.device(self.pipe._execution_device)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def _check(self, cancel: CancelFlag | None) -> None:
        if cancel is not None and cancel():
            raise Cancelled(f"Cancelled after {len(self.timings.step_s)} of {len(self.steps)} steps.")

    def _tell(
        self, on_progress: OnProgress | None, stage: RunStage, done: int, total: int, step_s: float = 0.0
    ) -> None:
        if on_progress is not None:
            elapsed = time.perf_counter() - self._started
            on_progress(Progress(stage=stage, done=done, total=total, step_s=step_s, elapsed_s=elapsed))
