"""The gated half of a SwiGLU feed-forward (Shazeer, 2020, "GLU Variants Improve Transformer").

One projection makes both halves, in diffusers' layout (`models.activations.SwiGLU`): what is gated first, the
gate second. Arithmetic is float32 (float64 where x is) and a result is rounded once; diffusers rounds
silu(gate) too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videoaccel.kernels.checks import rows_of
from videoaccel.kernels.quantize_fp8 import quantize_rows


def check_swiglu(x: Tensor) -> int:
    """The channels of the result. Raises ValueError for arguments that `swiglu` has no meaning for."""
    _, _, channels = rows_of("x", x)
    if channels % 2:
        raise ValueError(
            f"x has {channels} channels: it must hold two halves, what is gated and then the gate"
        )
    return channels // 2


def swiglu_reference(x: Tensor, *, quantize: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """x[..., :D] * silu(x[..., D:]), with silu(g) = g / (1 + exp(-g)).

    Args:
        x: (B, L, 2 D), of any stride.
        quantize: quantise the rows to e4m3 before they are rounded to the type of x.

    Returns:
        (B, L, D) in the type of x; with `quantize`, e4m3 codes (B, L, D) and float32 scales (B, L), as
        `quantize_fp8.quantize_rows` makes them.

    Raises:
        ValueError: x is not (B, L, 2 D).
    """
    check_swiglu(x)
    up, gate = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    y = up * torch.nn.functional.silu(gate)
    return quantize_rows(y) if quantize else y.to(x.dtype)
