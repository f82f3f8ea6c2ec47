"""MiniMax-H3's transformer with fused ops says what diffusers' own says, and is its own again afterwards."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from videoaccel.errors import UserError
from videoaccel.kernels.ops import OPS as KERNELS
from videoaccel.pipelines.h3_fused import OPS, FusedProcessor, fuse_transformer
from videoaccel.pipelines.joint import joint_weight
from videoaccel.pipelines.swap import swap_forward

EAGER = {name: KERNELS[name].named("eager").load() for name in OPS}


@pytest.fixture
def transformer(tiny: Any) -> Any:
    return copy.deepcopy(tiny.transformer).eval()


def inputs(transformer: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A packed sequence of 6 text, 10 video and 4 audio rows at three noise levels."""
    generator = torch.Generator().manual_seed(7)
    config = transformer.config
    text, video, audio = range(6), range(6, 16), range(16, 20)
    rows = 20

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "hidden_states": noise(1, len(video), config.in_channels * 4),
        "audio_hidden_states": noise(1, len(audio), config.audio_in_channels),
        "encoder_hidden_states": noise(1, len(text), config.text_dim),
        "timestep": torch.tensor([0.1, 0.4, 0.999]),
        "timestep_indices": torch.tensor([2] * 6 + [0] * 10 + [1] * 4),
        "token_tags": torch.tensor([1] * 6 + [0] * 10 + [2] * 4),
        "position_ids": torch.randint(0, 9, (rows, 3), generator=generator),
        "video_indices": torch.tensor(video),
        "audio_indices": torch.tensor(audio),
        "text_indices": torch.tensor(text),
        "return_dict": False,
    }


def away(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@torch.no_grad()
def test_float32_agrees_with_diffusers_and_undo_is_bit_exact(transformer: Any) -> None:
    given = inputs(transformer)
    stock = transformer(**given)
    before = {name: vars(module).copy() for name, module in transformer.named_modules()}
    with ExitStack() as undo:
        assert fuse_transformer(transformer, EAGER, undo) == ()
        fused = transformer(**given)
    for got, want in zip(fused, stock, strict=True):
        assert away(got, want) < 2e-6  # float32 roundings through eight blocks
    for got, want in zip(transformer(**given), stock, strict=True):
        assert torch.equal(got, want)
    after = {name: vars(module) for name, module in transformer.named_modules()}
    assert {name: set(values) for name, values in after.items()} == {
        name: set(values) for name, values in before.items()
    }


@torch.no_grad()
def test_in_bfloat16_the_fused_one_is_no_further_from_the_truth(transformer: Any) -> None:
    given = inputs(transformer)
    truth = transformer.double()(
        **{key: v.double() if key.endswith("hidden_states") else v for key, v in given.items()}
    )
    half = transformer.to(torch.bfloat16)
    stock = half(**given)
    with ExitStack() as undo:
        fuse_transformer(half, EAGER, undo)
        fused = half(**given)
    for got, plain, want in zip(fused, stock, truth, strict=True):
        assert away(got, want) < 1.1 * away(plain, want)


def test_every_op_is_called_as_often_as_the_blocks_need(transformer: Any) -> None:
    seen = dict.fromkeys(OPS, 0)

    def counting(name: str) -> Any:
        def op(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return EAGER[name](*args, **kwargs)

        return op

    with ExitStack() as undo, torch.no_grad():
        fuse_transformer(transformer, {name: counting(name) for name in OPS}, undo)
        transformer(**inputs(transformer))
    blocks = transformer.config.num_layers
    assert seen == {
        "norm_modulate": blocks + 1,
        "gate_residual": blocks,
        "gate_residual_norm_modulate": blocks,
        "qk_norm_rope": blocks,
        "swiglu": blocks,
    }


def test_processors_keep_the_backend_across_both_changes_and_foreign_ones_stay(transformer: Any) -> None:
    class Foreign:
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
            return hidden_states

    blocks = transformer.transformer_blocks
    foreign = Foreign()
    blocks[1].attn.processor = foreign
    stock = blocks[0].attn.processor
    transformer.set_attention_backend("native")
    with ExitStack() as undo:
        (note,) = fuse_transformer(transformer, EAGER, undo)
        assert note.startswith("1 attention processors")
        assert isinstance(blocks[0].attn.processor, FusedProcessor)
        assert blocks[0].attn.processor._attention_backend.value == "native"
        assert blocks[1].attn.processor is foreign
        transformer.set_attention_backend("_native_math")
    assert blocks[0].attn.processor is stock
    assert stock._attention_backend.value == "_native_math"


@torch.no_grad()
def test_queries_keys_and_values_are_one_product_until_somebody_changes_one(transformer: Any) -> None:
    given = inputs(transformer)
    reference = copy.deepcopy(transformer)
    attn = transformer.transformer_blocks[2].attn
    linears = (attn.to_q, attn.to_k, attn.to_v)
    assert joint_weight(linears) is None
    with ExitStack() as undo:
        fuse_transformer(transformer, EAGER, undo)
        joint = joint_weight(linears)
        assert joint is not None
        assert torch.equal(joint, torch.cat([linear.weight for linear in linears]))
        # In place: the same storage. Replaced: not any more. Both are what the next forward computes with.
        for change in (lambda w: w.mul_(1.5), lambda w: setattr(w, "data", w.data * 0.5)):
            for model in (transformer, reference):
                change(model.transformer_blocks[2].attn.to_k.weight)
            for got, want in zip(transformer(**given), reference(**given), strict=True):
                assert away(got, want) < 2e-6
        assert joint_weight(linears) is None
    storages = {linear.weight.untyped_storage().data_ptr() for linear in linears}
    assert len(storages) == 3
    for got, want in zip(transformer(**given), reference(**given), strict=True):
        assert torch.equal(got, want)


@torch.no_grad()
def test_a_lora_on_a_joined_projection_is_honoured(transformer: Any) -> None:
    from peft import LoraConfig

    given = inputs(transformer)
    reference = copy.deepcopy(transformer)
    with ExitStack() as undo:
        fuse_transformer(transformer, EAGER, undo)
        for model in (reference, transformer):
            torch.manual_seed(3)
            model.add_adapter(LoraConfig(r=2, target_modules=["to_k", "proj"], init_lora_weights=False))
        for got, want in zip(transformer(**given), reference(**given), strict=True):
            assert away(got, want) < 2e-6
        # Taken off again, they are plain, and still lie end to end.
        adapted = transformer(**given)
        transformer.unload_lora()
        attn = transformer.transformer_blocks[0].attn
        assert joint_weight((attn.to_q, attn.to_k, attn.to_v)) is not None
        assert away(transformer(**given)[0], adapted[0]) > 1e-4


@torch.no_grad()
def test_a_hook_that_wraps_a_forward_stays_outside_in_any_order() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Double(ModelHook):
        def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    x = torch.ones(1, 2)
    for hook_first in (True, False):
        module = torch.nn.Identity()
        undo = ExitStack()
        if hook_first:
            add_hook_to_module(module, Double())
        swap_forward(module, lambda given: given + 1, undo)
        if not hook_first:
            add_hook_to_module(module, Double())
        assert torch.equal(module(x), torch.full((1, 2), 4.0))
        undo.close()
        assert torch.equal(module(x), torch.full((1, 2), 2.0))
        remove_hook_from_module(module)
        assert torch.equal(module(x), x)


def test_a_forward_that_cannot_be_reached_is_refused() -> None:
    module = torch.nn.Identity()
    inner = module.forward
    module.forward = lambda given: inner(given)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="wrapped by another library"), ExitStack() as undo:
        swap_forward(module, lambda given: given, undo)
