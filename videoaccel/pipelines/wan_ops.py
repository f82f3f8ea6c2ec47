"""The ops of one forward of Wan's 14B transformer, from the defaults of its class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from videoaccel.kernels.work import OpCall
from videoaccel.pipelines.op_calls import ForwardOps, attention_block, linear, released_config
from videoaccel.pipelines.wan_facts import TEXT_ROWS

FRAMES, HEIGHT, WIDTH = 81, 480, 832
"""The stock call's own defaults; 5 s at 16 fps."""
VAE_STRIDE, VAE_FRAMES = 8, 4
"""Pixels a latent cell in height and width, and frames a latent frame after the first."""


def wan_forward() -> ForwardOps:
    """See `Family.forward_ops`."""
    from diffusers import WanTransformer3DModel

    config = released_config(WanTransformer3DModel)
    patch_t, patch_h, patch_w = config["patch_size"]
    latent = ((FRAMES - 1) // VAE_FRAMES + 1, HEIGHT // VAE_STRIDE, WIDTH // VAE_STRIDE)
    rows = (latent[0] // patch_t) * (latent[1] // patch_h) * (latent[2] // patch_w)
    return ForwardOps(
        title="Wan 14B, text to video, one guidance branch",
        size=f"5 s at {WIDTH}x{HEIGHT}",
        rows=rows,
        calls=tuple(wan_calls(config, rows=rows, text_rows=TEXT_ROWS)),
    )


def wan_calls(config: Any, *, rows: int, text_rows: int) -> Iterator[OpCall]:
    """Every call of a forward of a text-to-video model.

    Its norms are LayerNorms, its queries and keys are normed across heads, its feed-forward is a GELU: none
    of that is an op of the package yet, so only attention and matrices are listed.

    Args:
        config: arguments of `WanTransformer3DModel`, all of them.
        rows: of the sequence.
        text_rows: read by cross-attention.
    """
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden, ffn, layers = heads * head_dim, config["ffn_dim"], config["num_layers"]
    patch = math.prod(config["patch_size"])

    # The patch embedding is a convolution whose windows don't overlap: a matrix over patches.
    yield linear(rows, config["in_channels"] * patch, hidden)
    yield linear(text_rows, config["text_dim"], hidden)
    yield linear(text_rows, hidden, hidden)
    yield linear(1, config["freq_dim"], hidden)
    yield linear(1, hidden, hidden)
    yield linear(1, hidden, 6 * hidden)

    yield from attention_block(rows, rows, hidden, heads, head_dim, layers)
    yield from attention_block(rows, text_rows, hidden, heads, head_dim, layers)
    yield linear(rows, hidden, ffn, layers)
    yield linear(rows, ffn, hidden, layers)

    yield linear(rows, hidden, (config["out_channels"] or config["in_channels"]) * patch)
