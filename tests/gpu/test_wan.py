"""The Wan family on the device against the stock pipelines, tiny random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from videoaccel import AccelConfig, accelerate
from videoaccel.pipelines.family import Request

from .conftest import DEVICE, make_wan, picture

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {"steps": 4, "num_frames": 9, "height": 32, "width": 48, "seed": 3}
# Image to video gets embeddings, without guidance: its stock prompt clean-up needs one more package.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2.1 t2v": ({}, {"guidance": 5.0}),
    "2.2 t2v": ({"two_experts": True}, {"guidance": 4.0, "guidance_low_noise": 3.0}),
    "2.1 i2v": ({"image": True}, {"guidance": 1.0, "first_frame": picture(0)}),
}


@pytest.mark.parametrize("case", CASES)
def test_tier_exact_is_the_stock_call_bit_for_bit(case: str) -> None:
    built, asked = CASES[case]
    pipe = make_wan(**built).to(DEVICE)
    request = Request(prompt="a red square", **BASE, **asked)
    stock: dict[str, Any] = {"prompt": request.prompt}
    embeds = None
    if request.first_frame is not None:
        embeds = torch.randn(1, 512, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        stock = {"prompt_embeds": embeds, "image": request.first_frame}
    if request.guidance_low_noise is not None:
        stock["guidance_scale_2"] = request.guidance_low_noise
    with accelerate(pipe, AccelConfig(tier="exact")) as handle:
        clip = handle.family.generate(pipe, request, prompt_embeds=embeds)
    outputs = {
        kind: pipe(
            **stock,
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type=kind,
        ).frames
        for kind in ("pil", "latent")
    }
    assert outputs["latent"].device.type == DEVICE.type
    assert torch.equal(clip.latents["video"], outputs["latent"].cpu())
    assert np.array_equal(clip.frames, np.stack([np.asarray(frame) for frame in outputs["pil"][0]]))
    assert not torch.equal(clip.latents["video"], clip.initial_noise["video"])
