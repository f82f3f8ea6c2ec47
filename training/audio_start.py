"""Starts the audio codec at a linear code: principal components of the world's sound, put into the networks.

From random weights the codec learns the hum and leaves the bounces out: they are short, and the encoder ends
in a layer norm that takes a frame's level away. The classes can hold a linear code exactly, though:
activations made straight, residual branches silent, convolutions as taps, and a wide constant beside the
signal in front of the norm. Training goes on from there.
"""

import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
    MiniMaxH3AudioAMPBlock,
    MiniMaxH3AudioResidualUnit,
    MiniMaxH3AudioSnake1d,
    MiniMaxH3AudioSnakeBeta,
)

_CONSTANT = 20.0  # beside the signal, so that the layer norm divides by it and not by the signal
_NOISE = 1e-3  # on weights that start unused, so that they can be learnt


def principal_code(waves: torch.Tensor, hop: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best linear code of frames.

    Args:
        waves: `(B, N)`, N a multiple of `hop`. hop: samples a frame. size: components K.

    Returns:
        Components `(K, hop)`, orthonormal, and the standard deviation `(K,)` of each one's coefficient.
    """
    frames = waves.reshape(-1, hop).double()
    values, vectors = torch.linalg.eigh(frames.T @ frames / len(frames))
    order = values.argsort(descending=True)[:size]
    return vectors[:, order].T.float(), values[order].clamp_min(1e-12).sqrt().float()


def _set(conv: torch.nn.Module, weight: torch.Tensor) -> None:
    """Give a weight-normed convolution this weight, and a little noise where it is silent."""
    noisy = weight + _NOISE * torch.randn_like(weight)
    conv.weight_v.copy_(noisy)
    # torch's weight_norm normalises over all dimensions but the first.
    conv.weight_g.copy_(noisy.flatten(1).norm(dim=1).view_as(conv.weight_g))
    if conv.bias is not None:
        conv.bias.zero_()


def _straighten(vae: AutoencoderKLMiniMaxH3Audio) -> None:
    for module in vae.modules():
        if isinstance(module, MiniMaxH3AudioSnake1d):
            module.alpha.fill_(0.02)
        elif isinstance(module, MiniMaxH3AudioSnakeBeta):
            module.alpha.fill_(-4.0)
        elif isinstance(module, MiniMaxH3AudioResidualUnit):
            module.block[-1].weight_g.zero_()
            module.block[-1].bias.zero_()
        elif isinstance(module, MiniMaxH3AudioAMPBlock):
            for conv in module.convs2:
                conv.weight_g.zero_()
                conv.bias.zero_()
    for layer in (vae.pre_block.attn.proj, vae.pre_block.mlp.w2):
        layer.weight.zero_()
        layer.bias.zero_()


@torch.no_grad()
def start_from(vae: AutoencoderKLMiniMaxH3Audio, components: torch.Tensor, deviations: torch.Tensor) -> None:
    """Write a linear code into a fresh codec of two strides; its latents have unit variance.

    Args:
        vae: changed in place.
        components: `(K, hop)` with K the latent channels. deviations: `(K,)`, see `principal_code`.

    Raises:
        ValueError: a codec of another number of strides, or too narrow to hold the code.
    """
    config = vae.config
    if len(config.encoder_rates) != 2 or len(config.decoder_rates) != 2:
        raise ValueError("the linear start is written for codecs of two strides")
    (fine, coarse), size = config.encoder_rates, config.latent_channels
    if (
        tuple(config.decoder_rates) != (coarse, fine)
        or config.decoder_dim // 2 < fine
        or config.latent_dim < 2 * size
    ):
        raise ValueError("the codec is too narrow for the linear start, or its strides are not mirrored")
    _straighten(vae)
    code = components / deviations[:, None]
    _start_encoder(vae, code, fine, coarse)
    _start_decoder(vae, components * deviations[:, None], fine, coarse)


def _start_encoder(vae: AutoencoderKLMiniMaxH3Audio, code: torch.Tensor, fine: int, coarse: int) -> None:
    size = len(code)
    first, down_fine, down_coarse, _, last = (vae.encoder.block[i] for i in (0, 1, 2, 3, 4))
    taps = torch.zeros_like(first.weight_v)
    taps[0, 0, taps.shape[2] // 2] = 1.0
    _set(first, taps)
    # The first stride keeps samples of each `fine`, evenly spread; the world's sound is far below their rate.
    conv = down_fine.block[-1]
    taps = torch.zeros_like(conv.weight_v)
    picks = [round(c * fine / taps.shape[0]) for c in range(taps.shape[0])]
    for channel, pick in enumerate(picks):
        taps[channel, 0, conv.padding[0] + pick] = 1.0
    _set(conv, taps)
    # The second sums them with the code's weights: an integral over the frame, by the rule of those picks.
    conv = down_coarse.block[-1]
    taps = torch.zeros_like(conv.weight_v)
    grid = code.view(size, coarse, fine)
    for channel, pick in enumerate(picks):
        taps[:size, channel, conv.padding[0] : conv.padding[0] + coarse] = (
            grid[:, :, pick] * fine / len(picks)
        )
    _set(conv, taps)
    taps = torch.zeros_like(last.weight_v)
    taps[torch.arange(size), torch.arange(size), taps.shape[2] // 2] = 1.0
    _set(last, taps)
    constant = _CONSTANT * (1 - 2 * (torch.arange(len(last.bias) - size) % 2)).to(last.bias)
    last.bias[size:] = constant
    # The norm: the constants fix its mean near 0 and its deviation at this value.
    deviation = torch.cat([torch.zeros(size).to(constant), constant]).std(unbiased=False)
    project = vae.pre_block.proj
    project.weight.copy_(_NOISE * torch.randn_like(project.weight))
    project.weight[torch.arange(size), torch.arange(size)] = deviation
    project.bias.zero_()
    vae.mean_proj.weight.copy_(torch.eye(size)[:, :, None])
    vae.mean_proj.bias.zero_()


def _start_decoder(vae: AutoencoderKLMiniMaxH3Audio, shapes: torch.Tensor, fine: int, coarse: int) -> None:
    size, decoder = len(shapes), vae.decoder
    vae.dec_in_proj.weight.copy_(_NOISE * torch.randn_like(vae.dec_in_proj.weight))
    vae.dec_in_proj.weight[torch.arange(size), torch.arange(size), 0] = 1.0
    vae.dec_in_proj.bias.zero_()
    taps = torch.zeros_like(decoder.conv_pre.weight_v)
    taps[torch.arange(size), torch.arange(size), taps.shape[2] // 2] = 1.0
    _set(decoder.conv_pre, taps)
    # Up by `coarse`: channel c of the middle is sample c of `fine`. Then up by `fine`: lay them out.
    up = decoder.ups[0][0]
    taps = torch.zeros_like(up.weight_v)
    grid = shapes.view(size, coarse, fine)
    taps[:size, :fine, up.padding[0] : up.padding[0] + coarse] = grid.transpose(1, 2)
    _set(up, taps)
    up = decoder.ups[1][0]
    taps = torch.zeros_like(up.weight_v)
    for sample in range(fine):
        taps[sample, 0, up.padding[0] + sample] = 1.0
    _set(up, taps)
    taps = torch.zeros_like(decoder.conv_post.weight_v)
    taps[0, 0, taps.shape[2] // 2] = 1.0
    _set(decoder.conv_post, taps)
