"""EasyCache: how much the output has moved for the input's movement, measured as it runs, decides."""

from __future__ import annotations

import torch

from videoaccel.forward import ForwardCall
from videoaccel.pipelines.request import StepInfo, Streams


class EasyCache:
    """Reuses while the output's predicted relative change, summed over skipped steps, is below `threshold`.

    Predicted: the input's change since the step before, times the slope (change of output over change of
    input) between the last two steps that ran, over the output's size. A reused output is the input plus the
    last difference between output and input.

    Restated from the authors' HunyuanVideo version, whose model has one forward a step as MiniMax-H3 has. The
    text of it that was read never keeps its first output, which would never let it reuse; this one does. Both
    streams are one vector. Outputs have the sign of those models, from data to noise: with the other sign,
    input plus difference would be another method.

    Args:
        threshold: the authors' is 0.025 for HunyuanVideo and 0.05 for Wan 2.1.
        warm_up: leading steps that always run; the last one does, too.

    Idea: https://github.com/H-EmbodVis/EasyCache.
    """

    def __init__(self, threshold: float, *, warm_up: int = 5) -> None:
        self.threshold, self.warm_up = threshold, warm_up
        self._sum = 0.0
        self._slope: float | None = None
        self._input: torch.Tensor | None = None  # of the step before
        self._ran: tuple[torch.Tensor, torch.Tensor] | None = None  # input and output of the last that ran

    def velocity(self, call: ForwardCall) -> Streams:
        """Runs or reuses both streams."""
        now = torch.cat([value.flatten() for value in call.latents.values()])
        skip = self._skips(call, now)
        self._input = now
        if skip:
            before, out = self._ran
            made = -(now + (out - before))
            parts = made.split([value.numel() for value in call.latents.values()])
            return {
                stream: part.view_as(value)
                for (stream, value), part in zip(call.latents.items(), parts, strict=True)
            }
        velocity = call.dense()
        out = -torch.cat([velocity[stream].flatten() for stream in call.latents])
        if self._ran is not None:
            before, older = self._ran
            self._slope = float((out - older).abs().mean() / (now - before).abs().mean())
        self._ran = now, out
        return velocity

    def _skips(self, call: ForwardCall, now: torch.Tensor) -> bool:
        step = call.step.index
        if step < self.warm_up or step >= call.plan.forwards - 1:
            self._sum = 0.0
            return False
        if self._slope is None:
            return False
        moved = float((now - self._input).abs().mean() / self._ran[1].abs().mean())
        self._sum += self._slope * moved
        if self._sum < self.threshold:
            return True
        self._sum = 0.0
        return False

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """None."""
        return None
