"""How the kernels go into a transformer of MiniMax-H3."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from videoaccel.kernels.registry import EAGER, Choice
from videoaccel.pipelines.fitting import Fitting, MakeTables
from videoaccel.pipelines.fp8 import Fp8
from videoaccel.pipelines.h3_folded import FoldedAdaLN
from videoaccel.pipelines.h3_fused import fuse_transformer, set_backend
from videoaccel.pipelines.h3_run import MiniMaxH3Run
from videoaccel.pipelines.run import Run


class H3Fitting(Fitting):
    """See `Fitting`."""

    def __init__(self, components: tuple[str, ...], transformer: Any) -> None:
        config = transformer.config
        width = {"width": config.hidden_size}
        heads = {"heads": config.num_attention_heads, "head_dim": config.attention_head_dim}
        self.components, self.transformer = components, transformer
        self.dtype = transformer.transformer_blocks[0].norm1.weight.dtype
        self.sizes: Mapping[str, Mapping[str, int]] = {
            "attention": heads,
            "norm_modulate": width,
            "gate_residual": width,
            "gate_residual_norm_modulate": width,
            "qk_norm_rope": heads,
            "swiglu": {"width": config.ffn_dim},
        }
        inner = config.num_attention_heads * config.attention_head_dim
        products = (
            (config.hidden_size, 3 * inner),
            (inner, config.hidden_size),
            (config.hidden_size, 2 * config.ffn_dim),
            (config.ffn_dim, config.hidden_size),
        )
        # One choice for all of them, so the sizes are what all of them are multiples of.
        common = math.gcd(*(size for pair in products for size in pair))
        self.fp8_sizes = {
            "quantize_fp8": {"width": inner},
            "linear_fp8": {"in_features": common, "out_features": common},
        }

    def fuse(self, choices: Mapping[str, Choice], undo: ExitStack, *, fp8: bool) -> tuple[str, ...]:
        ops = {name: choice.impl.load() for name, choice in choices.items() if name != "attention"}
        notes = fuse_transformer(self.transformer, ops, undo, fp8=Fp8(ops) if fp8 else None)
        if choices["attention"].impl.name != EAGER:
            notes += set_backend(self.transformer, choices["attention"].impl.name, undo)
        return notes

    def fold(self, undo: ExitStack) -> MakeTables | None:
        folded = FoldedAdaLN(self.transformer, undo)

        def make(run: Run) -> Callable[[int], AbstractContextManager[None]]:
            assert isinstance(run, MiniMaxH3Run)
            tables = folded.prepare(run.timestep_plan)
            return lambda step: folded.using(tables[step])

        return make
