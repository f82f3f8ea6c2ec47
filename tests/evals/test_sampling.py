"""The batched sampler against the stock pipeline: same seed, same clip."""

import pytest
import torch

from evals.sampling import Sampler
from evals.world.render import build_scene, render
from evals.world.spec import draw_clip, reference_still
from videoaccel.pipelines.loading import load

FORWARDS = 2


@pytest.mark.parametrize("task", ["t2va", "ref2va", "fl2va"])
def test_batched_clips_equal_the_stock_pipeline(task):
    """Prompts of different length, and two of one length in a batch: each as if alone, to rounding."""
    from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference
    from PIL import Image

    pipe = load("tiny-h3", device="cpu", dtype=torch.float32)
    wanted = ((3, 1), (4, 2), (5, 1)) if task == "t2va" else ((3, 1), (4, 1))
    specs = [draw_clip(seed, frames=22, objects=count) for seed, count in wanted]
    anchors = ("first", "last") if task == "fl2va" else ()
    got = Sampler(pipe, torch.device("cpu")).sample(
        specs, forwards=FORWARDS, task=task, anchors=anchors, batch=2
    )
    for spec, clip in zip(specs[1:], got[1:], strict=True):
        inputs = {}
        if task == "ref2va":
            still = render(build_scene([reference_still(spec)], pipe.config.reference_image_short_edge))[0, 0]
            inputs["references"] = [MiniMaxH3ImageReference(image=Image.fromarray(still.numpy()))]
        elif task == "fl2va":
            frames = render(build_scene([spec]))[0].numpy()
            inputs = {"image": Image.fromarray(frames[0]), "last_image": Image.fromarray(frames[-1])}
        state = pipe(
            prompt=spec.reference_prompt() if task == "ref2va" else spec.caption(),
            height=128,
            width=128,
            num_frames=22,
            num_inference_steps=FORWARDS + 1,
            generator=torch.Generator().manual_seed(spec.seed),
            output_type="np",
            **inputs,
        )
        for mine, stock in (
            (clip.latents, state.get("latents")[0]),
            (clip.audio_latents, state.get("audio_latents")),
        ):
            assert torch.linalg.norm(mine - stock) <= 2e-5 * torch.linalg.norm(stock)
