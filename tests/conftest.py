"""What every test shares: no network, repeatable properties, and tiny pipelines of the real classes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# Before anything imports a hub client: a test that would fetch something fails instead.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

# Before anything imports Triton, as diffusers does: without an accelerator, kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Examples from a fixed seed, no time limit: two runs of one commit agree, on a busy machine too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator (marked `gpu`, or under tests/gpu) where there is none."""
    needy = [item for item in items if item.get_closest_marker("gpu") or "gpu" in item.path.parent.parts]
    if not needy:
        return
    if not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def _wan(seed: int = 0) -> Any:
    """A Wan 2.1 text-to-video pipeline, stock classes, random weights; call it with `prompt_embeds`."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )

    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _h3(seed: int = 0) -> Any:
    """A MiniMax-H3 modular pipeline, stock classes, with its transformer and nothing else loaded."""
    from diffusers import MiniMaxH3ModularPipeline, MiniMaxH3Transformer3DModel

    torch.manual_seed(seed)
    transformer = MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=2,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=6,
        patch_size=(1, 2, 2),
        text_dim=8,
        freq_dim=8,
        time_embed_hidden_dim=24,
        time_embed_dim=16,
        rope_freq_dim=2,
    )
    pipe = MiniMaxH3ModularPipeline()
    pipe.update_components(transformer=transformer.eval())
    return pipe


@pytest.fixture
def build_wan() -> Callable[..., Any]:
    """Builds a fresh tiny Wan pipeline from a seed; the same seed gives the same weights."""
    return _wan


@pytest.fixture(params=["minimax_h3", "wan"])
def build_pipe(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Builds a fresh tiny pipeline of each supported family from a seed."""
    return {"minimax_h3": _h3, "wan": _wan}[request.param]
