"""MiniMax-H3's transformer with its small ops fused: the stock modules and weights, other forwards on them.

What lies between a block's matrix products and its attention is bound by memory: diffusers reads and writes
the packed sequence some fifteen times a block for it. With the fused ops it is what is possible without
fusing into the products: one pass for each norm, for queries and keys, for SwiGLU and for the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.fitting import Compiler
from videoaccel.pipelines.fp8 import Fp8, Quantized
from videoaccel.pipelines.h3_fp8 import fp8_attention, fp8_feed_forward, inward_linears
from videoaccel.pipelines.joint import join_weights, joint_weight
from videoaccel.pipelines.swap import swap_forward

OPS = ("norm_modulate", "gate_residual", "gate_residual_norm_modulate", "qk_norm_rope", "swiglu")
"""The ops that `fuse_transformer` takes."""

Ops = Mapping[str, Callable[..., Any]]


def fuse_transformer(
    transformer: Any, ops: Ops, undo: ExitStack, *, fp8: Fp8 | None = None, compiled: Compiler | None = None
) -> tuple[str, ...]:
    """Puts `ops` in the place of what the blocks and the output norm do between their matrix products.

    Args:
        transformer: a `MiniMaxH3Transformer3DModel`.
        ops: an implementation of each of `OPS`.
        undo: receives the inverse of every change.
        fp8: also makes the blocks' linears FP8, their inputs quantised by the op in front. What few rows or
            few weights pass through stays, and what the output depends on most: embedders, the text's
            refiner, AdaLN, the output norm and both heads.
        compiled: compiles what the blocks run, once for all of them; for ops that it can look into.

    Returns:
        What stays as it was, in words.

    Raises:
        UserError: a forward is wrapped by another library (see `swap_forward`), or can't be made FP8.
    """
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor

    core = _core(ops, quantized=fp8 is not None)
    if compiled is not None:
        core = compiled(core)
    foreign = apart = 0
    for block in transformer.transformer_blocks:
        attn = block.attn
        stock = type(attn.processor) is MiniMaxH3AttnProcessor
        foreign += not stock
        if fp8 is not None:
            if not stock:
                raise UserError(
                    "FP8 needs diffusers' own attention processors: set them back, or leave it off"
                )
            inner = fp8_attention(attn, fp8, undo)
            feed_forward = fp8_feed_forward(block.ff, ops["swiglu"], fp8, undo)
            swap_forward(block, _block_forward(block, core, feed_forward), undo)
            _put_processor(attn, FusedProcessor(ops["qk_norm_rope"], *inner), undo)
            continue
        swap_forward(block, _block_forward(block, core), undo)
        if stock:
            project = _apart if compiled is not None else None
            _put_processor(attn, FusedProcessor(ops["qk_norm_rope"], project), undo)
            if not attn.fused_projections and compiled is None:
                apart += not join_weights(inward_linears(attn), undo)
    swap_forward(transformer.norm_out, _norm_out_forward(transformer.norm_out, ops), undo)
    notes = {
        "attention processors are not diffusers' own, and keep their norms and rotary embedding": foreign,
        "attentions project queries, keys and values apart, as their linears are not plain ones": apart,
    }
    return tuple(f"{count} {what}" for what, count in notes.items() if count)


def _core(ops: Ops, *, quantized: bool) -> Callable[..., torch.Tensor]:
    """What a block computes from its tables on, of any block: the compiler sees one function, not fifty."""
    norm_modulate, gate_residual = ops["norm_modulate"], ops["gate_residual"]
    between, swiglu = ops["gate_residual_norm_modulate"], ops["swiglu"]
    emit = {"quantize": True} if quantized else {}

    def core(
        block: Any,
        feed_forward: Callable[..., torch.Tensor] | None,
        hidden_states: torch.Tensor,
        tables: tuple[torch.Tensor, ...],
        adaln_indices: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = tables
        first, second = block.norm1, block.norm2
        normed = norm_modulate(hidden_states, first.weight, shift, scale, adaln_indices, first.eps, **emit)
        attended = block.attn(Quantized(*normed) if quantized else normed, rotary_emb, attention_mask)
        hidden_states, *normed = between(
            hidden_states,
            attended,
            gate,
            adaln_indices,
            second.weight,
            shift_mlp,
            scale_mlp,
            second.eps,
            **emit,
        )
        if feed_forward is None:
            changed = block.ff.net[2](swiglu(block.ff.net[0].proj(normed[0])))
        else:
            changed = feed_forward(Quantized(*normed))
        result: torch.Tensor = gate_residual(hidden_states, changed, gate_mlp, adaln_indices)
        return result

    return core


def _block_forward(
    block: Any, core: Callable[..., torch.Tensor], feed_forward: Callable[..., torch.Tensor] | None = None
) -> Callable[..., torch.Tensor]:
    def forward(
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        adaln_indices: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tables = block.adaln_proj(temb)
        return core(block, feed_forward, hidden_states, tables, adaln_indices, rotary_emb, attention_mask)

    return forward


def _norm_out_forward(norm_out: Any, ops: Ops) -> Callable[..., torch.Tensor]:
    norm_modulate = ops["norm_modulate"]

    def forward(
        hidden_states: torch.Tensor, temb: torch.Tensor, timestep_indices: torch.Tensor
    ) -> torch.Tensor:
        weight = norm_out.linear.weight
        # The activation at temb's own precision, as diffusers has it and says why.
        tables = norm_out.linear(torch.nn.functional.silu(temb).to(weight.dtype))
        shift, scale = tables.chunk(2, dim=-1)
        result: torch.Tensor = norm_modulate(
            hidden_states, norm_out.norm.weight, shift, scale, timestep_indices, norm_out.norm.eps
        )
        return result

    return forward


class FusedProcessor:
    """diffusers' `MiniMaxH3AttnProcessor` with the norms of queries and keys and the rotary embedding fused.

    The two attributes are those that diffusers sets on a processor: `set_attention_backend` and the context
    parallel plan find it as they find its own.
    """

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(
        self,
        qk_norm_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        project: Callable[..., Sequence[torch.Tensor]] | None = None,
        output: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """Both default to the module's own linears.

        Args:
            qk_norm_rope: the op.
            project: the attention module and `(B, L, D)` to queries, keys and values `(B, L, H D)`.
            output: the attention module and `(B, L, H D)` to `(B, L, D)`.
        """
        self._qk_norm_rope = qk_norm_rope
        self._project, self._output = project or projected, output or _output

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(B, L, D)` to `(B, L, D)`."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        query, key, value = (
            rows.view(*rows.shape[:-1], attn.heads, -1) for rows in self._project(attn, hidden_states)
        )
        cos, sin = rotary_emb or (None, None)
        query, key = self._qk_norm_rope(
            query, key, attn.norm_q.weight, attn.norm_k.weight, cos, sin, attn.norm_q.eps
        )
        attended = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        return self._output(attn, attended.flatten(2, 3).type_as(query))


def _output(attn: Any, attended: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = attn.to_out[0](attended)
    return out


def _apart(attn: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(linear(hidden_states) for linear in (attn.to_q, attn.to_k, attn.to_v))


def projected(attn: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, `(B, L, H D)` each, of any stride: one product where the weights allow it."""
    if attn.fused_projections:
        parts: tuple[torch.Tensor, ...] = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        return parts
    linears = inward_linears(attn)
    joint = joint_weight(linears)
    if joint is None:
        return _apart(attn, hidden_states)
    sizes = [linear.out_features for linear in linears]
    return torch.nn.functional.linear(hidden_states, joint).split_with_sizes(sizes, -1)


_SHARED = ("_attention_backend", "_parallel_config")


def _put_processor(attn: Any, fused: FusedProcessor, undo: ExitStack) -> None:
    stock = attn.processor
    _hand_over(stock, fused)

    def restore() -> None:
        # What was set while this one stood in stays set.
        _hand_over(fused, stock)
        attn.set_processor(stock)

    attn.set_processor(fused)
    undo.callback(restore)


def _hand_over(source: Any, target: Any) -> None:
    for name in _SHARED:
        if getattr(target, name) is not getattr(source, name):
            setattr(target, name, getattr(source, name))


_BACKENDS = {
    "cudnn": "_native_cudnn",
    "flash": "_native_flash",
    "efficient": "_native_efficient",
    "eager": "native",
}
"""Implementations of attention by diffusers' names."""


def set_backend(transformer: Any, name: str, undo: ExitStack) -> str | None:
    """Has the blocks' attention run through one implementation, unless one was set before: that one's name.

    By the processors' own attribute: `set_attention_backend` would also change what every other model of the
    process runs on.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    processors = [block.attn.processor for block in transformer.transformer_blocks]
    if kept := _backends(processors):
        return kept
    chosen = AttentionBackendName(_BACKENDS[name])

    def restore() -> None:
        for processor in processors:
            if getattr(processor, "_attention_backend", None) is chosen:
                processor._attention_backend = None

    undo.callback(restore)
    for processor in processors:
        processor._attention_backend = chosen
    return None


def other_backend(processors: Sequence[Any], name: str) -> str | None:
    """What attention runs on now where that is not, or not only, the named implementation."""
    found = _backends(processors)
    return None if found == _BACKENDS[name] else found or "diffusers' default"


def _backends(processors: Iterable[Any]) -> str:
    """The names of what is set on attention processors; empty where nothing is."""
    found = (getattr(processor, "_attention_backend", None) for processor in processors)
    return ", ".join(sorted({str(getattr(b, "value", b)) for b in found if b is not None}))
