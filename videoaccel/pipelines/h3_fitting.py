"""How the kernels go into a transformer of MiniMax-H3."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.kernels.registry import Choice
from videoaccel.pipelines.fitting import Compiler, Fitting, MakeTables
from videoaccel.pipelines.fp8 import Fp8
from videoaccel.pipelines.h3_folded import FoldedAdaLN
from videoaccel.pipelines.h3_fp8 import fp8_linears
from videoaccel.pipelines.h3_fused import FusedProcessor, fuse_transformer, other_backend, set_backend
from videoaccel.pipelines.h3_run import MiniMaxH3Run
from videoaccel.pipelines.hooked import check_unhooked
from videoaccel.pipelines.run import Run
from videoaccel.receipt import KernelChoice


class H3Fitting(Fitting):
    """See `Fitting`."""

    transformer: Any

    def __init__(self, components: tuple[str, ...], transformer: Any) -> None:
        config = transformer.config
        width = {"width": config.hidden_size}
        heads = {"heads": config.num_attention_heads, "head_dim": config.attention_head_dim}
        self.components, self.transformer = components, transformer
        self._converted = False
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

    def check(self, *, fused: bool, folded: bool) -> None:
        if self._converted and any(
            type(linear) is not torch.nn.Linear
            for block in self.transformer.transformer_blocks
            for linear in fp8_linears(block)
        ):
            raise UserError(
                "a LoRA was put on linears that are FP8: remove() the acceleration, merge the LoRA, and "
                "accelerate() again"
            )
        if folded:
            # Tables are made outside the transformer's forward, and its projections are moved.
            check_unhooked(self.transformer.named_modules(), "kernels.fold")
        if fused:
            blocks = [*self.transformer.transformer_blocks, self.transformer.norm_out]
            inside = (
                (f"{type(block).__name__}.{name}", module)
                for block in blocks
                for name, module in block.named_modules()
                if name
            )
            check_unhooked(inside, "kernels.fuse")

    def running(self, choices: Mapping[str, Choice]) -> tuple[KernelChoice, ...]:
        processors = [block.attn.processor for block in self.transformer.transformer_blocks]
        fused = sum(isinstance(processor, FusedProcessor) for processor in processors)
        found = []
        for op, choice in choices.items():
            record = choice.record()
            if op == "attention" and (other := other_backend(processors, choice.impl.name)) is not None:
                record = replace(record, impl=other, why="set on the transformer, where it stays")
            if op == "qk_norm_rope" and fused < len(processors):
                if not fused:
                    continue
                record = replace(record, why=f"{record.why}; in {fused} of {len(processors)} blocks")
            found.append(record)
        return tuple(found)

    def fuse(
        self, choices: Mapping[str, Choice], undo: ExitStack, *, fp8: bool, compiled: Compiler | None
    ) -> tuple[str, ...]:
        ops = {name: choice.impl.load() for name, choice in choices.items() if name != "attention"}
        notes = fuse_transformer(
            self.transformer, ops, undo, fp8=Fp8(ops) if fp8 else None, compiled=compiled
        )
        self._converted = fp8
        attention = choices["attention"]
        kept = set_backend(self.transformer, attention.impl.name, undo)
        if kept is not None and attention.pinned:
            raise UserError(
                f"attention is pinned to {attention.impl.name}, but {kept} is set on the transformer: call "
                "its reset_attention_backend(), or leave the pin out"
            )
        return (
            notes if kept is None else (*notes, f"attention stays with {kept}, set on the transformer before")
        )

    def fold(self, undo: ExitStack) -> MakeTables | None:
        folded = FoldedAdaLN(self.transformer, undo)

        def make(run: Run) -> tuple[Callable[[int], AbstractContextManager[None]], int]:
            assert isinstance(run, MiniMaxH3Run)
            tables = folded.prepare(run.timestep_plan)
            return lambda step: folded.using(tables[step]), sum(table.nbytes for table in tables)

        return make
