"""A content-blind schedule: the same steps run in every clip, and the others are forecast from those."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from videoaccel.forward import ForwardCall
from videoaccel.pipelines.request import StepInfo, Streams


@dataclass(frozen=True, kw_only=True)
class Used:
    """A step that was taken: the velocity it was taken with, and whether that was the transformer's own."""

    step: StepInfo
    velocity: Streams
    dense: bool


Correction = Callable[[Streams, Sequence[Used]], Streams | None]
"""Called after a dense step: sample and steps from the third last dense one to this, to corrected streams."""


def spread(forwards: int, dense: int, *, warp: float = 1.0) -> tuple[int, ...]:
    """`dense` of `forwards` steps, first and last among them, evenly spaced in the index at `warp` 1.

    Over 1 they crowd at the start, under 1 at the end; where rounding would join two, the later moves on.
    """
    if not 1 <= dense <= forwards:
        raise ValueError(f"between 1 and {forwards} steps can run, not {dense}")
    if dense == 1:
        return (0,)
    found: list[int] = []
    for place in range(dense):
        index = round((forwards - 1) * (place / (dense - 1)) ** warp)
        # Leave room for those before and after.
        found.append(min(max(index, found[-1] + 1 if found else 0), forwards - dense + place))
    return tuple(found)


class StaticSchedule:
    """Runs the steps of `anchors` and forecasts the others by a polynomial in each stream's sigma.

    Args:
        anchors: step indices that run; step 0 always does.
        order: degree of the forecast: 0 holds, 1 is linear. Lower while there are too few anchors.
        correction: what may correct the sample after each dense step; None leaves it.
    """

    def __init__(
        self, anchors: Collection[int], *, order: int = 1, correction: Correction | None = None
    ) -> None:
        self.anchors, self.order, self.correction = frozenset(anchors) | {0}, order, correction
        self._used: list[Used] = []

    def velocity(self, call: ForwardCall) -> Streams:
        """Runs or forecasts both streams."""
        dense = call.step.index in self.anchors
        velocity = call.dense() if dense else self._forecast(call.step)
        self._used.append(Used(step=call.step, velocity=velocity, dense=dense))
        return velocity

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """Hands over to the correction after a dense step."""
        if not self._used[-1].dense:
            return None
        kept = [place for place, used in enumerate(self._used) if used.dense][-max(3, self.order + 1) :]
        self._used = self._used[kept[0] :]
        return None if self.correction is None else self.correction(latents, self._used)

    def _forecast(self, step: StepInfo) -> Streams:
        known = [used for used in self._used if used.dense][-(self.order + 1) :]
        made: Streams = {}
        for stream in known[-1].velocity:
            sigmas = [used.step.sigma[stream] for used in known]
            weights = lagrange(sigmas, step.sigma[stream])
            made[stream] = sum(w * used.velocity[stream] for w, used in zip(weights, known, strict=True))
        return made


def lagrange(places: Sequence[float], at: float) -> list[float]:
    """Weights of the values at `places` in the polynomial through them, at `at`."""
    weights = []
    for i, place in enumerate(places):
        weight = 1.0
        for j, other in enumerate(places):
            if j != i:
                weight *= (at - other) / (place - other)
        weights.append(weight)
    return weights
