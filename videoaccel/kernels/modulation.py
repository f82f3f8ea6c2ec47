"""AdaLN by row: RMSNorm, modulation and the gated residual, with a table row for each row of the sequence.

A packed sequence holds rows of several modalities at several noise levels, so shift, scale and gate are
tables of N rows (a chunk each of one (N, 6 D) tensor) and `index` says which of them a row uses. The
functions here state the maths; `modulation_triton` does the same in one pass over the rows.

Arithmetic is float32 (float64 where x is) and a result is rounded once, to the type of x. diffusers rounds
after each operation, so the two differ by its roundings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videoaccel.kernels.checks import index_of, rows_of, table_of, together, vector_of
from videoaccel.kernels.quantize_fp8 import quantize_rows


def check_norm_modulate(
    x: Tensor, weight: Tensor | None, shift: Tensor, scale: Tensor, index: Tensor
) -> None:
    """Raises ValueError for arguments that `norm_modulate` has no meaning for."""
    _, rows, channels = rows_of("x", x)
    vector_of("weight", weight, channels)
    table_rows = table_of("shift", shift, channels)
    if table_of("scale", scale, channels) != table_rows:
        raise ValueError(f"shift has {table_rows} rows and scale {scale.shape[0]}: one index addresses both")
    index_of(index, rows, table_rows)
    together(x=x, weight=weight, shift=shift, scale=scale, index=index)


def check_gate_residual(residual: Tensor, x: Tensor, gate: Tensor, index: Tensor) -> None:
    """Raises ValueError for arguments that `gate_residual` has no meaning for."""
    _, rows, channels = rows_of("x", x)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual and x must agree: {tuple(residual.shape)} {residual.dtype}, {tuple(x.shape)} {x.dtype}"
        )
    index_of(index, rows, table_of("gate", gate, channels))
    together(residual=residual, x=x, gate=gate, index=index)


def check_fused(
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    index: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
) -> None:
    """Raises ValueError for arguments that `gate_residual_norm_modulate` has no meaning for."""
    check_gate_residual(residual, x, gate, index)
    check_norm_modulate(x, weight, shift, scale, index)
    if gate.shape[0] != shift.shape[0]:
        raise ValueError(
            f"gate has {gate.shape[0]} rows and shift {shift.shape[0]}: one index addresses both"
        )


def norm_modulate_reference(
    x: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    *,
    quantize: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """rmsnorm(x) * weight * (1 + scale[index]) + shift[index].

    Args:
        x: (B, L, D).
        weight: (D,), the norm's gain, or None for a norm without one.
        shift, scale: (N, D), of any row stride.
        index: (L,), int64 or int32: the table row of each row, the same in every item of the batch.
        eps: added to the mean square.
        quantize: also quantise the rows to e4m3 before they are rounded to the type of x.

    Returns:
        (B, L, D) in the type of x; with `quantize`, e4m3 codes (B, L, D) and float32 scales (B, L), as
        `quantize_fp8.quantize_rows` makes them.

    Raises:
        ValueError: shapes, types or devices that don't fit.
        IndexError: an index outside the table. A kernel can't raise: it makes that row NaN.
    """
    check_norm_modulate(x, weight, shift, scale, index)
    y = _norm_modulate(_wide(x), weight, shift, scale, index, eps)
    return quantize_rows(y) if quantize else y.to(x.dtype)


def gate_residual_reference(residual: Tensor, x: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """residual + gate[index] * x.

    Args:
        residual, x: (B, L, D), of one type.
        gate: (N, D), of any row stride.
        index: (L,), int64 or int32.

    Returns:
        (B, L, D) in the type of x.

    Raises:
        ValueError, IndexError: as `norm_modulate_reference`.
    """
    check_gate_residual(residual, x, gate, index)
    wide = _wide(x)
    return (_wide(residual) + gate.to(wide.dtype).index_select(0, index) * wide).to(x.dtype)


def gate_residual_norm_modulate_reference(
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    index: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    *,
    quantize: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`gate_residual`, then `norm_modulate` of what it stored: the seam between attention and feed-forward.

    The norm reads the new residual as rounded to the type of x. So the fused op equals the two ops in turn,
    and the norm belongs to the residual that the next block adds to.

    Args:
        residual, x, gate, index: as `gate_residual_reference`.
        weight, shift, scale, eps, quantize: as `norm_modulate_reference`; one index addresses all three
        tables.

    Returns:
        The new residual and the modulated rows, both (B, L, D) in the type of x; with `quantize`, the new
        residual, e4m3 codes (B, L, D) and float32 scales (B, L).

    Raises:
        ValueError, IndexError: as `norm_modulate_reference`.
    """
    check_fused(residual, x, gate, index, weight, shift, scale)
    added = gate_residual_reference(residual, x, gate, index)
    y = _norm_modulate(_wide(added), weight, shift, scale, index, eps)
    return (added, *quantize_rows(y)) if quantize else (added, y.to(x.dtype))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm_modulate(
    x: Tensor, weight: Tensor | None, shift: Tensor, scale: Tensor, index: Tensor, eps: float
) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(x.dtype)
    scale, shift = (table.to(x.dtype).index_select(0, index) for table in (scale, shift))
    return y * (1 + scale) + shift
