"""Latents that say where they are from, for tests of how batches are cut and combined."""

import pytest
import torch

from evals.world.spec import draw_clip
from training.cartoon import CHANNELS
from training.latents import Latents


@pytest.fixture
def numbered() -> Latents:
    """Six clips of 39 frames whose rows hold the number of their latent frame, or audio latent."""
    frames = torch.arange(12.0).repeat_interleave(64)[None, :, None]
    sound = torch.arange(65.0).repeat(2)[None, :, None]
    none = torch.zeros(6)
    return Latents(
        specs=[draw_clip(seed, frames=39) for seed in range(6)],
        video=frames.expand(6, -1, 96),
        audio=sound.expand(6, -1, 32),
        reference=none,
        stills=none,
        ends=none,
        end_images=none,
        cartoons=frames.expand(6, -1, CHANNELS),
        frames=39,
        latent_frames=12,
        audio_latents=65,
    )
