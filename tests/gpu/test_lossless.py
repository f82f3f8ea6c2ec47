"""Tier `lossless` and FP8 linears on a device, where the kernels are compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from videoaccel.config import AccelConfig, KernelsConfig
from videoaccel.install import accelerate
from videoaccel.pipelines.h3_random import build_random_h3, random_prompt_embeds
from videoaccel.pipelines.request import Request

from .conftest import DEVICE, ON_CUDA, relative_l2

pytestmark = pytest.mark.gpu

# Heads and widths of real sizes, so that every kernel that the full model gets is chosen; few blocks.
MEDIUM = {
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "hidden_size": 384,
    "num_layers": 4,
    "num_refiner_layers": 1,
    "ffn_dim": 1024,
    "text_dim": 64,
    "time_embed_hidden_dim": 384,
    "time_embed_dim": 192,
}
FORWARDS = 4
CONFIGS = {
    "lossless": AccelConfig(tier="lossless"),
    "fp8": AccelConfig(tier="lossless", risk_budget=0.05, kernels=KernelsConfig(precision="fp8")),
}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return build_random_h3(device=DEVICE, dtype=torch.bfloat16, vaes=False, config=MEDIUM)


def velocities(pipe: Any, config: AccelConfig) -> tuple[list[torch.Tensor], Any]:
    """Both streams of every forward of a request, and its receipt."""
    seen: list[torch.Tensor] = []
    hook = pipe.transformer.register_forward_hook(
        lambda module, args, output: seen.append(torch.cat([part.double().flatten() for part in output]))
    )
    request = Request(prompt="x", num_frames=124, height=128, width=192, steps=FORWARDS + 1, seed=3)
    try:
        with accelerate(pipe, config) as handle:
            embeds = random_prompt_embeds(pipe, 32)
            receipt = handle.run(request, prompt_embeds=embeds, decode=False)[1]
    finally:
        hook.remove()
    return seen, receipt


def test_lossless_is_no_further_from_float32_than_diffusers(
    pipe: Any, record_property: Callable[[str, Any], None]
) -> None:
    from evals.h3_kernels import in_float32

    with in_float32(pipe.transformer):
        (truth, *_), _ = velocities(pipe, AccelConfig())
    (stock, *_), _ = velocities(pipe, AccelConfig())
    (lossless, *_), receipt = velocities(pipe, CONFIGS["lossless"])
    record_property("stock_rel_l2", relative_l2(stock, truth))
    record_property("lossless_rel_l2", relative_l2(lossless, truth))
    assert relative_l2(lossless, truth) <= 1.1 * relative_l2(stock, truth)
    chosen = {choice.op: choice.impl for choice in receipt.kernels}
    record_property("kernels", str(chosen))
    if not ON_CUDA:
        return
    assert {impl for op, impl in chosen.items() if op != "attention"} == {"triton"}
    assert receipt.warnings == ()


def test_tables_made_ahead_are_the_forwards_own_bits(pipe: Any) -> None:
    stock, _ = velocities(pipe, AccelConfig())
    folded, _ = velocities(pipe, AccelConfig(tier="lossless", kernels=KernelsConfig(fuse=False)))
    assert len(stock) == len(folded) == FORWARDS
    assert all(torch.equal(got, want) for got, want in zip(folded, stock, strict=True))


def test_folded_projections_are_off_the_device_and_come_back(pipe: Any) -> None:
    if not ON_CUDA:
        pytest.skip("nothing is moved on a CPU")
    torch.cuda.synchronize()
    linears = [block.adaln_proj.linear for block in pipe.transformer.transformer_blocks]
    before = torch.cuda.memory_allocated()
    weights = [linear.weight.clone().cpu() for linear in linears]
    with accelerate(pipe, CONFIGS["lossless"]):
        freed = before - torch.cuda.memory_allocated()
        assert all(linear.weight.device.type == "cpu" and linear.weight.is_pinned() for linear in linears)
        assert freed >= 0.95 * sum(linear.weight.nbytes for linear in linears)
    assert all(linear.weight.is_cuda for linear in linears)
    assert all(torch.equal(linear.weight.cpu(), w) for linear, w in zip(linears, weights, strict=True))
    assert abs(torch.cuda.memory_allocated() - before) < 1e6


def test_fp8_is_near_and_gone_afterwards(pipe: Any, record_property: Callable[[str, Any], None]) -> None:
    if ON_CUDA and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no FP8")
    stock, _ = velocities(pipe, AccelConfig())
    fp8, receipt = velocities(pipe, CONFIGS["fp8"])
    again, _ = velocities(pipe, AccelConfig())
    record_property("fp8_rel_l2", relative_l2(fp8[0], stock[0]))
    assert 0 < relative_l2(fp8[0], stock[0]) < 0.1
    chosen = {choice.op: choice.impl for choice in receipt.kernels}
    wanted = ("scaled_mm", "triton") if ON_CUDA else ("eager", "eager")
    assert (chosen["linear_fp8"], chosen["quantize_fp8"]) == wanted
    assert all(torch.equal(got, want) for got, want in zip(again, stock, strict=True))
