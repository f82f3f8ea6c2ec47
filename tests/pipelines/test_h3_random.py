"""The random H3, at a tiny size: real classes, finite activations, the precision the checkpoint keeps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from videoaccel.pipelines.facts import read_facts
from videoaccel.pipelines.family import Request, family_of
from videoaccel.pipelines.h3_random import build_random_h3, random_prompt_embeds
from videoaccel.pipelines.loading import bundled_folder

SMALL: dict[str, Any] = {"prompt": "a", "steps": 3, "num_frames": 22, "height": 32, "width": 64}


def config(part: str) -> dict[str, Any]:
    raw = json.loads((bundled_folder("tiny-h3") / part / "config.json").read_text())
    return {key: value for key, value in raw.items() if not key.startswith("_")}


def build(**more: Any) -> Any:
    return build_random_h3(
        device="cpu",
        **{
            "dtype": torch.float32,
            "config": config("transformer"),
            "vae_config": config("vae"),
            "audio_vae_config": config("audio_vae"),
            "facts": read_facts(bundled_folder("tiny-h3") / "videoaccel.json"),
            **more,
        },
    )


def test_runs_end_to_end_on_given_embeds_and_stays_finite() -> None:
    pipe = build()
    clip = family_of(pipe).generate(pipe, Request(**SMALL), prompt_embeds=random_prompt_embeds(pipe, 7))
    assert clip.frames.shape == (22, 32, 64, 3) and clip.layout.count("text") == 7
    assert clip.audio is not None and np.isfinite(clip.audio).all()
    for name, latents in clip.latents.items():
        assert latents.isfinite().all() and not torch.equal(latents, clip.initial_noise[name])


def test_activations_keep_their_size_at_depth() -> None:
    pipe = build(config={**config("transformer"), "num_layers": 40})
    sizes: list[float] = []
    for block in pipe.transformer.transformer_blocks:
        block.register_forward_hook(lambda _, __, output: sizes.append(float(output.std())))
    run = family_of(pipe).start(
        pipe, Request(**SMALL), prompt_embeds=random_prompt_embeds(pipe, 7), decode=False
    )
    run.encode()
    run.denoise()
    assert max(sizes) < 10 * min(sizes)


def test_keeps_in_float32_what_the_checkpoint_keeps() -> None:
    transformer = build(dtype=torch.bfloat16, vaes=False).transformer
    kept = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
    for name, parameter in transformer.named_parameters():
        expected = torch.float32 if name.startswith(kept) else torch.bfloat16
        assert parameter.dtype is expected, name
    from diffusers import MiniMaxH3Transformer3DModel

    fresh = MiniMaxH3Transformer3DModel(**config("transformer"))
    assert torch.equal(transformer.rope.inv_freq, fresh.rope.inv_freq)
    assert transformer.state_dict().keys() == fresh.state_dict().keys()


def test_folded_leaves_only_the_adaln_projections_unbuilt() -> None:
    transformer = build(folded=True, vaes=False).transformer
    meta = {name for name, parameter in transformer.named_parameters() if parameter.is_meta}
    assert meta == {name for name, _ in transformer.named_parameters() if ".adaln_proj." in name}
    assert len(meta) == 2 * len(transformer.transformer_blocks)


def test_same_seed_same_weights() -> None:
    before = torch.get_rng_state()
    one, two, other = (build(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for part in ("transformer", "vae", "audio_vae"):
        a, b, c = (getattr(pipe, part).state_dict() for pipe in (one, two, other))
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert any(not torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize("part", ["transformer", "vae", "audio_vae"])
def test_the_released_sizes_come_from_the_default_configs(part: str) -> None:
    import diffusers

    classes = {
        "transformer": "MiniMaxH3Transformer3DModel",
        "vae": "AutoencoderKLMiniMaxH3",
        "audio_vae": "AutoencoderKLMiniMaxH3Audio",
    }
    with torch.device("meta"):
        model = getattr(diffusers, classes[part])()
    billions = {"transformer": 33.12, "vae": 2.60, "audio_vae": 0.151}[part]
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.004)
