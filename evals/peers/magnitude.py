"""MagCache, as in diffusers: how a calibration run's residual changes in size decides, and it is held."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evals.lockstep import BlockCall, Job, Lockstep
from evals.peers.stack import StackController
from evals.world.spec import ClipSpec


class MagCache(StackController):
    """Skips the stack while the error that the ratios predict, summed over skipped steps, is small enough.

    The prediction knows the step and nothing of the clip: every clip of a sweep gets the same schedule
    (TRAPS 16).

    Args:
        threshold: of the summed error.
        ratios: of each step, the mean over rows of the residual's norm over the step before's; `calibrate`.
        most: skips in a row, the library's `max_skip_steps`.
        retention: leading share of the steps that always runs.
    """

    def __init__(
        self, threshold: float, ratios: Sequence[float], *, most: int = 3, retention: float = 0.2
    ) -> None:
        self.threshold, self.ratios, self.most, self.retention = threshold, ratios, most, retention
        self._residual: torch.Tensor | None = None
        self._reset()

    def _reset(self) -> None:
        self._ratio, self._error, self._skipped = 1.0, 0.0, 0

    def hidden(self, call: BlockCall, x: torch.Tensor) -> torch.Tensor:
        step, steps = call.step.index, call.plan.forwards
        if len(self.ratios) != steps:
            raise ValueError(f"{len(self.ratios)} ratios for {steps} forwards; calibrate with as many")
        if step >= int(self.retention * steps + 0.5):
            self._ratio *= self.ratios[step]
            self._skipped += 1
            self._error += abs(1.0 - self._ratio)
            if self._residual is not None and self._error <= self.threshold and self._skipped <= self.most:
                return x + self._residual
            self._reset()
        out = call.blocks.run(x, 0, call.blocks.count)
        self._residual = out - x
        return out


class _Measure(StackController):
    """Runs every step and takes the ratios down."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self._residual: torch.Tensor | None = None

    def hidden(self, call: BlockCall, x: torch.Tensor) -> torch.Tensor:
        out = call.blocks.run(x, 0, call.blocks.count)
        residual, before = out - x, self._residual
        if before is None:
            self.ratios.append(1.0)
        else:
            norms = residual.float().norm(dim=-1), before.float().norm(dim=-1)
            self.ratios.append(float((norms[0] / (norms[1] + 1e-8)).mean()))
        self._residual = residual
        return out


def calibrate(lockstep: Lockstep, specs: Sequence[ClipSpec], forwards: int, **options: object) -> list[float]:
    """The ratios of a schedule, averaged over clips; the library takes those of one.

    Args:
        lockstep: the harness. specs: clips to measure. forwards: of the schedule.
        options: of `Lockstep.run`.
    """
    measures = [_Measure() for _ in specs]
    jobs = [
        Job(spec=spec, forwards=forwards, controllers={"measure": measure})
        for spec, measure in zip(specs, measures, strict=True)
    ]
    lockstep.run(jobs, **options)
    return torch.tensor([measure.ratios for measure in measures]).mean(0).tolist()
