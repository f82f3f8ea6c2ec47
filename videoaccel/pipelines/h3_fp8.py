"""A block of MiniMax-H3 with FP8 linears: what its attention and its feed-forward call in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from videoaccel.pipelines.fp8 import Fp8, Quantized


def inward_linears(attn: Any) -> tuple[Any, ...]:
    """What makes queries, keys and values of an attention: three linears, or diffusers' fused one."""
    return (attn.to_qkv,) if attn.fused_projections else (attn.to_q, attn.to_k, attn.to_v)


def fp8_linears(block: Any) -> tuple[Any, ...]:
    """Every linear of a block that is converted."""
    attn, feed_forward = block.attn, block.ff
    return (*inward_linears(attn), attn.to_out[0], feed_forward.net[0].proj, feed_forward.net[2])


def fp8_attention(
    attn: Any, fp8: Fp8, undo: ExitStack
) -> tuple[Callable[..., Sequence[torch.Tensor]], Callable[..., torch.Tensor]]:
    """The two products of an attention, as `FusedProcessor` takes them.

    Raises:
        UserError: a linear can't be converted.
    """
    inward, outward = fp8.convert(inward_linears(attn), undo), fp8.convert((attn.to_out[0],), undo)
    part = sum(inward.sizes) // 3

    def project(attn: Any, rows: torch.Tensor | Quantized) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = fp8.product(rows, inward).split_with_sizes([part] * 3, -1)
        return parts

    def output(attn: Any, attended: torch.Tensor) -> torch.Tensor:
        return fp8.product(attended, outward)

    return project, output


def fp8_feed_forward(
    feed_forward: Any, swiglu: Callable[..., Any], fp8: Fp8, undo: ExitStack
) -> Callable[[torch.Tensor | Quantized], torch.Tensor]:
    """A SwiGLU feed-forward, the gated half quantised where it is made.

    Raises:
        UserError: a linear can't be converted.
    """
    upward = fp8.convert((feed_forward.net[0].proj,), undo)
    downward = fp8.convert((feed_forward.net[2],), undo)

    def forward(rows: torch.Tensor | Quantized) -> torch.Tensor:
        gated = swiglu(fp8.product(rows, upward), quantize=True)
        return fp8.product(Quantized(*gated), downward)

    return forward
