"""The full-size MiniMax-H3 with random weights: built on the device, one forward, and given back."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch

from evals.h3_dense import TINY
from videoaccel.pipelines.facts import ModelFacts
from videoaccel.pipelines.family import Request, family_of
from videoaccel.pipelines.h3_random import build_random_h3, random_prompt_embeds

from .conftest import DEVICE, ON_CUDA

pytestmark = pytest.mark.gpu

NEEDED = 70e9
"""Bytes: 33.1 B parameters in bf16, and the activations of a short clip."""
LEFTOVER = 0.2e9
"""Bytes that may stay allocated: workspaces that the matrix libraries take on first use and keep."""
CANVAS = (256, 256) if ON_CUDA else (64, 64)


def allocated() -> int:
    """Bytes that tensors hold on the device; 0 on a CPU, which does not count them."""
    gc.collect()
    if not ON_CUDA:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def build_and_step() -> dict[str, Any]:
    """Builds the model and runs one forward; returns figures and a weak reference: no memory held."""
    clock = time.perf_counter()
    pipe = build_random_h3(
        device=DEVICE, vaes=False, config=None if ON_CUDA else TINY, facts=ModelFacts(min_seconds=0.9)
    )
    if ON_CUDA:
        torch.cuda.synchronize()
    built = time.perf_counter() - clock
    request = Request(prompt="none", num_frames=22, height=CANVAS[0], width=CANVAS[1], steps=2, seed=1)
    embeds = random_prompt_embeds(pipe, 32)
    run = family_of(pipe).start(pipe, request, prompt_embeds=embeds, decode=False)
    run.encode()
    run.denoise()
    return {
        "build_s": built,
        "forward_s": run.timings.step_s[0],
        "forwards": len(run.timings.step_s),
        "parameters": sum(p.numel() for p in pipe.transformer.parameters()),
        "devices": {p.device.type for p in pipe.transformer.parameters()},
        "finite": all(bool(x.isfinite().all()) for x in run.latents.values()),
        "moved": all(not torch.equal(x.cpu(), run.initial_noise[name]) for name, x in run.latents.items()),
        "held": allocated(),
        "model": weakref.ref(pipe.transformer),
    }


def test_builds_on_the_device_steps_once_and_releases_its_memory(record_property: Any) -> None:
    if ON_CUDA:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < NEEDED:
            pytest.skip(f"needs {NEEDED / 1e9:.0f} GB of free device memory, {free / 1e9:.0f} GB are")
    before = allocated()
    seen = build_and_step()
    after = allocated()
    for name in ("build_s", "forward_s", "parameters"):
        record_property(name, seen[name])
    record_property("held_gb", seen["held"] / 1e9)
    record_property("left_gb", (after - before) / 1e9)
    assert seen["devices"] == {DEVICE.type}
    assert seen["forwards"] == 1 and seen["finite"] and seen["moved"]
    assert seen["model"]() is None
    if ON_CUDA:
        assert seen["parameters"] == pytest.approx(33.12e9, abs=0.1e9)
        assert seen["held"] - before > 2 * 33e9
        assert after - before <= LEFTOVER
        torch.cuda.empty_cache()
