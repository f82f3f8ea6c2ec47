"""Windows of longer clips are clips of five frames: their latents, rows and layout."""

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3

from training.batches import Batcher
from training.skeleton import VIDEO_VAE, build_tokenizer
from training.video_vae import encode_moments


@torch.no_grad()
def test_a_chunk_opens_with_the_latents_of_a_clip_of_five_frames():
    torch.manual_seed(0)
    vae = AutoencoderKLMiniMaxH3(**VIDEO_VAE).eval()
    pixels = torch.randn(1, 3, 39, 32, 32)
    whole = encode_moments(vae, pixels)
    for chunk in range(3):
        alone = vae._encode(pixels[:, :, 17 * chunk : 17 * chunk + 5])
        torch.testing.assert_close(whole[:, :, 5 * chunk : 5 * chunk + 2], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_a_window_holds_two_latent_frames_and_the_sound_beside_them(seed, numbered):
    torch.manual_seed(seed)
    batcher = Batcher(numbered, build_tokenizer())
    batch = batcher.short().draw("t2va", 3)
    first = int(batch.video[0, 0, 0])
    assert first in (0, 5, 10)
    for rows in (batch.video, batch.cartoon):
        assert rows.shape[1] == 2 * 64
        assert rows[:, :64].eq(first).all() and rows[:, 64:].eq(first + 1).all()
    # Latent frame 5k begins at frame 17k of 24 a second; audio latents come at 40 a second.
    start = first / 5 * 17 / 24 * 40
    assert abs(float(batch.audio[0, 0, 0]) - start) <= 0.5
    left, right = batch.audio[0, :, 0].chunk(2)
    assert left.equal(right) and left.diff().eq(1).all()
    assert not batch.heard and len(batch.layout.audio) == batch.audio.shape[1]
    assert batcher.draw("t2va", 3).video.shape[1] == 12 * 64  # the clips themselves are drawn whole as before
