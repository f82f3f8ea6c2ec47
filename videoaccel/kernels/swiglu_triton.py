# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`swiglu` in Triton: one pass over the projection.

Launch. Without quantisation a program takes a piece of a row: nothing joins the pieces, and small programs
keep more loads in flight. A quantised row needs its largest magnitude before its first code, so one program
holds it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from videoaccel.kernels.checks import kernel_dtype
from videoaccel.kernels.launch import Config, Launch, row_warps, target_of
from videoaccel.kernels.rows_triton import cut_row, load_row, outputs, row_configs, store_row, strides
from videoaccel.kernels.swiglu import check_swiglu

PIECE = 2048


@triton.jit(do_not_specialize=["length"])
def swiglu_kernel(
    x, out, out_scale, length, x_batch, x_row, x_channel, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    item, position = row // length, row % length
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < D
    up = load_row(x, item, position, x_batch, x_row, x_channel, columns, live)
    gate = load_row(x, item, position, x_batch, x_row, x_channel, D + columns, live)
    # exp(-gate) may be infinite, and the quotient is 0 then, as it should be.
    store_row(out, out_scale, row, up * (gate / (1.0 + tl.exp(-gate))), columns, live, D)


def configs(channels: int, target: str, *, quantize: bool = False) -> tuple[Config, ...]:
    """The configs worth timing for results of `channels`, the one that is used first."""
    if quantize:
        return row_configs(channels, target)
    found = {}
    for piece in (PIECE, PIECE // 2, 2 * PIECE):
        block = min(piece, triton.next_power_of_2(channels))
        found[block] = Config(num_warps=row_warps(block, target), blocks={"BLOCK": block})
    return tuple(found.values())


def plan_swiglu(
    x: Tensor, *, quantize: bool = False, config: Config | None = None, target: str | None = None
) -> Launch:
    """The launch of `swiglu`; its outputs are among its arguments."""
    channels = check_swiglu(x)
    kernel_dtype("x", x)
    if quantize:
        config = cut_row("the result", x, channels, target, config, quantize=True)
    config = config or configs(channels, target or target_of(x.device))[0]
    arguments = {
        "x": x, **outputs(x, channels, quantize), "length": x.shape[1], **strides("x", x), "D": channels
    }  # fmt: skip
    grid = (x.shape[0] * x.shape[1], -(-channels // config.blocks["BLOCK"]))
    return Launch(kernel=swiglu_kernel, grid=grid, arguments=arguments, config=config)


def swiglu(
    x: Tensor, *, quantize: bool = False, config: Config | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """As `swiglu.swiglu_reference`; `config` cuts the launch another way."""
    done = plan_swiglu(x, quantize=quantize, config=config).run()
    return (done["out"], done["out_scale"]) if quantize else done["out"]
