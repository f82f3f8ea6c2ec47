"""Quantises rows to FP8 (e4m3, whose largest is 448), with a float32 scale for a row or a block of one.

The convention, the same in every op here that emits FP8:

- A group is a row, or 128 neighbouring channels of one (the last group of a row may be shorter). Its scale is
  its largest magnitude / 448, and at least 2^-96. `code * scale` gives the value back.
- The value times 1 / scale (a float32, correctly rounded) is rounded to the nearest code, ties to even.
  Nothing saturates: no value of a group is beyond its own largest.
- A group of zeros gets the scale 2^-96 and codes of zero. Groups whose largest magnitude is under 448 * 2^-96
  (about 5.7e-27) share that scale, so that neither it nor its reciprocal leaves the normal range of float32.
- A group that holds a NaN or an infinity is NaN all through, scale and codes. It stays loud: every output
  that it enters is NaN, and the request ends on a non-finite latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SCALE_MIN = 2.0**-96
BLOCK = 128
"""Channels of a group in the block variants."""


def check_quantize(x: Tensor, block: int | None) -> None:
    """Raises ValueError for arguments that `quantize_fp8` has no meaning for."""
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must be (..., channels) with a channel or more, not {tuple(x.shape)}")
    if block not in (None, BLOCK):
        raise ValueError(f"block is {block}: leave it out for a scale a row, or pass {BLOCK}")


def quantize_fp8_reference(x: Tensor, *, block: int | None = None) -> tuple[Tensor, Tensor]:
    """x as e4m3 codes and scales, by the convention above.

    Args:
        x: (..., D).
        block: None for a scale a row, 128 for one each 128 channels.

    Returns:
        Codes (..., D) and float32 scales, (...) for rows and (..., ceil(D / 128)) for blocks.

    Raises:
        ValueError: x without channels, or another block.
    """
    check_quantize(x, block)
    if block is None:
        return quantize_rows(x)
    padding = -x.shape[-1] % block
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, padding))
    groups = padded.view(*x.shape[:-1], (x.shape[-1] + padding) // block, block)
    codes, scales = quantize_rows(groups)
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), scales


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., D) to codes (..., D) and scales (...), one group a row."""
    x = x.to(torch.float32)
    largest = x.abs().amax(-1)
    scales = (largest / E4M3_MAX).clamp_min(SCALE_MIN)
    # amax carries a NaN, and an infinity becomes one: x / inf would quietly be 0.
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    return (x * (1 / scales).unsqueeze(-1)).to(E4M3), scales


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values that codes and scales, by row or by block, stand for."""
    values = codes.to(torch.float32)
    if scales.shape == codes.shape[:-1]:
        return values * scales.unsqueeze(-1)
    if scales.shape != (*codes.shape[:-1], -(-codes.shape[-1] // BLOCK)):
        raise ValueError(
            f"scales {tuple(scales.shape)} fit codes {tuple(codes.shape)} neither by row nor by block"
        )
    return values * scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
