"""The packed row layout of MiniMax-H3: `[text | conditions | audio | video]`."""

from __future__ import annotations

from collections.abc import Sequence

from videoaccel.pipelines.layout import Layout, Modality, Segment

Condition = tuple[Modality, tuple[int, int, int]]
"""A block of condition rows: its modality, and `(T, H, W)` in patches or `(channels, N, 1)` for sound."""


def h3_layout(
    *,
    text_rows: int,
    conditions: Sequence[Sequence[Condition]] = (),
    audio_grid: tuple[int, int, int],
    video_grid: tuple[int, int, int],
) -> Layout:
    """The layout of one request, from its geometry alone.

    Args:
        text_rows: tokens of the prompt with its labels and vision blocks.
        conditions: one entry a keyframe or reference, in packed order. A video reference with sound is two
            blocks, sound first, and stays one condition.
        audio_grid: `(channels, N, 1)`, N audio latents a channel.
        video_grid: `(T, H, W)` of the generated video, in patches.
    """
    segments: list[Segment] = []
    cursor = 0

    def add(
        role: str, modality: Modality, rows: int, grid: tuple[int, int, int] | None, index: int = 0
    ) -> None:
        nonlocal cursor
        segments.append(
            Segment(
                role=role,  # type: ignore[arg-type]
                modality=modality,
                start=cursor,
                stop=cursor + rows,
                grid=grid,
                index=index,
            )
        )
        cursor += rows

    add("text", "text", text_rows, None)
    for index, blocks in enumerate(conditions):
        for modality, grid in blocks:
            add("condition", modality, grid[0] * grid[1] * grid[2], grid, index)
    add("audio", "audio", audio_grid[0] * audio_grid[1] * audio_grid[2], audio_grid)
    add("video", "video", video_grid[0] * video_grid[1] * video_grid[2], video_grid)
    return Layout(segments=tuple(segments))
