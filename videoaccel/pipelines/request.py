"""What goes into a generation and what comes out of it: Request, Plan, Clip and the progress between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from videoaccel.errors import RequestError
from videoaccel.media import to_uint8

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from videoaccel.pipelines.layout import Layout
    from videoaccel.pipelines.schedule import StreamSchedule

Streams = dict[str, "torch.Tensor"]
"""One tensor a generated stream: `"video"` always, `"audio"` where the family makes sound."""

NOT_FINITE = (
    "the checkpoint may be damaged, or the precision too low: download it again, or load it in float32"
)
"""What most likely is wrong where a model answers NaN or infinity, and what to do."""

RunStage = Literal["encode", "denoise", "decode"]
"""A stage of a run; a receipt's stages have the muxing as well, which comes after the run."""


class Cancelled(Exception):
    """The request's cancel flag was seen; nothing of the request is left behind on the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One reference of a request, decoded. Order in `Request.references` is part of the request.

    Attributes:
        kind: `"image"`, `"video"` or `"audio"`.
        image: RGB image, for `"image"`.
        frames: `(T, H, W, 3)` uint8, for `"video"`.
        fps: frames a second of `frames`.
        audio: `(channels, samples)` float32, mono or stereo: an `"audio"` reference, or a video's soundtrack.
        sample_rate: samples a second of `audio`, Hz.
    """

    kind: Literal["image", "video", "audio"]
    image: Image.Image | None = None
    frames: np.ndarray[Any, Any] | None = None
    fps: float | None = None
    audio: torch.Tensor | None = None
    sample_rate: int | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for. `None` means "the model's own default"; `Family.resolve` turns it into a `Plan`.

    What a technique takes from a request (an adapter, say) is a field here, checked and carried over to the
    plan by `resolve`: a technique sees both in `Technique.begin`, and the plan at every forward.

    Attributes:
        prompt: one caption.
        task: a task of the family (`registry.FAMILIES`); None reads it off the rest.
        references: for families that take some, in the order the model reads them.
        first_frame: RGB image the clip starts from.
        last_frame: RGB image the clip ends on.
        seed: seed of the initial noise, drawn on the CPU whatever the machine.
        steps: denoising steps as the stock pipeline counts them (see `Plan.forwards`).
        num_frames: frames to generate. Wins over `seconds` where both are given.
        seconds: length to generate, s.
        height, width: canvas in pixels; both or neither.
        negative_prompt: for families with a guidance branch.
        guidance: guidance scale, for families with a guidance branch.
        guidance_low_noise: guidance scale of the low-noise expert of a two-expert model.
        shift: per stream, the schedule's shift, as the scheduler's `set_shift` takes it.
        sigmas: per stream, the noise levels to run as they stand, strictly decreasing, the terminal 0
            included: N + 1 levels are N forwards. No shift is applied to them.
    """

    prompt: str
    task: str | None = None
    references: tuple[Reference, ...] = ()
    first_frame: Image.Image | None = None
    last_frame: Image.Image | None = None
    seed: int = 0
    steps: int | None = None
    num_frames: int | None = None
    seconds: float | None = None
    height: int | None = None
    width: int | None = None
    negative_prompt: str | None = None
    guidance: float | None = None
    guidance_low_noise: float | None = None
    shift: Mapping[str, float] | None = None
    sigmas: Mapping[str, Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request with every default filled in and every limit checked: what will be served.

    Attributes:
        family: name of the family adapter.
        task: the task served.
        height, width: canvas, pixels.
        num_frames: frames decoded.
        fps: frames a second.
        steps: denoising steps as the stock pipeline counts them.
        forwards: transformer calls of one guidance branch (H3: `steps - 1`).
        seed: seed of the initial noise.
        guidance: guidance scale of the first (high-noise) expert; None where there is no guidance.
        guidance_low_noise: guidance scale of the second expert; None where there is none.
        shift: per stream, the shift that was asked for; a stream that is absent runs the scheduler's own.
        sigmas: per stream, the noise levels that were asked for, the terminal 0 included.
        notes: what differs from what was asked, one sentence each (for the receipt).
    """

    family: str
    task: str
    height: int
    width: int
    num_frames: int
    fps: float
    steps: int
    forwards: int
    seed: int
    guidance: float | None = None
    guidance_low_noise: float | None = None
    shift: Mapping[str, float] = field(default_factory=dict)
    sigmas: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the clip, s."""
        return self.num_frames / self.fps


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """One denoising step, known before the run starts.

    Attributes:
        index: 0 to `forwards - 1`.
        component: pipeline component whose transformer runs it (the expert, on two-expert models).
        timestep: per stream, what the scheduler calls the timestep.
        sigma, sigma_next: per stream, noise level before and after the step.
        branches: per guidance branch, its weight in the guided velocity; `{"cond": 1.0}` without guidance.
        schedules: per stream, the schedule of the run.
    """

    index: int
    component: str
    timestep: Mapping[str, float]
    sigma: Mapping[str, float]
    sigma_next: Mapping[str, float]
    branches: Mapping[str, float]
    schedules: Mapping[str, StreamSchedule] = field(repr=False, compare=False)

    @property
    def coefficient(self) -> dict[str, float]:
        """Per stream, b_i = d x_final / d v_i of the scheduler, for the guided velocity.

        Raises:
            UserError: the scheduler is not linear in its model outputs (it draws noise or thresholds). A
                controller that needs this asks in `Technique.begin`, before anything has run.
        """
        return {name: schedule.coefficients[self.index] for name, schedule in self.schedules.items()}

    @property
    def carry(self) -> dict[str, float]:
        """Per stream, c_i = d x_final / d x of the sample after this step. Raises as `coefficient`.

        1 for Euler, mostly less for a multistep scheduler, which drops part of what `Controller.after_step`
        corrects.
        """
        return {name: schedule.carries[self.index] for name, schedule in self.schedules.items()}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a progress callback is told: at the start and end of a stage, and after each step.

    Attributes:
        stage: the stage in progress.
        done: units finished in this stage (steps while denoising; 0 or 1 otherwise).
        total: units of this stage.
        step_s: seconds the last step took, after device synchronisation; 0 outside denoising.
        elapsed_s: seconds since the run started.
    """

    stage: RunStage
    done: int
    total: int
    step_s: float
    elapsed_s: float


OnProgress = Callable[[Progress], None]
CancelFlag = Callable[[], bool]
"""Asked before each stage and each step; True stops the run (`threading.Event().is_set` fits)."""


@dataclass(kw_only=True)
class RunTimings:
    """Seconds of a run so far, after device synchronisation; `receipt.Timings` is the finished record.

    Attributes:
        encode_s, denoise_s, decode_s: per stage.
        step_s: one entry a denoising step.
    """

    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    step_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A finished clip.

    Attributes:
        frames: `(T, H, W, 3)` uint8 RGB.
        audio: `(2, N)` float32 in [-1, 1], or None for a family without sound.
        sampling_rate: Hz of `audio`, or None.
        fps: frames a second.
        latents: the final latents, one a stream, on the CPU, in the VAE's normalised space
            (video `(1, C, T', H', W')`, audio `(channels, C, N')`).
        initial_noise: the starting noise of the generated rows, one a stream, on the CPU.
        layout: the packed sequence that was denoised.
        plan: what was served.
        timings: seconds a stage and a step.
    """

    frames: np.ndarray[Any, Any]
    audio: np.ndarray[Any, Any] | None
    sampling_rate: int | None
    fps: float
    latents: Streams
    initial_noise: Streams
    layout: Layout
    plan: Plan
    timings: RunTimings


def finished_frames(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Decoded `(T, H, W, 3)` floats over [0, 1] as uint8, with the rounding of diffusers' `numpy_to_pil`.

    A frame at a time: fifteen seconds at 768p are 4.3 GB in float32, and whole-clip temporaries twice that.

    Raises:
        RequestError: a value that is not finite.
    """
    try:
        return np.stack([to_uint8(frame) for frame in frames])
    except ValueError as error:
        raise RequestError(f"the decoded {error}; no clip was made: {NOT_FINITE}") from error
