"""MiniMax-H3 with FP8 linears: near the model, said in the receipt, and gone without a trace."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.pipelines.test_h3_fused import away, inputs
from tests.pipelines.test_lossless import OPS, REQUEST, latents
from videoaccel.config import AccelConfig, KernelsConfig
from videoaccel.errors import UserError
from videoaccel.install import accelerate
from videoaccel.kernels import ops as kernel_ops
from videoaccel.kernels.technique import FP8_WARNING
from videoaccel.pipelines import fp8 as fp8_module
from videoaccel.pipelines import h3_fused
from videoaccel.pipelines.fp8 import Fp8

FP8 = AccelConfig(tier="lossless", risk_budget=0.05, kernels=KernelsConfig(precision="fp8"))
EAGER = {name: kernel_ops.OPS[name].named("eager").load() for name in (*h3_fused.OPS, *fp8_module.OPS)}


@torch.no_grad()
def test_every_linear_of_a_block_is_fp8_and_the_error_is_of_its_size(tiny: Any) -> None:
    transformer = copy.deepcopy(tiny.transformer).eval()
    given = inputs(transformer)
    stock = transformer(**given)
    weights = {name: value.clone() for name, value in transformer.state_dict().items()}
    with ExitStack() as undo:
        assert h3_fused.fuse_transformer(transformer, EAGER, undo, fp8=Fp8(EAGER)) == ()
        got = transformer(**given)
        block = transformer.transformer_blocks[0]
        rows = torch.zeros(1, 1, transformer.config.hidden_size)
        for linear in (block.attn.to_q, block.attn.to_out[0], block.ff.net[0].proj, block.ff.net[2]):
            with pytest.raises(UserError, match=r"remove\(\) the acceleration"):
                linear(rows)
    for new, old in zip(got, stock, strict=True):
        # A product of FP8 codes is off by some 4 % (see tests/kernels); the residual stream carries most.
        assert 1e-4 < away(new, old) < 0.1
    for new, old in zip(transformer(**given), stock, strict=True):
        assert torch.equal(new, old)
    assert all(torch.equal(value, weights[name]) for name, value in transformer.state_dict().items())


def test_the_receipt_says_what_it_is(tiny: Any) -> None:
    exact, _ = latents(tiny, AccelConfig())
    got, receipt = latents(tiny, FP8)
    assert [choice.op for choice in receipt.kernels] == [*OPS, "quantize_fp8", "linear_fp8"]
    assert receipt.warnings == (FP8_WARNING,)
    assert 0 < float((got["video"] - exact["video"]).norm() / exact["video"].norm()) < 0.2


def test_what_cannot_be_fp8_is_refused_and_nothing_stays(tiny: Any) -> None:
    from peft import LoraConfig

    with pytest.raises(UserError, match="set fuse: true"):
        config = KernelsConfig(precision="fp8", fuse=False)
        accelerate(tiny, AccelConfig(tier="lossless", risk_budget=0.05, kernels=config))
    # `lossless` promises no loss: whoever wants this one says how much may be lost.
    with pytest.raises(UserError, match="give a risk_budget"):
        accelerate(tiny, AccelConfig(tier="lossless", kernels=KernelsConfig(precision="fp8")))
    transformer = tiny.transformer
    before = latents(tiny, AccelConfig())[0]
    transformer.add_adapter(LoraConfig(r=2, target_modules=["net.2"]))
    try:
        with pytest.raises(UserError, match="merge the LoRA before accelerate"):
            accelerate(tiny, FP8)
    finally:
        transformer.unload_lora()
    after = latents(tiny, AccelConfig())[0]
    assert all(torch.equal(after[stream], value) for stream, value in before.items())


def test_a_lora_that_comes_later_is_refused(tiny: Any) -> None:
    from peft import LoraConfig

    with accelerate(tiny, FP8) as handle:
        tiny.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_k"]))
        try:
            with pytest.raises(UserError, match="a LoRA was put on linears that are FP8"):
                handle.run(REQUEST, decode=False)
        finally:
            tiny.transformer.unload_lora()
