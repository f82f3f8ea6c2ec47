"""What Wan is, and what a pipeline of it at hand serves: its task, its experts and its canvas grid."""

from __future__ import annotations

import math
from typing import Any

from videoaccel.errors import UserError, unknown
from videoaccel.pipelines.registry import FAMILIES

TASKS = FAMILIES["wan"].tasks
STREAMS = ("video",)
PIPELINES = {"t2v": "WanPipeline", "i2v": "WanImageToVideoPipeline"}
"""Task to the one pipeline class that serves it."""
TEXT_ROWS = 512
"""The stock call's `max_sequence_length`: text is padded to it."""


def served_task(pipe: Any) -> str:
    """The one task a Wan pipeline class serves."""
    return "i2v" if any(base.__name__ == PIPELINES["i2v"] for base in type(pipe).__mro__) else "t2v"


def experts(pipe: Any, task: str) -> tuple[str, ...]:
    """The transformer components that serve `task`, in the order they run.

    Raises:
        UserError: an unknown task, one of another pipeline class, or no transformer loaded.
    """
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if task != served_task(pipe):
        raise UserError(
            f"{type(pipe).__name__} serves {served_task(pipe)}, not {task}; load another checkpoint"
        )
    names = [name for name in ("transformer", "transformer_2") if getattr(pipe, name, None) is not None]
    if pipe.config.boundary_ratio is None:
        # Without a boundary the stock loop never reaches the second expert.
        names = [name for name in names if name == "transformer"]
    if not names:
        raise UserError("no transformer is loaded; load the whole checkpoint")
    return tuple(names)


def patch_size(pipe: Any) -> tuple[int, int, int]:
    """`(T, H, W)` of a patch, in latent cells."""
    model = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
    patch: tuple[int, int, int] = tuple(model.config.patch_size)
    return patch


def canvas_multiple(pipe: Any) -> int:
    """What height and width must be multiples of: VAE stride times patch, and the stock check's 16."""
    return math.lcm(16, pipe.vae_scale_factor_spatial * patch_size(pipe)[1])


def canvas_for(pipe: Any, short_edge: int | None = None) -> tuple[int, int]:
    """The default `(height, width)`, or the same shape at another short edge, on the model's own grid."""
    # The released checkpoints' 16:9 canvases are 480x832 and 704x1280; others keep 480x832's ratio.
    multiple = canvas_multiple(pipe)
    edge = 480 if short_edge is None else short_edge
    if edge < multiple:
        raise UserError(f"a short edge of {edge} px is too small; use at least {multiple}")
    return round(edge / multiple) * multiple, round(edge * 832 / 480 / multiple) * multiple
