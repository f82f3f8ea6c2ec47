"""The batched training forward on the device: bf16 autocast and compiled blocks against the stock forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from evals.batched import Layout, block_forward, make_layout, transformer_forward
from videoaccel.pipelines.h3_random import random_transformer
from videoaccel.pipelines.loading import bundled_folder

from .conftest import DEVICE, relative_l2

pytestmark = pytest.mark.gpu

FP32 = 2e-5
BF16 = 3e-2
"""Relative L2 of a velocity. bf16 keeps 8 bits, and its roundings add up over the blocks' residual stream."""
TAGS = [1] * 4 + [0] * 6 + [1] * 8
TIMES = [[0.1, 0.3, 0.999], [0.5, 0.6, 0.999], [0.9, 0.95, 0.999]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "t2va": {},
    "ref2va": {"reference_edge": 8},
    "fl2va": {"anchors": ("first", "last")},
}


@pytest.fixture
def transformer() -> Any:
    """Of the bundled model's size, with random weights: the tolerances do not hang on how training went."""
    from diffusers import MiniMaxH3Transformer3DModel

    raw = json.loads((bundled_folder("tiny-h3") / "transformer" / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in raw.items() if not name.startswith("_")}
    model = random_transformer(MiniMaxH3Transformer3DModel, config, DEVICE, torch.float32)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        # Norm gains of one and biases of zero would hide a forgotten one.
        if parameter.ndim == 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
    return model


def draw(model: Any, layout: Layout) -> dict[str, torch.Tensor]:
    """Inputs of a batch of three, each sample at noise levels of its own."""
    generator = torch.Generator().manual_seed(1)
    widths = {
        "video": (len(layout.video), model.config.in_channels * 4),
        "audio": (len(layout.audio), model.config.audio_in_channels),
        "text": (len(layout.text), model.config.text_dim),
    }
    inputs = {name: torch.randn(3, *shape, generator=generator) for name, shape in widths.items()}
    return {name: value.to(DEVICE) for name, value in {**inputs, "times": torch.tensor(TIMES)}.items()}


def stock(model: Any, layout: Layout, inputs: dict[str, torch.Tensor], index: int) -> list[torch.Tensor]:
    """Velocities of one sample by diffusers' own forward, which takes one set of noise levels a call."""
    one = {name: value[index : index + 1] for name, value in inputs.items()}
    found = model(
        hidden_states=one["video"],
        audio_hidden_states=one["audio"],
        encoder_hidden_states=one["text"],
        timestep=one["times"][0],
        timestep_indices=layout.times.argmax(1),
        token_tags=layout.tags,
        position_ids=layout.position_ids,
        video_indices=layout.video,
        audio_indices=layout.audio,
        text_indices=layout.text,
    )
    return [found.sample[0, layout.conditions :], found.audio_sample[0]]


@pytest.mark.parametrize("task", LAYOUTS)
@torch.no_grad()
def test_autocast_stays_near_the_stock_forward_in_float32(
    transformer: Any, task: str, record_property: Any
) -> None:
    layout = make_layout(torch.tensor(TAGS), 2, 16, 37, DEVICE, **LAYOUTS[task])
    inputs = draw(transformer, layout)
    plain = transformer_forward(transformer, layout, **inputs)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        half = transformer_forward(transformer, layout, **inputs)
    worst = 0.0
    for index in range(3):
        for stream, want in enumerate(stock(transformer, layout, inputs, index)):
            assert relative_l2(plain[stream][index], want) <= FP32
            error = relative_l2(half[stream][index], want)
            # No error at all would mean that autocast was not in force.
            assert 1e-4 < error <= BF16
            worst = max(worst, error)
    record_property("relative_l2_bf16", worst)


def velocity_and_gradient(
    model: Any,
    layout: Layout,
    inputs: dict[str, torch.Tensor],
    amp: bool,
    block_fn: Callable[..., torch.Tensor],
) -> list[torch.Tensor]:
    """Both velocities, and the gradient of their squares at the first block's query projection."""
    weight = model.transformer_blocks[0].attn.to_q.weight
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=amp):
        found = transformer_forward(model, layout, **inputs, block_fn=block_fn)
    loss = sum((velocity.square().mean() for velocity in found), torch.zeros((), device=DEVICE))
    (gradient,) = torch.autograd.grad(loss, [weight])
    return [*found, gradient]


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
def test_a_compiled_block_equals_the_eager_one_forward_and_backward(
    transformer: Any, amp: bool, record_property: Any
) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("inductor")
    # fullgraph: a part that falls back to eager is an error here, not a silent agreement of eager with eager.
    compiled = torch.compile(block_forward, dynamic=True, fullgraph=True, backend=backend)
    layout = make_layout(torch.tensor(TAGS), 2, 16, 37, DEVICE)
    inputs = draw(transformer, layout)
    for parameter in transformer.parameters():
        parameter.requires_grad_(True)
    want = velocity_and_gradient(transformer, layout, inputs, amp, block_forward)
    got = velocity_and_gradient(transformer, layout, inputs, amp, compiled)
    record_property("graphs", backend.frame_count)
    assert backend.frame_count >= 1
    for name, one, two in zip(("video", "audio", "gradient"), got, want, strict=True):
        error = relative_l2(one, two)
        record_property(f"relative_l2_{name}", error)
        assert error <= (BF16 if amp else FP32)
