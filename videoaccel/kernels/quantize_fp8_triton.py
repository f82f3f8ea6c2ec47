# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`quantize_fp8` in Triton: one pass, whole rows or sixteen blocks of 128 channels a program."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videoaccel.kernels.checks import kernel_dtype
from videoaccel.kernels.fp8_triton import check_e4m3, group_scale
from videoaccel.kernels.launch import Config, Launch, row_warps, target_of
from videoaccel.kernels.quantize_fp8 import BLOCK, E4M3, check_quantize
from videoaccel.kernels.rows_triton import cut_row, load_row, outputs, row_configs, store_row, strides

GROUPS = 16


@triton.jit(do_not_specialize=["length"])
def quantize_rows_kernel(
    x, out, out_scale, length, x_batch, x_row, x_channel, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    item, position = row // length, row % length
    columns = tl.arange(0, BLOCK)
    live = columns < D
    values = load_row(x, item, position, x_batch, x_row, x_channel, columns, live)
    store_row(out, out_scale, row, values, columns, live, D)


@triton.jit(do_not_specialize=["length"])
def quantize_blocks_kernel(
    x, out, out_scale, length, x_batch, x_row, x_channel,
    D: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    item, position = row // length, row % length
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = columns < D
    values = load_row(x, item, position, x_batch, x_row, x_channel, columns, live)
    scale, reciprocal = group_scale(values, 1)
    count = tl.cdiv(D, GROUP)
    tl.store(out_scale + row.to(tl.int64) * count + groups, scale, mask=groups < count)
    codes = (values * reciprocal[:, None]).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * D + columns, codes, mask=live)


def configs(channels: int, target: str, block: int | None) -> tuple[Config, ...]:
    """The configs worth timing for rows of `channels`, the one that is used first."""
    if block is None:
        return row_configs(channels, target)
    most = triton.next_power_of_2(-(-channels // block))
    counts = dict.fromkeys(min(count, most) for count in (GROUPS, GROUPS // 2, 2 * GROUPS))
    return tuple(
        Config(num_warps=row_warps(count * block, target), blocks={"GROUPS": count}) for count in counts
    )


def as_rows(x: Tensor) -> Tensor:
    """x (..., D) as (B, L, D), a view. Raises ValueError where only a copy would do."""
    if x.ndim <= 3:
        return x[(None,) * (3 - x.ndim)]
    try:
        return x.view(-1, *x.shape[-2:])
    except RuntimeError as error:
        raise ValueError(
            f"x {tuple(x.shape)} with strides {x.stride()} is no (batch, rows, channels): pass x.contiguous()"
        ) from error


def plan_quantize_fp8(
    x: Tensor, *, block: int | None = None, config: Config | None = None, target: str | None = None
) -> Launch:
    """The launch of `quantize_fp8`; its outputs are among its arguments, codes as (B, L, D)."""
    check_quantize(x, block)
    rows = as_rows(x)
    target = target or target_of(x.device)
    channels = x.shape[-1]
    arguments: dict[str, Any] = {"x": rows, "length": rows.shape[1], **strides("x", rows), "D": channels}
    programs = rows.shape[0] * rows.shape[1]
    if block is None:
        config = cut_row("x", x, channels, target, config, quantize=True)
        arguments |= outputs(rows, channels, True)
        return Launch(kernel=quantize_rows_kernel, grid=(programs,), arguments=arguments, config=config)
    kernel_dtype("x", x)
    check_e4m3(target)
    config = config or configs(channels, target, block)[0]
    groups = -(-channels // BLOCK)
    arguments |= {
        "out": torch.empty(rows.shape, dtype=E4M3, device=x.device),
        "out_scale": torch.empty((*rows.shape[:2], groups), dtype=torch.float32, device=x.device),
        "GROUP": BLOCK,
    }
    grid = (programs, -(-groups // config.blocks["GROUPS"]))
    return Launch(kernel=quantize_blocks_kernel, grid=grid, arguments=arguments, config=config)


def quantize_fp8(
    x: Tensor, *, block: int | None = None, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8.quantize_fp8_reference`; `config` cuts the launch another way."""
    done = plan_quantize_fp8(x, block=block, config=config).run()
    # By name: nothing can be inferred for a tensor without rows.
    groups = () if block is None else (done["out_scale"].shape[-1],)
    return done["out"].view(x.shape), done["out_scale"].view((*x.shape[:-1], *groups))
