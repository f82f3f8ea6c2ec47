"""A linear layer on FP8 codes with a scale for every 128 channels of a row, and for every 128 x 128 of the
weight.

The scales of DeepSeek-V3's checkpoints (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", 3.3.2). They
differ
along the sum, so each 128 terms are scaled before they are added up, in float32: one outlier costs the
precision of its block and not of its row. `linear_fp8` is the layer with scales by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videoaccel.kernels.checks import together, vector_of
from videoaccel.kernels.quantize_fp8 import BLOCK, E4M3, dequantize_fp8, quantize_rows


def check_linear_fp8_block(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> None:
    """Raises ValueError for arguments that `linear_fp8_block` has no meaning for."""
    for name, x in (("codes", codes), ("weight", weight)):
        if x.dtype != E4M3:
            raise ValueError(f"{name} is {x.dtype}: quantise it first, to e4m3")
    if codes.ndim != 3 or weight.ndim != 2 or codes.shape[2] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"codes must be (B, L, K) and weight (N, K), not {tuple(codes.shape)} and {tuple(weight.shape)}"
        )
    outer, blocks = weight.shape[0], -(-weight.shape[1] // BLOCK)
    for name, given, wanted in (
        ("scales", scales, (*codes.shape[:2], blocks)),
        ("weight_scales", weight_scales, (-(-outer // BLOCK), blocks)),
    ):
        if given.shape != wanted or given.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 {wanted}, one a block, not {given.dtype} {tuple(given.shape)}"
            )
    vector_of("bias", bias, outer)
    together(codes=codes, scales=scales, weight=weight, weight_scales=weight_scales, bias=bias)


def linear_fp8_block_reference(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """What codes and scales stand for, multiplied in float32, and the bias; rounded once.

    Args:
        codes, scales: e4m3 (B, L, K) and float32 (B, L, ceil(K / 128)), as `quantize_fp8(x, block=128)` gives
        them.
        weight, weight_scales: e4m3 (N, K) and float32 (ceil(N / 128), ceil(K / 128)), as `quantize_squares`
        does.
        bias: (N,) or None.
        dtype: of the result.

    Returns:
        (B, L, N).

    Raises:
        ValueError: shapes, types or devices that don't fit.
    """
    check_linear_fp8_block(codes, scales, weight, weight_scales, bias)
    wide = dequantize_squares(weight, weight_scales)
    y = torch.nn.functional.linear(dequantize_fp8(codes, scales), wide)
    return (y if bias is None else y + bias.to(y.dtype)).to(dtype)


def quantize_squares(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) to codes (N, K) and scales (ceil(N / 128), ceil(K / 128)).

    The convention is `quantize_fp8`'s, with a group of 128 x 128.

    Raises:
        ValueError: a weight that is no matrix, or empty.
    """
    if weight.ndim != 2 or not weight.numel():
        raise ValueError(f"weight must be (N, K), not {tuple(weight.shape)}")
    outer, inner = weight.shape
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, -inner % BLOCK, 0, -outer % BLOCK))
    high, wide = padded.shape[0] // BLOCK, padded.shape[1] // BLOCK
    squares = padded.view(high, BLOCK, wide, BLOCK).transpose(1, 2).reshape(high, wide, BLOCK * BLOCK)
    codes, scales = quantize_rows(squares)
    back = codes.view(high, wide, BLOCK, BLOCK).transpose(1, 2).reshape(padded.shape)
    return back[:outer, :inner].contiguous(), scales


def dequantize_squares(weight: Tensor, scales: Tensor) -> Tensor:
    """The float32 values that the codes and scales of `quantize_squares` stand for."""
    return dequantize_fp8(weight, scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]])
