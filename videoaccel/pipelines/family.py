"""The family adapter: everything the rest of the package may know about a model.

A family answers for one model architecture: how a checkpoint loads, which component serves each task, where
its block stack is and what enters and leaves it, which rows of the sequence are what, what the scheduler's
coefficients are, and how a request runs stage by stage. No technique and no command knows a model's name;
adding a family is one file and one entry in `registry.FAMILIES`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from videoaccel.errors import UserError, unknown
from videoaccel.forward import Controller, ForwardCall, current_forward
from videoaccel.pipelines.components import Checkpoint
from videoaccel.pipelines.fitting import Fitting
from videoaccel.pipelines.layout import Layout, Segment
from videoaccel.pipelines.op_calls import ForwardOps
from videoaccel.pipelines.registry import FAMILIES
from videoaccel.pipelines.request import (
    CancelFlag,
    Cancelled,
    Clip,
    OnProgress,
    Plan,
    Progress,
    Reference,
    Request,
    RunTimings,
    StepInfo,
    Streams,
)
from videoaccel.pipelines.run import NO_CONTROLLERS, Run
from videoaccel.pipelines.schedule import StreamSchedule, stream_schedule

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "FAMILIES",
    "NO_CONTROLLERS",
    "BlockStack",
    "Cancelled",
    "Checkpoint",
    "Clip",
    "Controller",
    "Family",
    "ForwardCall",
    "ForwardOps",
    "FullSize",
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
    "RunTimings",
    "current_forward",
    "family_of",
    "family_served_by",
    "stream_schedule",
]


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
class FullSize:
    """A family's model at its released size with random weights: what can be timed without a checkpoint.

    Attributes:
        title: its name in reports.
        height, width: canvas in pixels, and `seconds` the length, that it is timed at unless asked otherwise.
        gigabytes: seconds and pixels of a frame to the decimal GB that building and running it takes.
        build: makes the pipeline, given `device`.
        prompt_embeds: the pipeline and L to `(1, L, D)` random text conditioning; no text encoder is built.
    """

    title: str
    height: int
    width: int
    seconds: float
    gigabytes: Callable[[float, float], float]
    build: Callable[..., Any]
    prompt_embeds: Callable[[Any, int], torch.Tensor]


class Family(ABC):
    """What the rest of the package may ask about a model architecture.

    Attributes:
        name: key in `FAMILIES`.
        streams: the generated streams.
    """

    name: ClassVar[str]
    streams: ClassVar[tuple[str, ...]]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task of the family, as its entry in `FAMILIES` says."""
        return FAMILIES[self.name].tasks

    @abstractmethod
    def load(
        self, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, task: str | None
    ) -> Any:
        """A pipeline on `device`, ready to run; `loading.load` is the way to load one.

        Args:
            checkpoint: one whose index names a pipeline class of this family.
            device: where it runs.
            dtype: precision of the weights.
            task: one of the family's; only its components need be loaded. None: those of every task.

        Raises:
            UserError: a component is missing or broken, or the checkpoint serves another task.
        """

    def shell(self, checkpoint: Checkpoint) -> Any:
        """A pipeline from a checkpoint's small files only, or None: requests are checked on the loaded one.

        `resolve`, `canvas`, `schedules` and `steps` answer on it as on the loaded pipeline; nothing runs.

        Raises:
            UserError: as `load`.
        """
        return None

    def full_size(self) -> FullSize:
        """What `bench` times where no checkpoint is given.

        Raises:
            UserError: the family builds no model with random weights.
        """
        raise UserError(f"{FAMILIES[self.name].title} is not built with random weights; give a checkpoint")

    def forward_ops(self) -> ForwardOps:
        """The ops of one forward at the released size and the default clip: what `doctor` estimates from.

        Nothing is built or fetched.

        Raises:
            UserError: the family doesn't say.
        """
        raise UserError(f"{FAMILIES[self.name].title} does not list its ops; give --model another family")

    def fittings(self, pipe: Any) -> list[Fitting]:
        """How kernels go into each transformer that is loaded, each once.

        Raises:
            UserError: the family takes none yet.
        """
        raise UserError(f"{FAMILIES[self.name].title} takes no kernels yet; use tier 'exact'")

    def sample_request(self, prompt: str, picture: Image.Image, task: str | None = None) -> Request:
        """A request for a benchmark: the least that `task` takes, with `picture` where it takes one.

        `resolve` checks it like any other; a task of another family is refused there.
        """
        return Request(prompt=prompt, task=task)

    def decodes(self, pipe: Any) -> bool:
        """Whether what `Run.decode` needs is loaded."""
        return getattr(pipe, "vae", None) is not None

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

    def trained(self, pipe: Any) -> bool:
        """False where the checkpoint says of itself that its weights were never trained."""
        return True

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
            UserError: as `resolve`, a component that the run needs is not loaded, or `prompt_embeds` is of
                another shape.
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
        """All three stages of a request, by the family alone: no technique begins, and there is no receipt.

        `Handle.run` is the way to run a request on an accelerated pipeline. The arguments are those of
        `start` and `Run.denoise`.

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
    module, _, attribute = FAMILIES[name].adapter.partition(":")
    family: Family = getattr(importlib.import_module(module), attribute)()
    return family


def family_served_by(class_name: str) -> Family | None:
    """The family that serves pipelines of a diffusers class, by its name; None where no family does."""
    for name, entry in FAMILIES.items():
        if class_name in entry.pipeline_classes:
            return family_named(name)
    return None


def family_of(pipe: Any) -> Family:
    """The family that serves a pipeline, by its class or the nearest of its bases.

    Raises:
        UserError: no family serves it.
    """
    for base in type(pipe).__mro__:
        family = family_served_by(base.__name__)
        if family is not None:
            return family
    raise UserError(
        f"{type(pipe).__name__} is not a supported pipeline; supported families: {', '.join(FAMILIES)}."
    )
