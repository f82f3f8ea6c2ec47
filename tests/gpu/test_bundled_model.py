"""The bundled model on the device: the stock call to the bit, the CPU's noise, and no trace after removal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from videoaccel import AccelConfig, accelerate
from videoaccel.pipelines.family import Clip, Progress, Reference, Request, family_of

from .conftest import DEVICE, ON_CUDA, picture, relative_l2, stock_h3

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "prompt": "a red square bounces",
    "steps": 4,
    "num_frames": 22,
    "height": 64,
    "width": 96,
}
REQUESTS = {
    "t2va": Request(**SMALL, seed=3),
    "ref2va": Request(**SMALL, seed=7, references=(Reference(kind="image", image=picture(2)),)),
    "fl2va": Request(**SMALL, seed=6, first_frame=picture(0), last_frame=picture(1, 50, 90)),
}
LATENT_TOLERANCE = 1e-4
"""Relative L2 of final latents, CUDA against CPU, float32, over 3 forwards. TF32 alone rounds at 5e-4."""


def assert_same_clip(one: Clip, two: Clip) -> None:
    assert np.array_equal(one.frames, two.frames)
    assert one.audio is not None and two.audio is not None and np.array_equal(one.audio, two.audio)
    for name, latents in one.latents.items():
        assert torch.equal(latents, two.latents[name])


@pytest.mark.parametrize("task", REQUESTS)
def test_tier_exact_is_the_stock_call_bit_for_bit(pipe: Any, task: str) -> None:
    request = REQUESTS[task]
    with accelerate(pipe, AccelConfig(tier="exact")) as handle:
        clip = handle.family.generate(pipe, request)
    state = stock_h3(pipe, request)
    assert clip.plan.task == task
    assert np.array_equal(clip.frames, np.stack([np.asarray(frame) for frame in state.get("videos")[0]]))
    assert clip.audio is not None
    assert np.array_equal(clip.audio, state.get("audio")[0].float().cpu().numpy())
    for name, key in (("video", "latents"), ("audio", "audio_latents")):
        assert state.get(key).device.type == DEVICE.type
        assert torch.equal(clip.latents[name], state.get(key).cpu())
        # A model that has learnt nothing yet answers zero, and then any two forwards agree.
        assert relative_l2(clip.latents[name], clip.initial_noise[name]) > 0.1


@pytest.mark.parametrize("task", REQUESTS)
def test_same_seed_is_the_same_noise_bytes_as_on_the_cpu(pipe: Any, cpu_pipe: Any, task: str) -> None:
    noises = []
    for built in (pipe, cpu_pipe):
        run = family_of(built).start(built, REQUESTS[task])
        run.encode()
        noises.append(run.initial_noise)
    here, cpu = noises
    assert here.keys() == cpu.keys() == {"video", "audio"}
    for name, noise in cpu.items():
        assert here[name].dtype is noise.dtype is torch.float32
        assert here[name].numpy().tobytes() == noise.numpy().tobytes()


@pytest.mark.parametrize("task", REQUESTS)
def test_latents_in_float32_agree_with_the_cpu(
    device_pipes: dict[torch.dtype, Any], cpu_pipe: Any, task: str, record_property: Any
) -> None:
    pipe = device_pipes[torch.float32]
    clips = [family_of(built).generate(built, REQUESTS[task]) for built in (pipe, cpu_pipe)]
    for name in ("video", "audio"):
        error = relative_l2(clips[0].latents[name], clips[1].latents[name])
        record_property(f"relative_l2_{name}", error)
        assert error <= LATENT_TOLERANCE


def test_peak_memory_is_that_of_a_request_that_ran_alone(pipe: Any) -> None:
    request = REQUESTS["t2va"]
    inner: list[Any] = []

    def beside(progress: Progress) -> None:
        if progress.stage == "denoise" and progress.done == 1:
            inner.append(handle.run(request)[1])

    with accelerate(pipe) as handle:
        alone = [handle.run(request)[1].memory for _ in range(2)]
        outer = handle.run(request, on_progress=beside)[1]
        alone.append(handle.run(request)[1].memory)
    for receipt in (outer, *inner):
        assert receipt.memory.peak_allocated is None and receipt.memory.peak_reserved is None
    for memory in alone:
        assert (memory.peak_allocated is not None) == ON_CUDA
        # The weights lie on the device all the while.
        assert not ON_CUDA or memory.peak_allocated > sum(x.nbytes for x in pipe.transformer.parameters())


def tensors(pipe: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of every network on `pipe`, by name."""
    return {
        f"{part}.{name}": tensor
        for part, module in sorted(vars(pipe).items())
        if isinstance(module, torch.nn.Module)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def test_accelerate_and_remove_leave_parameters_and_outputs_bit_identical(pipe: Any) -> None:
    request = REQUESTS["t2va"]
    kept = {name: tensor.detach().clone() for name, tensor in tensors(pipe).items()}
    assert sum(tensor.numel() for tensor in kept.values()) > 1_000_000
    attributes = set(vars(pipe))
    never = family_of(pipe).generate(pipe, request)
    handle = accelerate(pipe, AccelConfig(tier="exact"))
    installed = handle.family.generate(pipe, request)
    handle.remove()
    after = family_of(pipe).generate(pipe, request)
    assert_same_clip(never, installed)
    assert_same_clip(never, after)
    assert set(vars(pipe)) == attributes
    now = tensors(pipe)
    assert now.keys() == kept.keys()
    for name, tensor in kept.items():
        assert now[name].dtype is tensor.dtype and now[name].device == tensor.device
        assert torch.equal(now[name], tensor), name
