"""FirstBlockCache, as in diffusers: the change of the first block's residual decides, the rest is held."""

from __future__ import annotations

import torch

from evals.lockstep import BlockCall
from evals.peers.stack import StackController, relative_change


class FirstBlockCache(StackController):
    """Runs the first block at each step, and the others where its residual has changed by over `threshold`.

    Otherwise what the others added last time is added again. The change is measured against the last step
    that ran whole, over all rows at once, text and conditions included. No warm-up and no limit on reuses in
    a row, as in the library. A NaN counts as no change there, so it reuses from then on (TRAPS 6); kept.

    Idea: ParaAttention's first block cache; `diffusers.hooks.FirstBlockCacheConfig`.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._head: torch.Tensor | None = None
        self._tail: torch.Tensor | None = None

    def hidden(self, call: BlockCall, x: torch.Tensor) -> torch.Tensor:
        first = call.blocks.run(x, 0, 1)
        residual = first - x
        if self._head is not None and not relative_change(residual, self._head) > self.threshold:
            return first + self._tail
        out = call.blocks.run(first, 1, call.blocks.count)
        self._head, self._tail = residual, out - first
        return out
