"""Every kernel with every config that it may be launched with, as launches over tensors without memory.

The compile matrix compiles them for devices that are not in the machine. Sizes are those of MiniMax-H3, and
the widest rows that the kernels take, where registers run out first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from videoaccel.kernels import (
    linear_fp8_triton,
    modulation_triton,
    qk_norm_rope_triton,
    quantize_fp8_triton,
    swiglu_triton,
)
from videoaccel.kernels.launch import Config, Launch
from videoaccel.kernels.quantize_fp8 import BLOCK, E4M3
from videoaccel.kernels.rows_triton import MAX_CHANNELS, row_configs

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
ROWS, WIDTH, FFN, HEADS, HEAD_DIM, ROTARY = 37_966, 5376, 14_336, 56, 128, 96
TABLE_ROWS = 6
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of a kernel.

    Attributes:
        op: its name in `OPS`.
        variant: which use of it, in words; empty for the plain one.
        dtype: of the activations.
        configs: for a target, what it may be launched with, the one that is used first.
        plan: a target and a config to the launch. Raises ValueError where the kernel refuses the target.
    """

    op: str
    variant: str
    dtype: torch.dtype
    configs: Callable[[str], tuple[Config, ...]]
    plan: Callable[[str, Config], Launch]


def specs() -> tuple[Spec, ...]:
    """All of them, in a fixed order."""
    found: list[Spec] = []
    for dtype in (torch.bfloat16, torch.float32):
        found += _modulation(dtype, WIDTH, "")
        for make in (_qk_norm_rope, _swiglu, _quantize_fp8, _linear_fp8):
            found += make(dtype)
    # At the limits of the kernels, where a spill would show first.
    found += _modulation(torch.bfloat16, MAX_CHANNELS, f"{MAX_CHANNELS} wide")
    return tuple(found)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that has a shape and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _planned(
    plan: Callable[..., Launch], *arguments: Any, **settings: Any
) -> Callable[[str, Config], Launch]:
    return lambda target, config: plan(*arguments, target=target, config=config, **settings)


def _modulation(dtype: torch.dtype, width: int, size: str) -> Iterator[Spec]:
    x, gain = empty(1, ROWS, width, dtype=dtype), empty(width, dtype=dtype)
    shift, scale, gate = empty(TABLE_ROWS, 6 * width, dtype=dtype).chunk(6, 1)[:3]
    index = empty(ROWS, dtype=torch.int64)
    gated, normed = (x, x, gate, index), (gain, shift, scale)

    def spec(op: str, variant: str, plan: Callable[[str, Config], Launch]) -> Spec:
        variant = " ".join(part for part in (size, variant) if part)
        configs = functools.partial(row_configs, width)
        return Spec(op=op, variant=variant, dtype=dtype, configs=configs, plan=plan)

    for variant, quantize in (("", False), ("to FP8", True)):
        plan = _planned(modulation_triton.plan_norm_modulate, x, *normed, index, EPS, quantize=quantize)
        yield spec("norm_modulate", variant, plan)
        fused = modulation_triton.plan_gate_residual_norm_modulate
        plan = _planned(fused, *gated, *normed, EPS, quantize=quantize)
        yield spec("gate_residual_norm_modulate", variant, plan)
    yield spec("gate_residual", "", _planned(modulation_triton.plan_gate_residual, *gated))


def _qk_norm_rope(dtype: torch.dtype) -> Iterator[Spec]:
    # Queries and keys as chunks of a fused projection.
    fused = empty(1, ROWS, 3 * HEADS, HEAD_DIM, dtype=dtype)
    query, key, _ = fused.chunk(3, 2)
    gain, angles = empty(HEAD_DIM, dtype=dtype), empty(ROWS, ROTARY, dtype=torch.float32)
    for variant, table in (("", angles), ("no rotation", None)):
        plan = qk_norm_rope_triton.plan_qk_norm_rope
        yield Spec(
            op="qk_norm_rope",
            variant=variant,
            dtype=dtype,
            configs=functools.partial(qk_norm_rope_triton.configs, HEADS, HEAD_DIM),
            plan=_planned(plan, query, key, gain, gain, table, table, EPS),
        )


def _swiglu(dtype: torch.dtype) -> Iterator[Spec]:
    both = empty(1, ROWS, 2 * FFN, dtype=dtype)
    for variant, quantize in (("", False), ("to FP8", True)):
        yield Spec(
            op="swiglu",
            variant=variant,
            dtype=dtype,
            configs=functools.partial(swiglu_triton.configs, FFN, quantize=quantize),
            plan=_planned(swiglu_triton.plan_swiglu, both, quantize=quantize),
        )


def _quantize_fp8(dtype: torch.dtype) -> Iterator[Spec]:
    x = empty(1, ROWS, FFN, dtype=dtype)
    for variant, block in (("by row", None), (f"by {BLOCK}", BLOCK)):
        yield Spec(
            op="quantize_fp8",
            variant=variant,
            dtype=dtype,
            configs=functools.partial(quantize_fp8_triton.configs, FFN, block=block),
            plan=_planned(quantize_fp8_triton.plan_quantize_fp8, x, block=block),
        )


def _linear_fp8(dtype: torch.dtype) -> Iterator[Spec]:
    # Twice the feed-forward's width is the largest matrix of a block. The odd one has a tail in K and in N.
    by_row, by_block = linear_fp8_triton.plan_linear_fp8, linear_fp8_triton.plan_linear_fp8_block
    for variant, inner, outer in (("", WIDTH, 2 * FFN), ("odd", WIDTH + 16, WIDTH + 40)):
        codes, weight = empty(1, ROWS, inner, dtype=E4M3), empty(outer, inner, dtype=E4M3)
        bias, groups = empty(outer, dtype=dtype), -(-inner // BLOCK)
        scales, weight_scales = (empty(*shape, dtype=torch.float32) for shape in ((1, ROWS), (outer,)))
        yield Spec(
            op="linear_fp8",
            variant=variant,
            dtype=dtype,
            configs=linear_fp8_triton.configs,
            plan=_planned(by_row, codes, scales, weight, weight_scales, bias, dtype=dtype),
        )
        shapes = ((1, ROWS, groups), (-(-outer // BLOCK), groups))
        scales, weight_scales = (empty(*shape, dtype=torch.float32) for shape in shapes)
        yield Spec(
            op="linear_fp8_block",
            variant=variant,
            dtype=dtype,
            configs=functools.partial(linear_fp8_triton.configs, by_block=True),
            plan=_planned(by_block, codes, scales, weight, weight_scales, bias, dtype=dtype),
        )
