# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`modulation` in Triton: one program a row, one pass over memory.

Launch. A row of H3 is 5376 channels, 10.5 KB in bfloat16, and 5376 = 21 * 256 is no power of two. The program
takes the whole row in one masked block of 8192: the row has to be held anyway, between its mean square and
its use. Lanes beyond the row cost instructions, not bytes, and the kernel waits for bytes; D is a constexpr,
so that the compiler drops the loads and stores of which every lane lies outside. The choices that lost:
chunks of a dividing size (256 or 768 channels) read the row twice or keep a tuple of blocks alive, with
smaller loads; several rows a program with the table row kept in registers take twice the registers for tables
that the L1 cache serves already, as neighbouring rows nearly always share them. The streamed tensors are
marked evict-first for the same reason: they are read once, the tables by every row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videoaccel.kernels.launch import Config, Launch
from videoaccel.kernels.modulation import check_fused, check_gate_residual, check_norm_modulate
from videoaccel.kernels.rows_triton import cut_row, load_row, outputs, store_row, strides


@triton.jit
def _table_row(index, position, table_rows):
    # A kernel can't raise. An index outside the tables reads row 0 and makes its row NaN, which ends the
    # request.
    wanted = tl.load(index + position).to(tl.int64)
    inside = (wanted >= 0) & (wanted < table_rows)
    return tl.where(inside, wanted, 0), tl.where(inside, 1.0, float("nan"))


@triton.jit
def _modulated(
    x,
    weight,
    shift,
    scale,
    table_row,
    poison,
    shift_stride,
    scale_stride,
    eps,
    columns,
    live,
    D: tl.constexpr,
):
    rstd = poison * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    factor = 1.0 + tl.load(scale + table_row * scale_stride + columns, mask=live, other=0.0).to(tl.float32)
    addend = tl.load(shift + table_row * shift_stride + columns, mask=live, other=0.0).to(tl.float32)
    y = x * rstd
    if weight is not None:
        y = y * tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)
    return y * factor + addend


@triton.jit(do_not_specialize=["length", "table_rows"])
def norm_modulate_kernel(
    x, weight, shift, scale, index, out, out_scale,
    length, table_rows, x_batch, x_row, x_channel, shift_stride, scale_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    item, position = row // length, row % length
    columns = tl.arange(0, BLOCK)
    live = columns < D
    values = load_row(x, item, position, x_batch, x_row, x_channel, columns, live)
    table_row, poison = _table_row(index, position, table_rows)
    y = _modulated(
        values, weight, shift, scale, table_row, poison, shift_stride, scale_stride, eps, columns, live, D
    )
    store_row(out, out_scale, row, y, columns, live, D)


@triton.jit(do_not_specialize=["length", "table_rows"])
def gate_residual_kernel(
    residual, x, gate, index, added,
    length, table_rows,
    residual_batch, residual_row, residual_channel, x_batch, x_row, x_channel, gate_stride,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    item, position = row // length, row % length
    columns = tl.arange(0, BLOCK)
    live = columns < D
    old = load_row(residual, item, position, residual_batch, residual_row, residual_channel, columns, live)
    values = load_row(x, item, position, x_batch, x_row, x_channel, columns, live)
    table_row, poison = _table_row(index, position, table_rows)
    factor = poison * tl.load(gate + table_row * gate_stride + columns, mask=live, other=0.0).to(tl.float32)
    store_row(added, None, row, old + factor * values, columns, live, D)


@triton.jit(do_not_specialize=["length", "table_rows"])
def gate_residual_norm_modulate_kernel(
    residual, x, gate, index, weight, shift, scale, added, out, out_scale,
    length, table_rows,
    residual_batch, residual_row, residual_channel, x_batch, x_row, x_channel,
    gate_stride, shift_stride, scale_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    item, position = row // length, row % length
    columns = tl.arange(0, BLOCK)
    live = columns < D
    old = load_row(residual, item, position, residual_batch, residual_row, residual_channel, columns, live)
    values = load_row(x, item, position, x_batch, x_row, x_channel, columns, live)
    table_row, poison = _table_row(index, position, table_rows)
    factor = poison * tl.load(gate + table_row * gate_stride + columns, mask=live, other=0.0).to(tl.float32)
    # Rounded as it is stored, then normed: the fused op equals the two ops in turn.
    stored = (old + factor * values).to(added.dtype.element_ty)
    tl.store(added + row.to(tl.int64) * D + columns, stored, mask=live)
    y = _modulated(
        stored.to(tl.float32), weight, shift, scale, table_row, poison,
        shift_stride, scale_stride, eps, columns, live, D,
    )  # fmt: skip
    store_row(out, out_scale, row, y, columns, live, D)


def plan_norm_modulate(
    x: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    *,
    quantize: bool = False,
    config: Config | None = None,
    target: str | None = None,
) -> Launch:
    """The launch of `norm_modulate`; its outputs are among its arguments."""
    check_norm_modulate(x, weight, shift, scale, index)
    config = cut_row("x", x, x.shape[2], target, config, quantize=quantize)
    arguments = {
        "x": x, "weight": weight, "shift": shift, "scale": scale, "index": index,
        **outputs(x, x.shape[2], quantize),
        "length": x.shape[1], "table_rows": shift.shape[0], **strides("x", x),
        "shift_stride": shift.stride(0), "scale_stride": scale.stride(0), "eps": eps, "D": x.shape[2],
    }  # fmt: skip
    grid = (x.shape[0] * x.shape[1],)
    return Launch(kernel=norm_modulate_kernel, grid=grid, arguments=arguments, config=config)


def plan_gate_residual(
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    index: Tensor,
    *,
    config: Config | None = None,
    target: str | None = None,
) -> Launch:
    """The launch of `gate_residual`; its output is among its arguments."""
    check_gate_residual(residual, x, gate, index)
    config = cut_row("x", x, x.shape[2], target, config)
    added = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = {
        "residual": residual, "x": x, "gate": gate, "index": index, "added": added,
        "length": x.shape[1], "table_rows": gate.shape[0],
        **strides("residual", residual), **strides("x", x),
        "gate_stride": gate.stride(0), "D": x.shape[2],
    }  # fmt: skip
    grid = (x.shape[0] * x.shape[1],)
    return Launch(kernel=gate_residual_kernel, grid=grid, arguments=arguments, config=config)


def plan_gate_residual_norm_modulate(
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
    config: Config | None = None,
    target: str | None = None,
) -> Launch:
    """The launch of `gate_residual_norm_modulate`; its outputs are among its arguments."""
    check_fused(residual, x, gate, index, weight, shift, scale)
    config = cut_row("x", x, x.shape[2], target, config, quantize=quantize)
    added = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = {
        "residual": residual, "x": x, "gate": gate, "index": index,
        "weight": weight, "shift": shift, "scale": scale,
        "added": added, **outputs(x, x.shape[2], quantize),
        "length": x.shape[1], "table_rows": gate.shape[0],
        **strides("residual", residual), **strides("x", x),
        "gate_stride": gate.stride(0), "shift_stride": shift.stride(0), "scale_stride": scale.stride(0),
        "eps": eps, "D": x.shape[2],
    }  # fmt: skip
    grid = (x.shape[0] * x.shape[1],)
    return Launch(kernel=gate_residual_norm_modulate_kernel, grid=grid, arguments=arguments, config=config)


def norm_modulate(
    x: Tensor,
    weight: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    *,
    quantize: bool = False,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `modulation.norm_modulate_reference`; `config` cuts the launch another way."""
    done = plan_norm_modulate(x, weight, shift, scale, index, eps, quantize=quantize, config=config).run()
    return (done["out"], done["out_scale"]) if quantize else done["out"]


def gate_residual(
    residual: Tensor, x: Tensor, gate: Tensor, index: Tensor, *, config: Config | None = None
) -> Tensor:
    """As `modulation.gate_residual_reference`; `config` cuts the launch another way."""
    added: Tensor = plan_gate_residual(residual, x, gate, index, config=config).run()["added"]
    return added


def gate_residual_norm_modulate(
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
    config: Config | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """As `modulation.gate_residual_norm_modulate_reference`; `config` cuts the launch another way."""
    done = plan_gate_residual_norm_modulate(
        residual, x, gate, index, weight, shift, scale, eps, quantize=quantize, config=config
    ).run()
    rest = (done["out"], done["out_scale"]) if quantize else (done["out"],)
    return (done["added"], *rest)
