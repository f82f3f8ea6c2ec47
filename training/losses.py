"""What the transformer is trained on: velocities of clean clips, or those of a guided teacher."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training.batches import VIDEO_SHIFT, Batch, Noisy, add_noise, blank_prompts, draw_sigmas, predict
from training.cartoon import SCALE, row_weights

OBJECT_WEIGHT = 3.0
CARTOON_BLOCK = 5  # whose output the cartoon is read from
DROP_SHARE = 0.12


def stream_errors(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Mean squared velocity error of the video, its rows weighted, and of the audio."""
    video, audio = ((a - b).pow(2) for a, b in zip(got, want, strict=True))
    return {"video": (video.mean(-1) * weights).mean(), "audio": audio.mean()}


def drawn_error(got: torch.Tensor, want: torch.Tensor, reading: torch.Tensor) -> torch.Tensor:
    """`(B,)`: the part of a velocity's error that shows in the cartoon; outlines count, textures do not."""
    return ((got - want) @ reading).pow(2).mean(dim=(1, 2)) / SCALE


class Drawn:
    """The drawn error, weighed so that every noise level counts alike.

    It falls by a factor of twenty between pure noise, where nothing is known of an object, and the middle
    levels, where its outline is made exact. Each level's error is divided by its running mean (what Karras
    et al., 2024, "Analyzing and improving the training dynamics of diffusion models", learn with a network).

    Args:
        reading: `(4 C, CHANNELS)`, see `cartoon.readout`.
        levels: into how many steps noise levels are parted, half evenly in sigma and half along the schedule.
        memory: share of a running mean that an update leaves.
    """

    def __init__(self, reading: torch.Tensor, levels: int = 24, memory: float = 0.98) -> None:
        self.reading, self.levels, self.memory = reading, levels, memory
        self.means = torch.zeros(levels, device=reading.device)

    def places(self, sigma: torch.Tensor) -> torch.Tensor:
        """`(B,)` int64: the step of each noise level."""
        along = sigma / (VIDEO_SHIFT - (VIDEO_SHIFT - 1) * sigma)
        return ((along + sigma) / 2 * self.levels).long().clamp(0, self.levels - 1)

    def __call__(self, got: torch.Tensor, want: torch.Tensor, sigma: torch.Tensor) -> dict[str, torch.Tensor]:
        """`drawn`, the mean error as it is, and `drawn_evenly`, about 1: what the training minimises."""
        errors = drawn_error(got, want, self.reading).float()
        places = self.places(sigma)
        with torch.no_grad():
            zeros = torch.zeros_like(self.means)
            count = zeros.index_add(0, places, torch.ones_like(errors))
            fresh = zeros.index_add(0, places, errors) / count.clamp_min(1)
            # A level that is seen for the first time takes what it sees.
            kept = torch.where(self.means > 0, self.memory, 0.0)
            self.means = torch.where(count > 0, kept * self.means + (1 - kept) * fresh, self.means)
        even = (errors / self.means[places].clamp_min(1e-6)).mean()
        return {"drawn": errors.mean().detach(), "drawn_evenly": even}


def velocity_errors(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    batch: Batch,
    noisy: Noisy,
    drawn: Drawn,
) -> dict[str, torch.Tensor]:
    """What both kinds of training minimise: both streams' errors, and the video's that is drawn."""
    weights = row_weights(batch.cartoon, noisy.video_sigma, OBJECT_WEIGHT)
    return {**stream_errors(got, want, weights), **drawn(got[0], want[0], noisy.video_sigma)}


def flow_loss(
    networks, batch: Batch, blank: int, block_fn: Callable, drawn: Drawn
) -> dict[str, torch.Tensor]:
    """Velocity errors, with prompts dropped at random, and the error of the cartoon seen in the middle."""
    sigmas = draw_sigmas(len(batch.video), batch.video.device)
    noisy = add_noise(batch, sigmas)
    dropped = torch.rand(len(batch.video), device=batch.video.device) < DROP_SHARE
    states: list[torch.Tensor] = []
    ids = blank_prompts(batch, dropped, blank)
    velocities = predict(networks, batch, ids, noisy, block_fn, states)
    rows = states[CARTOON_BLOCK][:, batch.layout.video[batch.layout.conditions :]]
    away = networks["cartoon"](rows).float() - batch.cartoon
    targets = noisy.video_target, noisy.audio_target
    errors = velocity_errors(velocities, targets, batch, noisy, drawn)
    return {**errors, "cartoon": away.pow(2).mean() / SCALE}


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What is distilled: networks under guidance.

    Attributes:
        networks: the trained ones.
        guidance: weights of classifier-free guidance, video and audio.
        worse: the same networks after less training, if any; the video is also led away from what they
            predict (Karras et al., 2024, "Guiding a diffusion model with a bad version of itself").
        away: how far, in steps from `worse` to `networks`.
    """

    networks: torch.nn.ModuleDict
    guidance: tuple[float, float]
    worse: torch.nn.ModuleDict | None = None
    away: float = 0.0

    @torch.no_grad()
    def velocities(self, batch: Batch, noisy: Noisy, blank: int, block_fn: Callable) -> list[torch.Tensor]:
        """Guided velocities of video and audio."""
        everyone = torch.ones(len(batch.video), dtype=torch.bool, device=batch.video.device)
        told = predict(self.networks, batch, batch.token_ids, noisy, block_fn)
        untold = predict(self.networks, batch, blank_prompts(batch, everyone, blank), noisy, block_fn)
        guided = [b + g * (a - b) for a, b, g in zip(told, untold, self.guidance, strict=True)]
        if self.worse is not None:
            worse, _ = predict(self.worse, batch, batch.token_ids, noisy, block_fn)
            guided[0] = guided[0] + self.away * (told[0] - worse)
        return guided


def guided_loss(
    networks, teacher: Teacher, batch: Batch, blank: int, block_fn: Callable, drawn: Drawn
) -> dict[str, torch.Tensor]:
    """Distance to the teacher's velocity: the real pipeline has no guidance, so the weights get it."""
    noisy = add_noise(batch, draw_sigmas(len(batch.video), batch.video.device))
    targets = teacher.velocities(batch, noisy, blank, block_fn)
    velocities = predict(networks, batch, batch.token_ids, noisy, block_fn)
    return velocity_errors(velocities, targets, batch, noisy, drawn)
