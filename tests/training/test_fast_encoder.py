"""The 2D form of the encoder against diffusers' 3D one."""

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3

from training.fast_encoder import encode_chunk
from training.skeleton import VIDEO_VAE
from training.video_vae import encode_moments


@pytest.fixture(scope="module", params=["constant", "reflect"])
def vae(request):
    torch.manual_seed(0)
    vae = AutoencoderKLMiniMaxH3(**{**VIDEO_VAE, "spatial_padding_mode": request.param}).eval()
    for parameter in vae.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return vae


@pytest.mark.parametrize("frames", [1, 5, 17])
@torch.no_grad()
def test_a_chunk_equals_the_stock_encoder(vae, frames):
    pixels = torch.randn(2, 3, frames, 32, 48)
    want = vae.quant_conv(vae.encoder(pixels))
    torch.testing.assert_close(encode_chunk(vae, pixels, torch.float32), want, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_clip_equals_the_stock_encoding(vae):
    """17n + 5 frames: stock pads the last chunk and drops what the padding made."""
    pixels = torch.randn(1, 3, 39, 32, 32)
    torch.testing.assert_close(encode_moments(vae, pixels), vae._encode(pixels), atol=2e-5, rtol=1e-4)
