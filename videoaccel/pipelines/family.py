"""The family adapter: everything a technique may know about a model, and the table of families.

A family answers for one model architecture: its tasks and the component that serves each, where its block
stack is and what enters and leaves it, which rows of the sequence are what, what the scheduler's coefficients
are, and how a request runs stage by stage. No technique knows a model's name; adding a family is one file and
one line in `FAMILIES`.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from videoaccel.errors import RequestError, UserError, unknown
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
    "family_of",
    "stream_schedule",
]

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


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """One transformer forward the denoise loop is about to make.

    Attributes:
        step: the step it belongs to.
        branch: the guidance branch (`cond`, `uncond`).
        latents: the current sample of each generated stream, conditions left out: rows `(L, C)` where the
            family packs rows, `(1, C, T, H, W)` otherwise. The loop writes in place; clone what must last.
        dense: runs the forward and returns the velocity of each generated stream, in the shapes of `latents`.
    """

    step: StepInfo
    branch: str
    latents: Streams
    dense: Callable[[], Streams]


class Controller(Protocol):
    """What decides, forward by forward, whether the transformer runs. None means "always dense"."""

    def velocity(self, call: ForwardCall) -> Streams:
        """The velocity to use: `call.dense()`, or one made without the transformer, of the same shapes."""
        ...

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """Sees the sample after the scheduler's step; returns the streams it corrects, or None to leave all.

        `step.carry` of a correction reaches the final latent: all of it under Euler, little under UniPC.
        """
        ...


class Run(ABC):
    """One request in progress: all of its state, made at its start and dropped at its end.

    The stages run in order, each once: `encode`, `denoise`, `decode`. Nothing is stored on the pipeline, its
    modules or its schedulers, so a run that raises or is cancelled leaves nothing behind, and two runs can
    share one pipeline, from two threads as well.

    Attributes:
        pipe: the pipeline.
        request, plan: what was asked and what is served.
        steps: the denoising steps, in order.
        timings: seconds so far.
    """

    def __init__(self, pipe: Any, request: Request, plan: Plan, steps: tuple[StepInfo, ...]) -> None:
        self.pipe = pipe
        self.request = request
        self.plan = plan
        self.steps = steps
        self.timings = Timings()
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
        controller: Controller | None = None,
    ) -> None:
        """Run every step.

        Raises:
            Cancelled: `cancel` returned True; checked before every step.
        """

    @abstractmethod
    def decode(self) -> Clip:
        """Latents to frames and sound."""

    def make_latents(
        self,
        *,
        on_progress: OnProgress | None = None,
        cancel: CancelFlag | None = None,
        controller: Controller | None = None,
    ) -> None:
        """`encode` and `denoise`, with progress and cancel before each.

        Raises:
            Cancelled: `cancel` returned True before a stage or a step.
            RequestError: a final latent holds a NaN or an infinity: no clip is made of it.
        """
        self._check(cancel)
        self._tell(on_progress, "encode", 0, 1)
        self.encode()
        self._tell(on_progress, "encode", 1, 1)
        self._check(cancel)
        self._tell(on_progress, "denoise", 0, len(self.steps))
        self.denoise(on_progress=on_progress, cancel=cancel, controller=controller)
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
        self, pipe: Any, steps: int, sigmas: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, StreamSchedule]:
        """Per stream, the schedule and coefficients of a run of `steps` steps, or of custom sigmas a stream.

        The pipeline's own schedulers are copied, so their shift counts and their state does not change.
        """

    @abstractmethod
    def canvas(self, pipe: Any, short_edge: int | None = None) -> tuple[int, int]:
        """`(height, width)`: the model's own aspect ratio at a short edge in px, or its default canvas."""

    @abstractmethod
    def steps(self, pipe: Any, plan: Plan) -> tuple[StepInfo, ...]:
        """Every denoising step of a plan: its expert, noise levels, coefficients and guidance weights."""

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
        controller: Controller | None = None,
        prompt_embeds: torch.Tensor | None = None,
    ) -> Clip:
        """All three stages of a request. The arguments are those of `start` and `Run.denoise`.

        Raises:
            UserError: as `resolve`.
            Cancelled, RequestError: as `Run.make_latents` and `Run.make_clip`.
        """
        run = self.start(pipe, request, prompt_embeds=prompt_embeds)
        run.make_latents(on_progress=on_progress, cancel=cancel, controller=controller)
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
