# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`linear_fp8` and `linear_fp8_block` in Triton, where torch's own product doesn't reach.

Launch. Plain pointers and `tl.dot` on e4m3, which become wgmma, mma or mfma. Programs go through the result
in bands of rows, so that tiles of the weight are reused from the cache. Hopper's matrix units add FP8
products up with about 14 bits; here each 128 terms go on into a float32 register, so a tile's sum is there
twice, and wider tiles than 128 x 128 spill. On sm_120 plain `tl.dot` runs at half the FP8 rate of the GeForce
cards.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videoaccel.kernels.checks import FLOATS
from videoaccel.kernels.fp8_triton import check_e4m3
from videoaccel.kernels.launch import Config, Launch, target_of
from videoaccel.kernels.linear_fp8 import check_linear_fp8
from videoaccel.kernels.linear_fp8_block import check_linear_fp8_block
from videoaccel.kernels.quantize_fp8 import BLOCK

ALIGNED = 16
"""What K and the distance of rows must be a multiple of, for reads of 16 codes. Byte by byte they take more
registers than there are."""


@triton.jit(do_not_specialize=["rows"])
def linear_fp8_kernel(
    x, x_scale, weight, weight_scale, bias, out, rows, x_row, weight_row,
    N: tl.constexpr, K: tl.constexpr, BY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    # Programs of a band of rows run together: BAND tiles of rows by all tiles of columns.
    across = tl.cdiv(N, BLOCK_N)
    down = tl.cdiv(rows, BLOCK_M)
    band = tl.program_id(0) // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * across)
    first_row = (band * BAND + within % height) * BLOCK_M
    first_column = (within // height) * BLOCK_N
    # Rows and columns beyond the last are the last once more: reads need no mask, which keeps them
    # asynchronous, and only results are masked. Tiles start at int64 offsets (110 k rows x 28672 channels
    # pass 2^31) and go on with int32 ones, which take half the registers.
    row = tl.minimum(tl.arange(0, BLOCK_M), rows - 1 - first_row)
    column = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_column)
    inner = tl.arange(0, BLOCK_K)
    x_tile = x + first_row.to(tl.int64) * x_row + row[:, None] * x_row + inner[None, :]
    weight_tile = weight + first_column.to(tl.int64) * weight_row
    weight_tile = weight_tile + column[None, :] * weight_row + inner[:, None]
    # By block a step of the loop is one block.
    groups: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K if BY_BLOCK else 1
    x_scales = x_scale + first_row.to(tl.int64) * groups + row * groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_tile + start)
            b = tl.load(weight_tile + start)
        else:
            # Beyond the last channel both codes are 0, of which the sum takes no notice.
            left = start + inner < K
            a = tl.load(x_tile + start, mask=left[None, :], other=0.0)
            b = tl.load(weight_tile + start, mask=left[:, None], other=0.0)
        if BY_BLOCK:
            # A tile lies in one square of the weight.
            factor = tl.load(weight_scale + (first_column // BLOCK_K) * groups + start // BLOCK_K)
            total += tl.dot(a, b) * (tl.load(x_scales + start // BLOCK_K) * factor)[:, None]
        else:
            total = tl.dot(a, b, total, max_num_imprecise_acc=BLOCK_K)
    if not BY_BLOCK:
        total *= tl.load(x_scales)[:, None]
        total *= tl.load(weight_scale + first_column + column)[None, :]
    if bias is not None:
        total += tl.load(bias + first_column + column).to(tl.float32)[None, :]
    out_row, out_column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    pointers = out + out_row.to(tl.int64)[:, None] * N + out_column[None, :]
    inside = (out_row < rows)[:, None] & (out_column < N)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=inside)


def _config(rows: int, columns: int, inner: int, num_warps: int, num_stages: int) -> Config:
    blocks = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": inner, "BAND": 8}
    return Config(num_warps=num_warps, num_stages=num_stages, blocks=blocks)


def configs(target: str, *, by_block: bool = False) -> tuple[Config, ...]:
    """The configs worth timing on `target`, the one that is used first.

    A step of the loop takes (BLOCK_M + BLOCK_N) * BLOCK_K bytes of shared memory a stage, and by block it is
    128 channels.
    """
    if target in ("sm_90", "sm_100", "sm_103"):
        return _config(128, 128, 128, 8, 4), _config(64, 128, 128, 4, 4)
    if target.startswith("gfx"):
        return (_config(64, 128, 128, 8, 2) if by_block else _config(128, 128, 64, 8, 2),)
    if by_block:
        return _config(64, 128, 128, 8, 3), _config(64, 64, 128, 4, 3)
    return _config(128, 128, 64, 8, 4), _config(128, 128, 128, 8, 2)


def plan_linear_fp8(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    config: Config | None = None,
    target: str | None = None,
) -> Launch:
    """The launch of `linear_fp8`; its output is among its arguments."""
    check_linear_fp8(codes, scales, weight, weight_scales, bias)
    target = target or target_of(codes.device)
    config = config or configs(target)[0]
    return _plan(codes, scales, weight, weight_scales, bias, dtype, False, config, target)


def plan_linear_fp8_block(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    config: Config | None = None,
    target: str | None = None,
) -> Launch:
    """The launch of `linear_fp8_block`; its output is among its arguments."""
    check_linear_fp8_block(codes, scales, weight, weight_scales, bias)
    target = target or target_of(codes.device)
    config = config or configs(target, by_block=True)[0]
    if config.blocks["BLOCK_K"] != BLOCK or BLOCK % config.blocks["BLOCK_N"]:
        raise ValueError(f"a block needs BLOCK_K {BLOCK} and a BLOCK_N that divides it: {config.words()}")
    return _plan(codes, scales, weight, weight_scales, bias, dtype, True, config, target)


def _plan(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    by_block: bool,
    config: Config,
    target: str,
) -> Launch:
    check_e4m3(target)
    if dtype not in FLOATS:
        raise ValueError(f"results can't be {dtype}: ask for float32, float16 or bfloat16")
    batch, length, inner = codes.shape
    for name, x in (("scales", scales), ("weight_scales", weight_scales), ("bias", bias)):
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} is not contiguous: pass {name}.contiguous()")
    try:
        x = codes.view(batch * length, inner)
    except RuntimeError as error:
        raise ValueError(
            f"codes with strides {codes.stride()} are no matrix: pass codes.contiguous()"
        ) from error
    for name, matrix in (("codes", x), ("weight", weight)):
        if inner % ALIGNED or matrix.stride(0) % ALIGNED or matrix.stride(1) != 1:
            raise ValueError(
                f"{name} (K {inner}, strides {matrix.stride()}) needs whole channels side by side, and K and "
                f"the distance of rows multiples of {ALIGNED}: pass {name}.contiguous(), or use the reference"
            )
    outer = weight.shape[0]
    arguments: dict[str, Any] = {
        "x": x, "x_scale": scales, "weight": weight, "weight_scale": weight_scales, "bias": bias,
        "out": torch.empty((batch, length, outer), dtype=dtype, device=codes.device),
        "rows": batch * length, "x_row": x.stride(0), "weight_row": weight.stride(0),
        "N": outer, "K": inner, "BY_BLOCK": by_block,
    }  # fmt: skip
    tiles = -(-(batch * length) // config.blocks["BLOCK_M"]) * -(-outer // config.blocks["BLOCK_N"])
    return Launch(kernel=linear_fp8_kernel, grid=(tiles,), arguments=arguments, config=config)


def linear_fp8(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """As `linear_fp8.linear_fp8_reference`; `config` cuts the launch another way."""
    launch = plan_linear_fp8(codes, scales, weight, weight_scales, bias, dtype=dtype, config=config)
    out: Tensor = launch.run()["out"]
    return out


def linear_fp8_block(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """As `linear_fp8_block.linear_fp8_block_reference`; `config` cuts the launch another way."""
    launch = plan_linear_fp8_block(codes, scales, weight, weight_scales, bias, dtype=dtype, config=config)
    out: Tensor = launch.run()["out"]
    return out
