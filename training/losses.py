"""What the transformer is trained on: velocities of clean clips, or those of a guided teacher."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training.batches import Batch, Noisy, add_noise, blank_prompts, draw_sigmas, predict
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
    """The part of a velocity's error that shows in the cartoon: outlines count, textures do not."""
    return ((got - want) @ reading).pow(2).mean() / SCALE


def velocity_errors(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    batch: Batch,
    noisy: Noisy,
    reading: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """What both kinds of training minimise: both streams' errors, and the video's that is drawn."""
    weights = row_weights(batch.cartoon, noisy.video_sigma, OBJECT_WEIGHT)
    return {**stream_errors(got, want, weights), "drawn": drawn_error(got[0], want[0], reading)}


def flow_loss(
    networks, batch: Batch, blank: int, block_fn: Callable, reading: torch.Tensor
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
    errors = velocity_errors(velocities, targets, batch, noisy, reading)
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
    networks, teacher: Teacher, batch: Batch, blank: int, block_fn: Callable, reading: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Distance to the teacher's velocity: the real pipeline has no guidance, so the weights get it."""
    noisy = add_noise(batch, draw_sigmas(len(batch.video), batch.video.device))
    targets = teacher.velocities(batch, noisy, blank, block_fn)
    velocities = predict(networks, batch, batch.token_ids, noisy, block_fn)
    return velocity_errors(velocities, targets, batch, noisy, reading)
