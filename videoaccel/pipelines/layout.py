"""Which rows of a transformer's sequence are text, condition, audio and video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["text", "condition", "audio", "video"]
Modality = Literal["text", "video", "audio"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of consecutive rows that belong together.

    Attributes:
        role: `text`, `condition` (a keyframe or reference, which the sampler never writes), or a stream.
        modality: what the rows hold; a condition can hold video or audio.
        start, stop: rows `[start, stop)` of the sequence.
        grid: `(T, H, W)` in patches, row-major, for video; `(channels, N, 1)` for audio; None for text.
        index: which condition this is, counted over the conditions in packed order; 0 otherwise.
    """

    role: Role
    modality: Modality
    start: int
    stop: int
    grid: tuple[int, int, int] | None = None
    index: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The whole sequence, as consecutive segments in packed order.

    Attributes:
        segments: in order, without gaps; several references are several segments.
        cross_rows: rows read through cross-attention, which are not in the sequence (Wan's text).
    """

    segments: tuple[Segment, ...]
    cross_rows: int = 0

    def __post_init__(self) -> None:
        cursor = 0
        for segment in self.segments:
            if segment.start != cursor or segment.stop < segment.start:
                raise ValueError(f"Segments must be consecutive: row {cursor} expected, got {segment}.")
            if (
                segment.grid is not None
                and segment.grid[0] * segment.grid[1] * segment.grid[2] != segment.rows
            ):
                raise ValueError(f"The grid of a segment must hold its rows, got {segment}.")
            cursor = segment.stop

    @property
    def rows(self) -> int:
        """Rows of the sequence, L."""
        return self.segments[-1].stop if self.segments else 0

    def of(self, role: Role) -> tuple[Segment, ...]:
        """The segments of one role, in packed order."""
        return tuple(segment for segment in self.segments if segment.role == role)

    def count(self, role: Role) -> int:
        """Rows of one role."""
        return sum(segment.rows for segment in self.of(role))

    def stream(self, name: Literal["audio", "video"]) -> Segment:
        """The one segment of a generated stream.

        Raises:
            KeyError: the family generates no such stream.
        """
        found = self.of(name)
        if len(found) != 1:
            raise KeyError(f"This layout generates {len(found)} {name} segments.")
        return found[0]
