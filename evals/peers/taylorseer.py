"""TaylorSeer, as in diffusers: every so many steps run whole, those between are a Taylor series."""

from __future__ import annotations

import torch

from evals.lockstep import BlockCall
from evals.peers.dual_block import series
from evals.peers.stack import StackController
from videoaccel.forward import ForwardCall
from videoaccel.pipelines.request import StepInfo, Streams


class _Factors:
    """The library's schedule and the divided differences of what it computed, in the step index."""

    def __init__(self, interval: int, order: int, warm_up: int) -> None:
        self.interval, self.order, self.warm_up = int(interval), order, warm_up
        self._terms: list[torch.Tensor] = []
        self._last = 0

    def computes(self, step: int) -> bool:
        # The first step after the warm-up is forecast and the one after it is not: the library's own phase.
        return step < self.warm_up or (step - self.warm_up - 1) % self.interval == 0

    def learn(self, step: int, value: torch.Tensor) -> None:
        before, self._terms = self._terms, [value]
        for older in before[: self.order]:
            self._terms.append((self._terms[-1] - older) / (step - self._last))
        self._last = step

    def at(self, step: int) -> torch.Tensor:
        return series(self._terms, step - self._last)


class TaylorSeerBlocks(StackController):
    """Forecasts the last block's hidden states: the library with `cache_identifiers` naming the blocks.

    Its default forecasts the outputs of attention alone and runs every feed-forward layer of a step; this
    spares all blocks. A forecast step counts as no work, though it enters and leaves the stack.

    Args:
        interval: the library's `cache_interval`.
        order: `max_order`. warm_up: `disable_cache_before_step`.
    """

    def __init__(self, interval: float, *, order: int = 1, warm_up: int = 3) -> None:
        self._factors = _Factors(int(interval), order, warm_up)

    def hidden(self, call: BlockCall, x: torch.Tensor) -> torch.Tensor:
        step = call.step.index
        if not self._factors.computes(step):
            return self._factors.at(step)
        out = call.blocks.run(x, 0, call.blocks.count)
        self._factors.learn(step, out)
        return out


class TaylorSeerVelocity:
    """Forecasts the velocities: the library's lite mode, with both of MiniMax-H3's heads cached.

    Lite mode as shipped names `proj_out` alone and gives zeros for the blocks, so the audio head would read
    zeros at each forecast step; `cache_identifiers` that name both heads repair that.
    """

    def __init__(self, interval: float, *, order: int = 1, warm_up: int = 3) -> None:
        self._streams: dict[str, _Factors] = {}
        self._make = lambda: _Factors(int(interval), order, warm_up)

    def velocity(self, call: ForwardCall) -> Streams:
        """Runs or forecasts both streams."""
        step = call.step.index
        if not self._make().computes(step):
            return {stream: factors.at(step) for stream, factors in self._streams.items()}
        made = call.dense()
        for stream, value in made.items():
            self._streams.setdefault(stream, self._make()).learn(step, value)
        return made

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """None."""
        return None
