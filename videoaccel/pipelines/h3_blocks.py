"""The stock diffusers blocks of MiniMax-H3: a task's workflow, what it starts from, and what it packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from videoaccel.errors import UserError, unknown
from videoaccel.pipelines.h3_layout import Condition, h3_layout
from videoaccel.pipelines.h3_request import TASKS
from videoaccel.pipelines.layout import Layout
from videoaccel.pipelines.request import Reference

# The block a workflow cannot run without: how a pruned pipeline shows which task it kept.
_MARKERS = {
    "t2va": "MiniMaxH3NoKeyframeAnchorsStep",
    "fl2va": "MiniMaxH3ResizeStep",
    "ref2va": "MiniMaxH3Ref2VASetupStep",
}
_TRIGGERS: dict[str, dict[str, bool]] = {"t2va": {}, "fl2va": {"image": True}, "ref2va": {"references": True}}


def workflow_blocks(pipe: Any, task: str) -> dict[str, Any]:
    """The stock leaf blocks of a task's workflow, in order, by name.

    Raises:
        UserError: an unknown task, or a pipeline that was pruned to another workflow.
    """
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    blocks: dict[str, Any] = dict(pipe.blocks.get_execution_blocks(**_TRIGGERS[task]).sub_blocks)
    names = {base.__name__ for block in blocks.values() for base in type(block).__mro__}
    if _MARKERS[task] not in names:
        raise UserError(f"this pipeline was loaded for another workflow; load it with workflow={task!r}")
    return blocks


def stock_reference(reference: Reference) -> Any:
    """A `Reference` as the dataclass diffusers takes."""
    from diffusers.modular_pipelines.minimax_h3 import (
        MiniMaxH3AudioReference,
        MiniMaxH3ImageReference,
        MiniMaxH3VideoReference,
    )

    if reference.kind == "image":
        return MiniMaxH3ImageReference(
            image=None if reference.image is None else reference.image.convert("RGB")
        )
    if reference.kind == "video":
        return MiniMaxH3VideoReference(
            frames=reference.frames,
            fps=reference.fps,
            audio=reference.audio,
            sample_rate=reference.sample_rate,
        )
    return MiniMaxH3AudioReference(audio=reference.audio, sample_rate=reference.sample_rate)


def loop_of(blocks: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and the block of the denoise loop."""
    return next((name, block) for name, block in blocks.items() if hasattr(block, "loop_step"))


def block_after_loop(blocks: Mapping[str, Any]) -> Any:
    """The block that makes latents of the loop's buffers."""
    names = list(blocks)
    return blocks[names[names.index(loop_of(blocks)[0]) + 1]]


def initial_state(pipe: Any, inputs: dict[str, Any]) -> Any:
    """The state `ModularPipeline.__call__` would start from: the inputs, and the blocks' own defaults."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state = PipelineState()
    for parameter in pipe.blocks.inputs:
        value = inputs.get(parameter.name, parameter.default)
        if parameter.name is not None:
            state.set(parameter.name, value, parameter.kwargs_type)
    return state


def layout_of(state: Any, pipe: Any) -> Layout:
    """The layout of the encoded request, from the tensors its condition rows were packed from."""
    _, patch_h, patch_w = pipe.patch_size

    def grid(frames: int, height: int, width: int) -> tuple[int, int, int]:
        return frames, height // patch_h, width // patch_w

    visual = iter(state.get("condition_latents") or ())
    sound = iter(state.get("audio_condition_latents") or ())
    conditions: list[list[Condition]] = []
    for reference in state.get("normalized_references") or state.get("keyframes") or ():
        blocks: list[Condition] = []
        if getattr(reference, "has_audio", False):
            blocks.append(("audio", (pipe.audio_channels, len(next(sound)) // pipe.audio_channels, 1)))
        if getattr(reference, "kind", "image") != "audio":
            blocks.append(("video", grid(*next(visual).shape[2:5])))
        conditions.append(blocks)
    return h3_layout(
        text_rows=int(state.get("text_indices").numel()),
        conditions=conditions,
        audio_grid=(pipe.audio_channels, int(state.get("num_audio_latents")), 1),
        video_grid=grid(
            state.get("num_latent_frames"), state.get("latent_height"), state.get("latent_width")
        ),
    )
