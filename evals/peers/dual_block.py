"""DBCache, as in cache-dit: the first blocks decide, the last repair, the middle is held or forecast."""

from __future__ import annotations

import torch

from evals.lockstep import BlockCall
from evals.peers.stack import StackController, relative_change


class DualBlockCache(StackController):
    """Runs the first and last blocks at each step, and the middle where the first ones' residual has changed.

    Changed means by `threshold` or more since the last step that ran whole. Otherwise what the middle added
    is held, or forecast. The library measures no change during the warm-up. Its budget of accumulated change
    (`max_accumulated_residual_diff_threshold`, off by default and here) is spent by misses too (TRAPS 10).

    Args:
        threshold: the library's `residual_diff_threshold`.
        first, last: blocks run at each step. The library's default of 8 and 0 is for stacks of 40 to 60.
        warm_up: leading steps that run whole.
        order: derivatives of the forecast (its TaylorSeer calibrator); 0 holds.
    """

    def __init__(
        self, threshold: float, *, first: int = 1, last: int = 0, warm_up: int = 8, order: int = 0
    ) -> None:
        self.threshold, self.first, self.last, self.warm_up = threshold, first, last, warm_up
        self._probe: torch.Tensor | None = None
        self._middle = _Taylor(order)

    def hidden(self, call: BlockCall, x: torch.Tensor) -> torch.Tensor:
        blocks, step = call.blocks, call.step.index
        middle = blocks.count - self.last
        entered = blocks.run(x, 0, self.first)
        residual = entered - x
        if (
            step >= self.warm_up
            and self._probe is not None
            and relative_change(residual, self._probe) < self.threshold
        ):
            left = entered + self._middle.at(step)
        else:
            left = blocks.run(entered, self.first, middle)
            self._probe = residual
            self._middle.learn(step, left - entered)
        return blocks.run(left, middle, blocks.count)


class _Taylor:
    """cache-dit's series in the step index, divided differences of what was computed last.

    The library counts a tensor's steps from -1 at its first one, and has no derivative before count 2: the
    first two steps after the first never get one, however many were computed. Kept.
    """

    def __init__(self, order: int) -> None:
        self._order = order
        self._terms: list[torch.Tensor] = []
        self._first = self._last = 0

    def learn(self, step: int, value: torch.Tensor) -> None:
        before, self._terms = self._terms, [value]
        if not before:
            self._first = step
        elif step - self._first - 1 > 1:
            for older in before[: self._order]:
                self._terms.append((self._terms[-1] - older) / (step - self._last))
        self._last = step

    def at(self, step: int) -> torch.Tensor:
        return series(self._terms, step - self._last)


def series(terms: list[torch.Tensor], ahead: int) -> torch.Tensor:
    """A Taylor series `sum_k terms[k] * ahead^k / k!`, of value and derivatives a step."""
    total, weight = terms[0], 1.0
    for order, term in enumerate(terms[1:], 1):
        weight *= ahead / order
        total = total + weight * term
    return total
