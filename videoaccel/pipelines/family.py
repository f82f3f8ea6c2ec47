"""The family adapter: everything a technique may know about a model, and the table of families.

A family answers for one model architecture: its tasks and the component that serves each, where its block
stack is and what enters and leaves it, which rows of the sequence are what, what the scheduler's coefficients
are, and how a request runs stage by stage. No technique knows a model's name; adding a family is one file and
one line in `FAMILIES`.
"""

from __future__ import annotations

import importlib
import time
import types
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from videoaccel.errors import RequestError, UserError, unknown
from videoaccel.forward import Controller, ForwardCall, Kind, answer, current_forward
from videoaccel.pipelines.layout import Layout, Segment
from videoaccel.pipelines.request import (
    CancelFlag,
    Cancelled,
    Clip,
    OnProgress,
    Plan,
    Progress,
    Reference,
    Request,
    Stage,
    StepInfo,
    Streams,
    Timings,
)
from videoaccel.pipelines.schedule import StreamSchedule, stream_schedule

__all__ = [
    "FAMILIES",
    "BlockStack",
    "Cancelled",
    "Clip",
    "Controller",
    "Family",
    "ForwardCall",
    "Layout",
    "Plan",
    "Progress",
    "Reference",
    "Request",
    "Run",
    "Segment",
    "StepInfo",
    "StreamSchedule",
    "Streams",
    "Timings",
    "current_forward",
    "family_of",
    "stream_schedule",
]

NO_CONTROLLERS: Mapping[str, Controller] = types.MappingProxyType({})

FAMILIES: dict[str, str] = {
    "minimax_h3": "videoaccel.pipelines.minimax_h3:MiniMaxH3Family",
    "wan": "videoaccel.pipelines.wan:WanFamily",
}
"""Family name to the class that implements it, imported when first needed."""


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """Where a transformer's repeated blocks are and how they are called.

    Attributes:
        component: name of the pipeline component (`transformer`, `transformer_ref`, `transformer_2`).
        model: the transformer.
        blocks: the repeated blocks, in order.
        path: attribute path of `blocks` on `model`.
        attention: attribute of a block that holds its self-attention.
        inputs: names of what a block is passed, by position, `hidden_states` `(B, L, D)` first.
        outputs: names of what a block returns, in order; one name means a bare tensor.
        num_heads, head_dim, hidden_size: sizes of one block.
        velocity_streams: streams of the transformer's outputs, in the order it returns them.
    """

    component: str
    model: torch.nn.Module
    blocks: torch.nn.ModuleList
    path: str
    attention: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_heads: int
    head_dim: int
    hidden_size: int
    velocity_streams: tuple[str, ...]


class Run(ABC):
    """One request in progress: all of its state, made at its start and dropped at its end.

    The stages run in order, each once: `encode`, `denoise`, `decode`. Nothing is stored on the pipeline, its
    modules or its schedulers, so a run that raises or is cancelled leaves nothing behind, and two runs can
    share one pipeline, from two threads as well.

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
        self.timings = Timings()
        self.forwards: Counter[str] = Counter()
        self.controllers = NO_CONTROLLERS
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
        """The clip as latents alone: no frames, `(0, H, W, 3)`, and no sound. After `denoise`."""
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
                    f"the {stream} latent is not finite after {len(self.steps)} forwards; no clip was made"
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
        self, on_progress: OnProgress | None, stage: Stage, done: int, total: int, step_s: float = 0.0
    ) -> None:
        if on_progress is not None:
            elapsed = time.perf_counter() - self._started
            on_progress(Progress(stage=stage, done=done, total=total, step_s=step_s, elapsed_s=elapsed))


class Family(ABC):
    """What the rest of the package may ask about a model architecture.

    Attributes:
        name: key in `FAMILIES`.
        pipeline_classes: names of the diffusers pipeline classes (or bases) this family serves.
        tasks: every task of the family.
        streams: the generated streams.
    """

    name: ClassVar[str]
    pipeline_classes: ClassVar[tuple[str, ...]]
    tasks: ClassVar[tuple[str, ...]]
    streams: ClassVar[tuple[str, ...]]

    @abstractmethod
    def components(self, pipe: Any, task: str) -> tuple[str, ...]:
        """The transformer components that serve `task`, in the order they run (several: experts).

        Raises:
            UserError: the pipeline does not serve this task.
        """

    @abstractmethod
    def stack(self, pipe: Any, component: str) -> BlockStack:
        """The block stack of one transformer component.

        Raises:
            UserError: the component is not loaded.
        """

    @abstractmethod
    def resolve(self, pipe: Any, request: Request) -> Plan:
        """Check a request and fill in its defaults.

        Raises:
            UserError: one line that names the limit and the fix.
        """

    @abstractmethod
    def schedules(
        self,
        pipe: Any,
        steps: int,
        *,
        shift: Mapping[str, float] | None = None,
        sigmas: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, StreamSchedule]:
        """Per stream, the schedule and coefficients of a run of `steps` steps.

        The pipeline's own schedulers are copied, so their shift counts and their state does not change; a
        stream may have another shift, or sigmas, as in `Request`.

        Raises:
            UserError: a scheduler can't run what is asked.
        """

    @abstractmethod
    def canvas(self, pipe: Any, short_edge: int | None = None) -> tuple[int, int]:
        """`(height, width)`: the model's own aspect ratio at a short edge in px, or its default canvas."""

    @abstractmethod
    def steps(self, pipe: Any, plan: Plan) -> tuple[StepInfo, ...]:
        """Every denoising step of a plan: its expert, noise levels and guidance weights."""

    @abstractmethod
    def start(
        self, pipe: Any, request: Request, *, prompt_embeds: torch.Tensor | None = None, decode: bool = True
    ) -> Run:
        """A run of `request`, nothing computed yet.

        Args:
            pipe: the pipeline.
            request: what to make.
            prompt_embeds: `(1, L, D)` text conditioning to use instead of running the text encoder. All its
                rows count as text, where H3 tags the pictures that `fl2va` and `ref2va` put before the prompt
                as video: for those two it does for a timing, not for a clip.
            decode: False says `Run.decode` will not be called, so its components may be missing.

        Raises:
            UserError: as `resolve`, or a component that the run needs is not loaded.
        """

    def generate(
        self,
        pipe: Any,
        request: Request,
        *,
        on_progress: OnProgress | None = None,
        cancel: CancelFlag | None = None,
        controllers: Mapping[str, Controller] = NO_CONTROLLERS,
        prompt_embeds: torch.Tensor | None = None,
    ) -> Clip:
        """All three stages of a request. The arguments are those of `start` and `Run.denoise`.

        Raises:
            UserError: as `resolve`.
            Cancelled, RequestError: as `Run.make_latents` and `Run.make_clip`.
        """
        run = self.start(pipe, request, prompt_embeds=prompt_embeds)
        run.make_latents(on_progress=on_progress, cancel=cancel, controllers=controllers)
        return run.make_clip(on_progress=on_progress, cancel=cancel)


def family_named(name: str) -> Family:
    """The family of that name.

    Raises:
        UserError: no such family.
    """
    if name not in FAMILIES:
        raise unknown("model family", name, FAMILIES)
    module, _, attribute = FAMILIES[name].partition(":")
    family: Family = getattr(importlib.import_module(module), attribute)()
    return family


def family_of(pipe: Any) -> Family:
    """The family that serves a pipeline, by its class or any of its bases.

    Raises:
        UserError: no family serves it.
    """
    bases = {base.__name__ for base in type(pipe).__mro__}
    for name in FAMILIES:
        family = family_named(name)
        if bases & set(family.pipeline_classes):
            return family
    raise UserError(
        f"{type(pipe).__name__} is not a supported pipeline; supported families: {', '.join(FAMILIES)}."
    )
