# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`qk_norm_rope` in Triton: one pass over queries and keys.

Launch. A program takes some heads of one row, of the queries and of the keys, so that the row's angles are
read once for all of them. A head lies in registers as three blocks: the two halves that turn into each other
and the rest that passes. So a channel and its partner are at the same place of two blocks, and nothing is
exchanged between threads or read twice, as it would be with a head as one block. H3's halves are 48 of 64
lanes; their 96 bytes keep loads of 16 bytes aligned.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videoaccel.kernels.checks import kernel_dtype
from videoaccel.kernels.launch import Config, Launch, target_of
from videoaccel.kernels.qk_norm_rope import check_qk_norm_rope

MAX_HEAD_DIM = 256


@triton.jit
def _angles(table, position, stride, columns, live):
    start = table + position.to(tl.int64) * stride
    return tl.load(start + columns, mask=live, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gain(weight, columns, live):
    return tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _read(starts, columns, live):
    return tl.load(starts + columns, mask=live, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _heads(
    x, weight, out, row, item, position, heads, x_batch, x_row, x_head, eps,
    cos_first, cos_second, sin_first, sin_second,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    # Offsets are int64: 110 k rows x 21504 channels of a fused projection pass 2^31.
    start = x + item.to(tl.int64) * x_batch + position.to(tl.int64) * x_row
    starts = start + heads.to(tl.int64)[:, None] * x_head
    results = out + row.to(tl.int64) * (H * D) + heads[:, None] * D
    inside = heads[:, None] < H
    columns = tl.arange(0, LANES)
    turns = inside & (columns < HALF)[None, :]
    rest_columns = 2 * HALF + tl.arange(0, REST)
    passes = inside & (rest_columns < D)[None, :]
    # A part that a head doesn't have is left out when the kernel is compiled.
    squares = tl.zeros([heads.shape[0]], tl.float32)
    if HALF > 0:
        first = _read(starts, columns[None, :], turns)
        second = _read(starts, HALF + columns[None, :], turns)
        squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if 2 * HALF < D:
        rest = _read(starts, rest_columns[None, :], passes)
        squares += tl.sum(rest * rest, 1)
    rstd = tl.rsqrt(squares / D + eps)[:, None]
    if HALF > 0:
        first, second = first * rstd, second * rstd
        if weight is not None:
            first = first * _gain(weight, columns, columns < HALF)
            second = second * _gain(weight, HALF + columns, columns < HALF)
        low = first * cos_first - second * sin_first
        high = second * cos_second + first * sin_second
        tl.store(results + columns[None, :], low.to(out.dtype.element_ty), mask=turns)
        tl.store(results + HALF + columns[None, :], high.to(out.dtype.element_ty), mask=turns)
    if 2 * HALF < D:
        rest = rest * rstd
        if weight is not None:
            rest = rest * _gain(weight, rest_columns, rest_columns < D)
        tl.store(results + rest_columns[None, :], rest.to(out.dtype.element_ty), mask=passes)


@triton.jit(do_not_specialize=["length"])
def qk_norm_rope_kernel(
    query, key, query_weight, key_weight, cos, sin, query_out, key_out,
    length, query_batch, query_row, query_head, key_batch, key_row, key_head, cos_row, sin_row, eps,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    LANES: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    item, position = row // length, row % length
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, LANES)
    live = columns < HALF
    cos_first = _angles(cos, position, cos_row, columns, live) if HALF > 0 else None
    cos_second = _angles(cos, position, cos_row, HALF + columns, live) if HALF > 0 else None
    sin_first = _angles(sin, position, sin_row, columns, live) if HALF > 0 else None
    sin_second = _angles(sin, position, sin_row, HALF + columns, live) if HALF > 0 else None
    _heads(
        query, query_weight, query_out, row, item, position, heads, query_batch, query_row, query_head, eps,
        cos_first, cos_second, sin_first, sin_second, QUERY_HEADS, D, HALF, LANES, REST,
    )  # fmt: skip
    _heads(
        key, key_weight, key_out, row, item, position, heads, key_batch, key_row, key_head, eps,
        cos_first, cos_second, sin_first, sin_second, KEY_HEADS, D, HALF, LANES, REST,
    )  # fmt: skip


def configs(heads: int, head_dim: int, target: str) -> tuple[Config, ...]:
    """The configs worth timing for rows of that many heads, the one that is used first.

    8 heads to a warp: 32 channels a thread of queries and of keys at 128 channels a head, as `row_warps` has
    it.
    """
    width = 64 if target.startswith("gfx") else 32
    most = triton.next_power_of_2(heads)
    found = {}
    for block in (8, 16, 32):
        block = min(block, most)
        warps = max(1, block * triton.next_power_of_2(head_dim) // (32 * width))
        # The lanes that run for nothing are weighed first, then the larger program: it reads angles less
        # often.
        idle = -heads % block
        found[block] = (idle, -block, Config(num_warps=warps, blocks={"HEADS": block}))
    return tuple(entry[2] for entry in sorted(found.values(), key=lambda entry: entry[:2]))


def plan_qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    *,
    config: Config | None = None,
    target: str | None = None,
) -> Launch:
    """The launch of `qk_norm_rope`; its outputs are among its arguments."""
    check_qk_norm_rope(query, key, query_weight, key_weight, cos, sin)
    kernel_dtype("query", query)
    batch, rows, heads, channels = query.shape
    if channels > MAX_HEAD_DIM:
        raise ValueError(
            f"query has heads of {channels} channels and this kernel takes {MAX_HEAD_DIM}: use the reference"
        )
    most = max(heads, key.shape[2])
    config = config or configs(most, channels, target or target_of(query.device))[0]
    half = 0 if cos is None else cos.shape[1] // 2
    arguments: dict[str, Any] = {
        "query": query, "key": key, "query_weight": query_weight, "key_weight": key_weight,
        "cos": cos, "sin": sin,
        "query_out": torch.empty(query.shape, dtype=query.dtype, device=query.device),
        "key_out": torch.empty(key.shape, dtype=key.dtype, device=key.device),
        "length": rows,
        **_strides("query", query), **_strides("key", key),
        "cos_row": 0 if cos is None else cos.stride(0), "sin_row": 0 if sin is None else sin.stride(0),
        "eps": eps,
        "QUERY_HEADS": heads, "KEY_HEADS": key.shape[2], "D": channels, "HALF": half,
        "LANES": triton.next_power_of_2(max(half, 1)),
        "REST": triton.next_power_of_2(max(channels - 2 * half, 1)),
    }  # fmt: skip
    grid = (batch * rows, -(-most // config.blocks["HEADS"]))
    return Launch(kernel=qk_norm_rope_kernel, grid=grid, arguments=arguments, config=config)


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """As `qk_norm_rope.qk_norm_rope_reference`; `config` cuts the launch another way."""
    done = plan_qk_norm_rope(query, key, query_weight, key_weight, cos, sin, eps, config=config).run()
    return done["query_out"], done["key_out"]


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), x.stride()[:3], strict=True))
