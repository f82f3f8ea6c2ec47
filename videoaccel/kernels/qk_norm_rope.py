"""Queries and keys as attention takes them: RMSNorm by head, then the rotary embedding.

What diffusers' attention processor of MiniMax-H3 does in some fifteen ops between its projections and
attention: RMSNorm over the channels of a head (Henry et al., 2020, "Query-Key Normalization for
Transformers"), then the "rotate half" form of rotary embedding (Su et al., 2021, "RoFormer") on the leading R
channels of every head; the rest passes through. The axes (time, height, width) are in the angles, which the
caller made.

Arithmetic is float32 (float64 where the queries are) and a result is rounded once. diffusers rounds the
tables, the normed heads, each product and the sum, so the two differ by those roundings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videoaccel.kernels.checks import table_of, together, vector_of


def check_qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> None:
    """Raises ValueError for arguments that `qk_norm_rope` has no meaning for."""
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 4 or not x.shape[3] or not x.shape[2]:
            raise ValueError(f"{name} must be (batch, rows, heads, channels), not {tuple(x.shape)}")
        if x.shape[3] > 1 and x.stride(3) != 1:
            raise ValueError(f"{name} has channels {x.stride(3)} apart: pass {name}.contiguous()")
    batch, rows, _, channels = query.shape
    if (key.shape[0], key.shape[1], key.shape[3]) != (batch, rows, channels) or key.dtype != query.dtype:
        raise ValueError(
            f"query and key must agree but for their heads: {tuple(query.shape)} {query.dtype}, "
            f"{tuple(key.shape)} {key.dtype}"
        )
    vector_of("query_weight", query_weight, channels)
    vector_of("key_weight", key_weight, channels)
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together: pass both, or neither for a norm alone")
    if cos is not None and sin is not None:
        rotary = cos.shape[-1]
        if rotary % 2 or not 0 < rotary <= channels:
            raise ValueError(f"cos has {rotary} channels: an even number up to {channels} can be rotated")
        for name, table in (("cos", cos), ("sin", sin)):
            if table_of(name, table, rotary) != rows:
                raise ValueError(
                    f"{name} must be ({rows}, {rotary}), a row for each row, not {tuple(table.shape)}"
                )
    together(query=query, key=key, query_weight=query_weight, key_weight=key_weight, cos=cos, sin=sin)


def qk_norm_rope_reference(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """n * cos + rotate_half(n) * sin, with n = rmsnorm(x) * weight, of queries and of keys.

    rotate_half turns (a, b), the halves of the leading R channels of a head, into (-b, a).

    Args:
        query, key: (B, L, H, D) of one type; key may have another H. Heads, rows and items of any stride, so
            a chunk of a fused projection will do.
        query_weight, key_weight: (D,), the gains, or None for a norm without one.
        cos, sin: (L, R) with R even and at most D, in any type; the same in every item and head. None for
            both: the norm alone.
        eps: added to the mean square.

    Returns:
        The new queries and keys, in their shapes and type.

    Raises:
        ValueError: shapes, types, strides or devices that don't fit.
    """
    check_qk_norm_rope(query, key, query_weight, key_weight, cos, sin)
    return _one(query, query_weight, cos, sin, eps), _one(key, key_weight, cos, sin, eps)


def _one(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if cos is not None and sin is not None:
        half = cos.shape[-1] // 2
        first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        turned = torch.cat((-second, first), -1)
        cos, sin = cos.to(y.dtype).unsqueeze(1), sin.to(y.dtype).unsqueeze(1)
        y = torch.cat((torch.cat((first, second), -1) * cos + turned * sin, rest), -1)
    return y.to(x.dtype)
