"""What the ops' tests share: arguments of any shape, stride and content, and how near a result has to be.

The references are float64 and plain; nothing of them comes from the package. `size` is the sum of the
magnitudes of what was added up: float32 arithmetic errs in proportion to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
FLOAT32_ERROR = 4e-6
"""Of float32 arithmetic over rows as long as those here, as a share of `size`."""
BATCHES, ROWS = (1, 2, 3, 0), (1, 2, 3, 5, 0)
"""Sampled, not drawn as integers, of which most would be 0: a call without rows proves little."""
STRIDES = ("contiguous", "sliced", "turned", "gaps", "expanded")


def laid_out(x: Tensor, how: str) -> Tensor:
    """The values of `x` (B, L, D) in memory laid out another way; what lies between them is NaN."""
    batch, rows, channels = x.shape
    if how == "sliced":
        wide = x.new_full((batch, rows + 1, channels + 5), torch.nan)
        view = wide[:, 1:, 3 : 3 + channels]
    elif how == "turned":
        view = x.new_full((rows, batch, channels), torch.nan).transpose(0, 1)
    elif how == "gaps":
        view = x.new_full((batch, rows, 2 * channels), torch.nan)[..., ::2]
    elif how == "expanded":
        return x[:1].expand(batch, rows, channels)
    else:
        return x.contiguous()
    return view.copy_(x)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers from a seed."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return made.to(dtype)


def spoil(x: Tensor, what: str) -> Tensor:
    """`x` (B, L, D) with its last row of the first item made special; one without rows is left alone."""
    if x.numel():
        row = x[0, -1]
        if what == "zero":
            row.zero_()
        elif what == "nan":
            row[-1] = torch.nan
        elif what == "inf":
            row[0] = torch.inf
        elif what == "tiny":
            row.mul_(1e-6)
    return x


def assert_close(got: Tensor, want: Tensor, size: Tensor) -> None:
    """`got` is the float64 `want`, computed in float32 and rounded once to its own type."""
    limits = torch.finfo(got.dtype)
    assert got.shape == want.shape
    largest = want.abs() > limits.max
    rounding = limits.eps / 2 * want.abs() + limits.smallest_normal * limits.eps
    error = (got.double() - want).abs()
    near = error <= rounding * 1.001 + FLOAT32_ERROR * size
    neither = ~want.isfinite() & ~got.isfinite()
    # What doesn't fit into the type is infinite, never cut off.
    over = largest & got.isinf()
    wrong = ~(near | neither | over)
    assert not wrong.any(), f"{int(wrong.sum())} wrong, the first at {wrong.nonzero()[0].tolist()}"
    assert not got[want.isnan()].isfinite().any()


def assert_quantized(codes: Tensor, scales: Tensor, want: Tensor, size: Tensor) -> None:
    """Codes (..., D) and scales (...) are float64 `want` as `quantize_fp8` says, one group a row."""
    assert codes.dtype == E4M3 and scales.dtype == torch.float32
    assert codes.shape == want.shape and scales.shape == want.shape[:-1]
    whole = want.isfinite().all(-1)
    assert scales[~whole].isnan().all() and codes.float()[~whole].isnan().all(), "a NaN has to stay loud"
    slack = FLOAT32_ERROR * size.amax(-1)
    largest = want.abs().amax(-1)
    expected = (largest / 448).clamp_min(2.0**-96)
    assert ((scales.double() - expected).abs() <= expected * 1e-6 + slack / 448)[whole].all()
    scale = scales.double().unsqueeze(-1)
    error = (codes.double() * scale - want).abs()
    # Half a step: of 3 mantissa bits, or of the subnormals below 2^-6.
    step = torch.maximum(want.abs() * 2.0**-4, scale * 2.0**-10)
    assert (error <= step * 1.0001 + slack.unsqueeze(-1) * 1.1)[whole].all()


def norm_modulate(
    x: Tensor, weight: Tensor | None, shift: Tensor, scale: Tensor, index: Tensor, eps: float
) -> Any:
    """rmsnorm(x) * weight * (1 + scale[index]) + shift[index] in float64, and `size`."""
    wide, rows = x.double(), index.long()
    normed = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)
    gain = (
        torch.ones(x.shape[-1], dtype=torch.float64, device=x.device) if weight is None else weight.double()
    )
    product, addend = normed * gain * (1 + scale.double()[rows]), shift.double()[rows]
    size = normed.abs() * gain.abs() * (1 + scale.double()[rows].abs()) + addend.abs()
    return product + addend, size


def gate_residual(residual: Tensor, x: Tensor, gate: Tensor, index: Tensor) -> Any:
    """residual + gate[index] * x in float64, and `size`."""
    product = gate.double()[index.long()] * x.double()
    return residual.double() + product, residual.double().abs() + product.abs()


def qk_norm_rope(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float) -> Any:
    """RMSNorm by head and rotation, channel by channel, in float64, and `size`."""
    wide = x.double()
    normed = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)
    normed = normed if weight is None else normed * weight.double()
    result, size = normed.clone(), normed.abs()
    if cos is not None and sin is not None:
        half = cos.shape[1] // 2
        for channel in range(2 * half):
            partner = channel + half if channel < half else channel - half
            sign = -1 if channel < half else 1
            one = normed[..., channel] * cos.double()[:, channel, None]
            other = sign * normed[..., partner] * sin.double()[:, channel, None]
            result[..., channel], size[..., channel] = one + other, one.abs() + other.abs()
    return result, size


def swiglu(x: Tensor) -> Any:
    """The first half times silu of the second in float64, and `size`."""
    half = x.shape[-1] // 2
    up, gate = x[..., :half].double(), x[..., half:].double()
    result = up * gate * torch.sigmoid(gate)
    # exp errs in proportion to its argument, and silu(-89), 2e-37, may be 0 as exp(89) is infinite.
    return result, result.abs() * (1 + gate.abs()) + up.abs() * 1e-30


def linear_fp8(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Any:
    """The product of what codes and scales stand for, 128 channels at a time, in float64, and `size`.

    Scales are by row, or by block where those of the weight are a matrix.
    """
    result = torch.zeros(*codes.shape[:-1], weight.shape[0], dtype=torch.float64, device=codes.device)
    size = torch.zeros_like(result)
    for start in range(0, codes.shape[-1], 128):
        a, b = codes[..., start : start + 128].double(), weight[:, start : start + 128].double()
        column, row = weight_scales.double(), scales.double()
        if weight_scales.ndim == 2:
            column = column[:, start // 128].repeat_interleave(128)[: weight.shape[0]]
            row = row[..., start // 128]
        factor = row.unsqueeze(-1) * column
        result += (a @ b.T) * factor
        size += (a.abs() @ b.abs().T) * factor
    if bias is not None:
        result, size = result + bias.double(), size + bias.double().abs()
    return result, size.nan_to_num(nan=0.0)
