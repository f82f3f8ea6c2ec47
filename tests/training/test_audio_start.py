"""The audio codec's start against the linear code it stands for, computed directly."""

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3Audio

from evals.world.render import soundtracks
from evals.world.spec import draw_clip
from training.audio_start import principal_code, start_from
from training.skeleton import AUDIO_VAE

HOP = 800


def ratio_db(want: torch.Tensor, got: torch.Tensor) -> float:
    return float(10 * torch.log10(want.pow(2).sum() / (want - got).pow(2).sum()))


@pytest.fixture(scope="module")
def sounds() -> torch.Tensor:
    specs = [draw_clip(seed) for seed in range(200)]
    specs = [spec for spec in specs if any(item.motion == "bounces" for item in spec.objects)][:30]
    return soundtracks(specs, 65 * HOP).flatten(0, 1)


def test_components_are_the_best_linear_code_of_their_size(sounds):
    """Eckart-Young: what they miss is the energy of the singular values left out."""
    components, deviations = principal_code(sounds, HOP, 8)
    torch.testing.assert_close(components @ components.T, torch.eye(8), atol=1e-5, rtol=0)
    frames = sounds.reshape(-1, HOP).double()
    left = torch.linalg.svdvals(frames)[8:].pow(2).sum()
    code = components.double()
    torch.testing.assert_close((frames - frames @ code.T @ code).pow(2).sum(), left, rtol=1e-3, atol=0)
    torch.testing.assert_close((frames @ code.T).pow(2).mean(0).sqrt().float(), deviations, rtol=1e-3, atol=0)


def test_the_codec_starts_near_the_linear_code(sounds):
    """Before any training: latents and sound follow the linear code, so a bounce is heard."""
    torch.manual_seed(0)
    components, deviations = principal_code(sounds[:-8], HOP, AUDIO_VAE["latent_channels"])
    vae = AutoencoderKLMiniMaxH3Audio(**AUDIO_VAE).eval()
    start_from(vae, components, deviations)
    held = sounds[-8:]
    with torch.no_grad():
        latents = vae.encode(held[:, None]).latent_dist.mode()
        decoded = vae.decode(latents).sample[:, 0]
    frames = held.reshape(8, -1, HOP)
    want = (frames @ components.T / deviations).transpose(1, 2)
    linear = (frames @ components.T @ components).reshape(held.shape)
    assert ratio_db(want, latents) > 10
    assert ratio_db(linear, decoded) > 10
    # The default start, for comparison, holds nothing of the sound.
    torch.manual_seed(0)
    fresh = AutoencoderKLMiniMaxH3Audio(**AUDIO_VAE).eval()
    with torch.no_grad():
        assert ratio_db(held, fresh(held[:, None]).sample[:, 0]) < 1


def test_a_codec_of_other_strides_is_refused(sounds):
    vae = AutoencoderKLMiniMaxH3Audio(
        **{
            **AUDIO_VAE,
            "encoder_rates": (8, 10, 10),
            "decoder_rates": (10, 10, 8),
            "decoder_kernel_sizes": (20, 20, 16),
        }
    )
    with pytest.raises(ValueError, match="two strides"):
        start_from(vae, *principal_code(sounds, HOP, AUDIO_VAE["latent_channels"]))
