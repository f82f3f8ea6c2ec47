"""The video VAE's encoder as 2D convolutions, for training: the same weights and the same arithmetic.

cuDNN's 3D convolutions are slow at 16 to 96 channels, and the stock norm copies twice to isolate frames. With
frames on the batch axis the norm needs no copy, and a causal convolution over three frames is a 2D one over
their stacked channels. tests/training/test_fast_encoder.py holds it against the stock encoder.
"""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3


def _conv(module: torch.nn.Module, x: torch.Tensor, batch: int) -> torch.Tensor:
    """A causal 3D convolution of `(B * T, C, H, W)` frames."""
    weight, bias = module.weight.to(x.dtype), module.bias.to(x.dtype)
    taps, stride = weight.shape[2], module.stride
    if taps > 1:
        frames = x.unflatten(0, (batch, -1))
        padded = F.pad(frames, (0, 0, 0, 0, 0, 0, module.temporal_padding, 0))
        count = (padded.shape[1] - taps) // stride[0] + 1
        shifted = [padded[:, tap : tap + (count - 1) * stride[0] + 1 : stride[0]] for tap in range(taps)]
        x = torch.cat(shifted, dim=2).flatten(0, 1)
    weight = weight.transpose(1, 2).flatten(1, 2)
    x = x.contiguous(memory_format=torch.channels_last)
    side = module.spatial_padding
    if side and module.spatial_padding_mode != "constant":
        x, side = F.pad(x, (side,) * 4, mode=module.spatial_padding_mode), 0
    return F.conv2d(x, weight.contiguous(memory_format=torch.channels_last), bias, stride[1:], side)


def _norm(module: torch.nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
    return F.silu(
        F.group_norm(x, module.num_groups, module.weight.to(x.dtype), module.bias.to(x.dtype), module.eps)
    )


def encode_chunk(vae: AutoencoderKLMiniMaxH3, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Posterior moments `(B, 2C, T', h, w)` of one chunk of pixels `(B, 3, T, H, W)`, computed in `dtype`."""
    encoder, batch = vae.encoder, len(pixels)
    with torch.autocast(pixels.device.type, enabled=False):
        x = pixels.to(dtype).transpose(1, 2).flatten(0, 1).contiguous(memory_format=torch.channels_last)
        x = _conv(encoder.conv_in, x, batch)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                y = _conv(resnet.conv1, _norm(resnet.norm1, x), batch)
                y = _conv(resnet.conv2, _norm(resnet.norm2, y), batch)
                x = y + (x if resnet.conv_shortcut is None else _conv(resnet.conv_shortcut, x, batch))
            for down in block.downsamplers or ():
                if down.spatial_stride == 2:
                    x = F.pad(x, (0, 1, 0, 1), mode=down.spatial_padding_mode)
                x = _conv(down.conv, x, batch)
        x = _conv(encoder.conv_out, _norm(encoder.norm_out, x), batch).float()
    moments = x.unflatten(0, (batch, -1)).transpose(1, 2)
    with torch.autocast(pixels.device.type, enabled=False):
        return vae.quant_conv(moments.contiguous())
