"""What peers that look into the transformer have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from evals.lockstep import BlockCall
from videoaccel.pipelines.request import StepInfo, Streams


class StackController(ABC):
    """A controller that answers each forward with last hidden states of its own making."""

    def velocity(self, call: BlockCall) -> Streams:
        """Enters the stack, lets `hidden` go through it, and leaves it."""
        return call.blocks.leave(self.hidden(call, call.blocks.enter()))

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """None: these peers leave the sample alone."""
        return None

    @abstractmethod
    def hidden(self, call: BlockCall, x: torch.Tensor) -> torch.Tensor:
        """The last block's hidden states `(S, D)`, run or made up, from the first one's input."""


def relative_change(now: torch.Tensor, before: torch.Tensor) -> float:
    """Mean absolute difference over mean absolute value: the distance that most caches threshold."""
    return float((now - before).abs().mean() / before.abs().mean())
