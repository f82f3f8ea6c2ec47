# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the kernels with a program a row share: reading the row, storing or quantising it, cutting it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videoaccel.kernels.checks import kernel_dtype
from videoaccel.kernels.fp8_triton import check_e4m3, group_scale
from videoaccel.kernels.launch import Config, row_warps, target_of
from videoaccel.kernels.quantize_fp8 import E4M3

MAX_CHANNELS = 16384
"""The widest row that a program holds: 32 channels a thread at 16 warps."""


@triton.jit
def load_row(base, item, position, batch_stride, row_stride, channel_stride, columns, live):
    # Offsets are int64: 110 k rows x 28672 channels pass 2^31. A channel stride of one is a constant here.
    start = base + item.to(tl.int64) * batch_stride + position.to(tl.int64) * row_stride
    pointers = start + columns.to(tl.int64) * channel_stride
    return tl.load(pointers, mask=live, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_row(out, out_scale, row, y, columns, live, D: tl.constexpr):
    pointers = out + row.to(tl.int64) * D + columns
    if out_scale is not None:
        group, reciprocal = group_scale(y, 0)
        tl.store(out_scale + row, group)
        y = y * reciprocal
    tl.store(pointers, y.to(out.dtype.element_ty), mask=live)


def row_configs(channels: int, target: str) -> tuple[Config, ...]:
    """The configs worth timing for rows of `channels`, the one that is used first."""
    block = triton.next_power_of_2(channels)
    warps = row_warps(block, target)
    choices = dict.fromkeys((warps, max(1, warps // 2)))
    return tuple(Config(num_warps=choice, blocks={"BLOCK": block}) for choice in choices)


def cut_row(
    name: str, x: Tensor, channels: int, target: str | None, config: Config | None, *, quantize: bool = False
) -> Config:
    """The config for whole rows of `channels`. Raises ValueError for what no kernel takes."""
    kernel_dtype(name, x)
    target = target or target_of(x.device)
    if quantize:
        check_e4m3(target)
    if channels > MAX_CHANNELS:
        raise ValueError(
            f"{name} has {channels} channels and this kernel holds {MAX_CHANNELS}: use the reference"
        )
    return config or row_configs(channels, target)[0]


def outputs(x: Tensor, channels: int, quantize: bool) -> dict[str, Tensor | None]:
    """The results for rows of x (B, L, ...), contiguous: as its type, or codes and a scale a row."""
    shape = (*x.shape[:2], channels)
    out = torch.empty(shape, dtype=E4M3 if quantize else x.dtype, device=x.device)
    scales = torch.empty(shape[:2], dtype=torch.float32, device=x.device) if quantize else None
    return {"out": out, "out_scale": scales}


def strides(name: str, x: Tensor) -> dict[str, Any]:
    """The strides of x (B, L, D) by the names of the kernels' parameters."""
    return dict(zip((f"{name}_batch", f"{name}_row", f"{name}_channel"), x.stride(), strict=True))
