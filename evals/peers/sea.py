"""SeaCache, as in diffusers: the change of the sample's signal part decides, the residual is forecast."""

from __future__ import annotations

import torch

from evals.batched import PATCH
from evals.lockstep import BlockCall
from evals.peers.stack import StackController
from evals.sampling import unpatchify

_TINY = 1e-16


class SeaCache(StackController):
    """Skips the stack while the summed change of the video sample, filtered for signal, is below `threshold`.

    The filter is a Wiener filter for a power-law spectrum at the step's noise level. It sees the video alone,
    so sound is reused where the picture allows it. The change counts from each step to the next, and the sum
    starts again at each step that runs.

    Args:
        threshold: of the summed relative L1 change.
        order: 0 holds the stack's residual, 1 extends its last two linearly in the step index.
        first, last: steps at either end that always run.
        most: skips in a row; 0 for no limit.
        power: exponent of the spectrum.

    Idea: https://huggingface.co/papers/2602.18993; `diffusers.hooks.SeaCacheConfig`.
    """

    def __init__(
        self,
        threshold: float,
        *,
        order: int = 1,
        first: int = 1,
        last: int = 1,
        most: int = 2,
        power: float = 3.0,
    ) -> None:
        self.threshold, self.order, self.first, self.last = threshold, order, first, last
        self.most, self.power = most, power
        self._before: torch.Tensor | None = None
        self._sum, self._skipped = 0.0, 0
        self._residuals: list[tuple[int, torch.Tensor]] = []

    def hidden(self, call: BlockCall, x: torch.Tensor) -> torch.Tensor:
        step = call.step.index
        if not self._runs(call):
            self._skipped += 1
            return x + self._forecast(step)
        out = call.blocks.run(x, 0, call.blocks.count)
        self._skipped = 0
        self._residuals = [*self._residuals, (step, out - x)][-(self.order + 1) :]
        return out

    def _runs(self, call: BlockCall) -> bool:
        step = call.step.index
        now, before = self._indicator(call), self._before
        self._before = now
        forced = (
            before is None
            or step < self.first
            or step >= call.plan.forwards - self.last
            or (self.most > 0 and self._skipped >= self.most)
        )
        if not forced:
            change = float((now - before).abs().mean() / (before.abs().mean() + _TINY))
            self._sum += change
            forced = not self._sum < self.threshold
        if forced:
            self._sum = 0.0
        return forced

    def _indicator(self, call: BlockCall) -> torch.Tensor:
        frames, height, width = call.layout.stream("video").grid
        assert height == width  # the world's canvas
        rows = call.latents["video"]
        video = unpatchify(rows, frames * PATCH[0], height * PATCH[1]).movedim(0, -1)
        return signal_part(video, call.step.sigma["video"], self.power)

    def _forecast(self, step: int) -> torch.Tensor:
        last, residual = self._residuals[-1]
        if len(self._residuals) < 2:
            return residual
        older, before = self._residuals[-2]
        return residual + (residual - before) * ((step - last) / (last - older))


def signal_part(video: torch.Tensor, sigma: float, power: float) -> torch.Tensor:
    """The filtered sample, of the shape `(T, H, W, C)` it is given.

    The gain of a frequency is the product over axes of `a S / (a^2 S + s^2)`, with `a = 1 - s`, `s = sigma`
    and `S = 1 / |f|^power`, over its mean.
    """
    sigma = min(max(sigma, 1e-6), 1 - 1e-6)
    gain = torch.ones((), device=video.device)
    for size in video.shape[:3]:
        frequency = torch.fft.fftfreq(size, device=video.device).abs()
        spectrum = 1 / (frequency**power + _TINY)
        axis = (1 - sigma) * spectrum / ((1 - sigma) ** 2 * spectrum + sigma**2 + _TINY)
        gain = gain[..., None] * axis
    gain = (gain / gain.mean())[..., None]
    axes = (0, 1, 2)
    return torch.fft.ifftn(torch.fft.fftn(video, dim=axes) * gain, dim=axes).real
