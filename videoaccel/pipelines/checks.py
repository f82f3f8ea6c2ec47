"""The checks of a request that every family makes, each with the one line that names the fix."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from PIL import Image

from videoaccel.errors import UserError, unknown
from videoaccel.pipelines.request import Reference, Request

MAX_ASPECT = 4
READ = "videoaccel.media.read_"
MAX_STEPS = 1000


def is_whole(value: object) -> TypeGuard[int]:
    """A real int: a bool is one to Python, and a mistake here."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(what: str, value: object, hint: str) -> float:
    """A finite number; UserError with `hint` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{what} must be a number, got {value!r}; {hint}")
    return float(value)


def check_seed(seed: object) -> int:
    """A seed that every generator takes: UserError unless it is a whole number from 0 to 2**63 - 1."""
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    return seed


def check_steps(steps: object, least: int, meaning: str) -> int:
    """A step count from `least` to `MAX_STEPS`; `meaning` says how many forwards N steps are."""
    if not is_whole(steps) or not least <= steps <= MAX_STEPS:
        raise UserError(
            f"steps must be a whole number from {least} to {MAX_STEPS}, got {steps!r} ({meaning})"
        )
    return steps


def check_num_frames(frames: object) -> int:
    """UserError unless it is a whole number of at least 1."""
    if not is_whole(frames) or frames < 1:
        raise UserError(f"num_frames must be a positive whole number, got {frames!r}")
    return frames


def check_canvas(request: Request, multiple: int, max_pixels: int) -> tuple[int, int] | None:
    """`(height, width)` in pixels as asked, on the model's grid; None where the request names none.

    Raises:
        UserError: one side alone, off the grid, narrower than 1:4, or more than `max_pixels` in all.
    """
    height, width = request.height, request.width
    if (height is None) != (width is None):
        raise UserError("give height and width together, or neither")
    if height is None or width is None:
        return None
    for name, value in (("height", height), ("width", width)):
        if not is_whole(value) or value < multiple or value % multiple:
            near = max(multiple, round(value / multiple) * multiple) if is_whole(value) else multiple
            raise UserError(f"{name} must be a positive multiple of {multiple}, got {value!r}; try {near}")
    check_aspect("the canvas", width, height)
    if height * width > max_pixels:
        scale = math.sqrt(max_pixels / (height * width)) / multiple
        fits = (max(1, math.floor(side * scale)) * multiple for side in (width, height))
        raise UserError(
            f"the canvas {width}x{height} is {height * width} pixels and this model makes at most "
            f"{max_pixels}; try {'x'.join(map(str, fits))}"
        )
    return height, width


def check_aspect(what: str, width: int, height: int) -> None:
    """UserError for a picture with no pixels or narrower than 1:4."""
    if min(width, height) < 1:
        raise UserError(f"{what} has no pixels ({width}x{height}); use another file")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UserError(f"{what} is {width}x{height}; crop it to between 1:{MAX_ASPECT} and {MAX_ASPECT}:1")


def check_keyframes(request: Request) -> None:
    """UserError for a first or last frame that is no image, or of a shape that no canvas has."""
    for name, image in (("first", request.first_frame), ("last", request.last_frame)):
        if image is not None:
            check_aspect(f"the {name} frame", *check_image(f"the {name} frame", image).size)


def check_references(request: Request) -> None:
    """UserError unless the references are a tuple or list of `Reference`."""
    if not isinstance(request.references, tuple | list):
        raise UserError(f"references must be a tuple of Reference, got {shown(request.references)}")
    for number, reference in enumerate(request.references, start=1):
        if not isinstance(reference, Reference):
            raise UserError(
                f"reference {number} must be a Reference, got {shown(reference)}; "
                f'give Reference(kind="image", image={READ}image(path)), say'
            )


def check_image(what: str, image: object) -> Image.Image:
    """A decoded image; UserError for a path, an array or anything else."""
    if not isinstance(image, Image.Image):
        fix = "wrap it in PIL.Image.fromarray" if hasattr(image, "shape") else f"read it with {READ}image"
        raise UserError(f"{what} must be a PIL image, got {shown(image)}; {fix}")
    return image


def check_has_prompt(request: Request) -> None:
    """UserError for a prompt without words, or one that is no text."""
    for name, text in (("prompt", request.prompt), ("negative prompt", request.negative_prompt)):
        if text is None and name == "negative prompt":
            continue
        if not isinstance(text, str):
            raise UserError(f"the {name} must be text, got {shown(text)}; a request takes one str")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            # Half of a UTF-16 pair, as a cut or wrongly decoded text has it.
            raise UserError(
                f"the {name} holds {text[error.start]!a} (number {error.start + 1}), which is no character; "
                "take it out, or decode the text as UTF-8"
            ) from error
    if not request.prompt.strip():
        raise UserError("the prompt is empty; describe the clip in a sentence")


def check_loaded(pipe: Any, task: str, needed: Collection[str], fix: str) -> None:
    """UserError with `fix` where a component that the task needs is not on the pipeline."""
    for name in needed:
        if getattr(pipe, name, None) is None:
            raise UserError(f"task {task} needs {name}, which is not loaded; {fix}")


def check_prompt_embeds(embeds: object, model: Any) -> None:
    """UserError unless it is None, or text conditioning `(1, L, D)` of the transformer's text width."""
    if embeds is None:
        return
    width = model.config.text_dim
    if not isinstance(embeds, torch.Tensor):
        raise UserError(
            f"prompt_embeds must be a tensor (1, L, {width}), got {shown(embeds)}; text is the prompt"
        )
    shape = tuple(embeds.shape)
    if len(shape) != 3 or shape[0] != 1 or shape[1] < 1 or shape[2] != width:
        raise UserError(
            f"prompt_embeds must be (1, L, {width}), got {shape}; give what this model's text encoder makes"
        )
    if not embeds.is_floating_point():
        raise UserError(f"prompt_embeds must be floating point, not {embeds.dtype}; convert it")


def shown(value: object) -> str:
    """A value of the wrong kind, short enough for one line."""
    words = repr(value)
    return f"the {type(value).__name__} {words}" if len(words) <= 60 else f"a {type(value).__name__}"


def check_shift(request: Request, streams: Collection[str]) -> dict[str, float]:
    """The request's shift, per stream.

    Raises:
        UserError: a stream that the family has not, or a shift that is no positive number.
    """
    shift = dict(request.shift or {})
    for stream, value in shift.items():
        if stream not in streams:
            raise unknown("stream of shift", stream, streams)
        if check_number(f"the {stream} shift", value, "try 5") <= 0:
            raise UserError(f"the {stream} shift must be above 0, got {value!r}; 1 shifts nothing")
    return {stream: float(value) for stream, value in shift.items()}


def check_sigmas(request: Request, streams: Collection[str]) -> dict[str, tuple[float, ...]]:
    """The request's noise levels, per stream.

    Raises:
        UserError: a stream that the family has not, one with a shift as well, levels that are not strictly
            decreasing from at most 1 to 0, or two streams with different numbers of them.
    """
    found: dict[str, tuple[float, ...]] = {}
    for stream, levels in (request.sigmas or {}).items():
        if stream not in streams:
            raise unknown("stream of sigmas", stream, streams)
        if stream in (request.shift or {}):
            raise UserError(f"{stream} has sigmas, which no shift is applied to; give one of the two")
        found[stream] = _levels(stream, levels)
    if len({len(levels) for levels in found.values()}) > 1:
        raise UserError("the sigmas of all streams must be equally many; one forward serves them all")
    return found


def _levels(stream: str, levels: Sequence[float]) -> tuple[float, ...]:
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise UserError(f"the {stream} sigmas must be a list of numbers, got {levels!r}")
    values = tuple(check_number(f"each of the {stream} sigmas", value, "try 1, 0.5, 0") for value in levels)
    falling = all(after < now for now, after in pairwise(values))
    if len(values) < 2 or not falling or values[0] > 1 or values[-1] != 0:
        said = ", ".join(f"{value:g}" for value in values)
        raise UserError(f"the {stream} sigmas must fall from at most 1 to a final 0, got {said}")
    return values


def steps_asked(request: Request, sigmas: dict[str, tuple[float, ...]], least: int) -> int | None:
    """The steps that were asked for, by number or by sigmas; None where neither says.

    Args:
        request: what was asked.
        sigmas: of `check_sigmas`.
        least: the family's fewest steps, which make one forward.

    Raises:
        UserError: the two disagree.
    """
    if not sigmas:
        return request.steps
    steps = len(next(iter(sigmas.values()))) - 2 + least
    if request.steps not in (None, steps):
        raise UserError(f"these sigmas are {steps} steps, not {request.steps!r}; leave out the steps")
    return steps
