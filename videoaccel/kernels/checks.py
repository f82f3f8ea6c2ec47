"""Argument checks that the ops' implementations share: each failure is one line that names the fix.

None of them reads a value on the device: a check that waits for the accelerator would stall every block.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rows_of(name: str, x: Tensor) -> tuple[int, int, int]:
    """The sizes of `x`, which must be (B, L, D) with D of at least 1, in a type that the kernels read."""
    if x.ndim != 3:
        raise ValueError(f"{name} must be (batch, rows, channels), not {tuple(x.shape)}: unsqueeze the batch")
    if x.shape[2] < 1:
        raise ValueError(f"{name} has no channels: {tuple(x.shape)}")
    return x.shape[0], x.shape[1], x.shape[2]


def kernel_dtype(name: str, x: Tensor) -> None:
    """Refuses what no kernel reads. The references take float64 as well, so this is for implementations."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} is {x.dtype}: cast it to float32, float16 or bfloat16")


def table_of(name: str, table: Tensor, channels: int) -> int:
    """The number of rows of a (N, D) table. It may be a chunk of a wider one: rows any stride, channels 1."""
    if table.ndim != 2 or table.shape[1] != channels:
        raise ValueError(f"{name} must be (N, {channels}), not {tuple(table.shape)}")
    if channels > 1 and table.stride(1) != 1:
        raise ValueError(f"{name} has channels {table.stride(1)} apart: pass {name}.contiguous()")
    return table.shape[0]


def vector_of(name: str, vector: Tensor | None, channels: int) -> None:
    """Checks a (D,) gain that may be absent."""
    if vector is None:
        return
    if vector.shape != (channels,):
        raise ValueError(f"{name} must be ({channels},), not {tuple(vector.shape)}")
    if channels > 1 and vector.stride(0) != 1:
        raise ValueError(f"{name} is not contiguous: pass {name}.contiguous()")


def index_of(index: Tensor, rows: int, table_rows: int) -> None:
    """Checks the table row of each row, (L,). Its values are not read."""
    if index.shape != (rows,):
        raise ValueError(
            f"index must be ({rows},), one table row for each row of x, not {tuple(index.shape)}"
        )
    if index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index is {index.dtype}: cast it to int32 or int64")
    if rows > 1 and index.stride(0) != 1:
        raise ValueError("index is not contiguous: pass index.contiguous()")
    if rows and not table_rows:
        raise ValueError("the modulation tables have no rows for index to address")


def together(**tensors: Tensor | None) -> None:
    """Refuses tensors on different devices, which a kernel would read as garbage."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        told = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device: {told}")
