"""A linear layer on FP8 codes: rows of the input and rows of the weight, each with a scale of its own.

Scales by row (by token, and by output channel) leave the matrix product, where every multiplication is of two
e4m3 codes, and are applied to its float32 sums: y = (x_codes @ w_codes^T) * x_scales * w_scales + bias. So
the error is that of rounding to codes, 1/16 of a value at most and some 2.5 % in the mean square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videoaccel.kernels.checks import together
from videoaccel.kernels.quantize_fp8 import E4M3, dequantize_fp8


def check_linear_fp8(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> None:
    """Raises ValueError for arguments that `linear_fp8` has no meaning for."""
    for name, x in (("codes", codes), ("weight", weight)):
        if x.dtype != E4M3:
            raise ValueError(f"{name} is {x.dtype}: quantise it with quantize_fp8, which gives e4m3")
    if codes.ndim != 3 or weight.ndim != 2 or codes.shape[2] != weight.shape[1]:
        raise ValueError(
            f"codes must be (B, L, K) and weight (N, K), not {tuple(codes.shape)} and {tuple(weight.shape)}"
        )
    for name, given, wanted in (
        ("scales", scales, codes.shape[:2]),
        ("weight_scales", weight_scales, weight.shape[:1]),
    ):
        if given.shape != wanted or given.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 {tuple(wanted)}, one a row, not {given.dtype} {tuple(given.shape)}"
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), not {tuple(bias.shape)}")
    together(codes=codes, scales=scales, weight=weight, weight_scales=weight_scales, bias=bias)


def linear_fp8_reference(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """(codes * scales) @ (weight * weight_scales)^T + bias, in float32, rounded once.

    Args:
        codes, scales: e4m3 (B, L, K) and float32 (B, L), as `quantize_fp8` gives them.
        weight, weight_scales: e4m3 (N, K) and float32 (N,), likewise.
        bias: (N,) or None.
        dtype: of the result.

    Returns:
        (B, L, N).

    Raises:
        ValueError: shapes, types or devices that don't fit.
    """
    check_linear_fp8(codes, scales, weight, weight_scales, bias)
    y = torch.nn.functional.linear(dequantize_fp8(codes, scales), dequantize_fp8(weight, weight_scales))
    return (y if bias is None else y + bias.to(y.dtype)).to(dtype)


def linear_fp8_scaled_mm(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The same through torch's `_scaled_mm`, which takes scales by row on Ada and later.

    On a device sums stay in the matrix unit ("fast accumulation") from end to end.

    Raises:
        ValueError: as `linear_fp8_reference`.
        RuntimeError: sizes that are no multiple of 16.
    """
    check_linear_fp8(codes, scales, weight, weight_scales, bias)
    batch, rows, inner = codes.shape
    y = torch._scaled_mm(
        codes.reshape(batch * rows, inner),
        weight.t(),
        scale_a=scales.reshape(-1, 1),
        scale_b=weight_scales.unsqueeze(0),
        out_dtype=dtype,
        use_fast_accum=codes.is_cuda,
    ).view(batch, rows, -1)
    # Not passed along: with scales by row the fused bias must be bfloat16, and H3's linears have none.
    return y if bias is None else y + bias.to(dtype)
