"""The ops of one forward of MiniMax-H3 as released, from the defaults of its class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from videoaccel.kernels.work import OpCall
from videoaccel.pipelines.op_calls import (
    ForwardOps,
    attention_block,
    linear,
    pointwise,
    released_config,
)

FRAMES, LATENT_FRAMES, HEIGHT, WIDTH = 124, 37, 768, 1344
"""5 s at 24 fps on the default canvas: 17n+5 frames are 5n+2 latent ones."""
VAE_STRIDE = 16
AUDIO_ROWS = 2 * round(FRAMES / 24 * 40)
"""Two channels of 40 latents a second."""
TEXT_ROWS = 256
"""A prompt as `bench` stands one in for."""
TIMESTEPS = 2
"""Distinct noise levels of a `t2va` forward: the video's, which text rows share, and the audio's."""
MODALITIES = 3
"""Of AdaLN's table."""


def h3_forward() -> ForwardOps:
    """See `Family.forward_ops`."""
    from diffusers import MiniMaxH3Transformer3DModel

    config = released_config(MiniMaxH3Transformer3DModel)
    _, patch_h, patch_w = config["patch_size"]
    video = LATENT_FRAMES * (HEIGHT // VAE_STRIDE // patch_h) * (WIDTH // VAE_STRIDE // patch_w)
    rows = video + AUDIO_ROWS + TEXT_ROWS
    return ForwardOps(
        title="MiniMax-H3 (full size)",
        size=f"5 s at {WIDTH}x{HEIGHT}",
        rows=rows,
        calls=tuple(h3_calls(config, video_rows=video, audio_rows=AUDIO_ROWS, text_rows=TEXT_ROWS)),
    )


def h3_calls(config: Any, *, video_rows: int, audio_rows: int, text_rows: int) -> Iterator[OpCall]:
    """Every call of a forward.

    Args:
        config: arguments of `MiniMaxH3Transformer3DModel`, all of them.
        video_rows, audio_rows, text_rows: of the packed sequence.
    """
    rows = video_rows + audio_rows + text_rows
    hidden, heads, head_dim = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["attention_head_dim"],
    )
    ffn, time, layers = config["ffn_dim"], config["time_embed_dim"], config["num_layers"]
    patch = config["in_channels"] * math.prod(config["patch_size"])
    audio = config["audio_in_channels"]

    # Into the sequence. The float32 ones among these are too small to be told apart in an estimate.
    yield linear(video_rows, patch, hidden)
    yield linear(audio_rows, audio, hidden)
    yield linear(text_rows, config["text_dim"], hidden)
    yield linear(TIMESTEPS, config["freq_dim"], config["time_embed_hidden_dim"])
    yield linear(TIMESTEPS, config["time_embed_hidden_dim"], time)

    # The refiner of the text: no AdaLN and no rotary embedding, so of the fused ops it has the SwiGLU alone.
    refiner = config["num_refiner_layers"]
    yield from attention_block(text_rows, text_rows, hidden, heads, head_dim, refiner)
    yield from _feed_forward(text_rows, hidden, ffn, refiner)

    yield linear(TIMESTEPS, time, 6 * MODALITIES * hidden, layers)
    yield pointwise("norm_modulate", rows, hidden, layers)
    yield from attention_block(rows, rows, hidden, heads, head_dim, layers)
    yield OpCall(op="qk_norm_rope", sizes={"rows": rows, "heads": heads, "head_dim": head_dim}, count=layers)
    yield pointwise("gate_residual_norm_modulate", rows, hidden, layers)
    yield from _feed_forward(rows, hidden, ffn, layers)
    yield pointwise("gate_residual", rows, hidden, layers)

    # Both heads run over every row, behind one more modulated norm.
    yield linear(TIMESTEPS, time, 2 * hidden)
    yield pointwise("norm_modulate", rows, hidden)
    yield linear(rows, hidden, patch)
    yield linear(rows, hidden, audio)


def _feed_forward(rows: int, hidden: int, ffn: int, count: int) -> Iterator[OpCall]:
    yield linear(rows, hidden, 2 * ffn, count)
    yield pointwise("swiglu", rows, ffn, count)
    yield linear(rows, ffn, hidden, count)
