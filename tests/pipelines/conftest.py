"""The bundled model, loaded once; tiny Wan pipelines with a text encoder; stock calls to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from videoaccel.pipelines.family import Clip, Request, family_of
from videoaccel.pipelines.h3_blocks import stock_reference
from videoaccel.pipelines.loading import bundled_folder, load

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The bundled model with the components of every task."""
    return load("tiny-h3", device="cpu")


def picture(seed: int, width: int = 96, height: int = 80) -> Image.Image:
    """A noise image; any pixels do where two code paths are compared."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def stock_h3(pipe: Any, request: Request, **more: Any) -> Any:
    """The state of the stock `pipe(...)` call of an H3 request that names its canvas, frames and steps."""
    inputs: dict[str, Any] = {"image": request.first_frame, "last_image": request.last_frame}
    if request.references:
        inputs["references"] = [stock_reference(reference) for reference in request.references]
    return pipe(
        prompt=request.prompt,
        height=request.height,
        width=request.width,
        num_frames=request.num_frames,
        num_inference_steps=request.steps,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pil",
        **{name: value for name, value in inputs.items() if value is not None},
        **more,
    )


def assert_is_stock(clip: Clip, state: Any) -> None:
    """Every byte of the clip is the stock call's."""
    stock = np.stack([np.asarray(frame) for frame in state.get("videos")[0]])
    assert np.array_equal(clip.frames, stock)
    assert clip.audio is not None and np.array_equal(clip.audio, state.get("audio")[0].numpy())
    assert torch.equal(clip.latents["video"], state.get("latents"))
    assert torch.equal(clip.latents["audio"], state.get("audio_latents"))
    assert clip.sampling_rate == state.get("sampling_rate")


def assert_stack_is_what_runs(pipe: Any, component: str, request: Request) -> None:
    """The declared block stack against the calls of a real step."""
    family = family_of(pipe)
    stack = family.stack(pipe, component)
    calls: list[tuple[int, int, int]] = []

    def seen(block: Any, args: tuple[Any, ...], output: Any) -> None:
        assert tuple(inspect.signature(block.forward).parameters)[: len(args)] == stack.inputs
        assert isinstance(output, torch.Tensor) and len(stack.outputs) == 1
        assert output.shape == args[0].shape
        calls.append(tuple(output.shape))

    assert stack.blocks is stack.model.get_submodule(stack.path)
    attention = getattr(stack.blocks[0], stack.attention)
    assert attention.heads == stack.num_heads and attention.inner_dim == stack.num_heads * stack.head_dim
    returned: list[tuple[torch.Tensor, ...]] = []
    handles = [block.register_forward_hook(seen) for block in stack.blocks]
    handles.append(stack.model.register_forward_hook(lambda _, __, output: returned.append(output)))
    try:
        run = family.start(pipe, request)
        run.encode()
        run.denoise()
    finally:
        for handle in handles:
            handle.remove()
    passes = sum(len(step.branches) for step in run.steps if step.component == component)
    assert stack.velocity_streams == family.streams
    assert len(returned) == passes
    for outputs in returned:
        for output, stream in zip(outputs, stack.velocity_streams, strict=True):
            # As many values a row as the stream's latent has; condition rows have theirs too.
            rows = sum(segment.rows for segment in run.layout.segments if segment.modality == stream)
            assert output.numel() * run.layout.count(stream) == run.latents[stream].numel() * rows
    assert calls == [(1, run.layout.rows, stack.hidden_size)] * (passes * len(stack.blocks))


def _transformer(in_channels: int, image_dim: int | None = None) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        image_dim=image_dim,
        added_kv_proj_dim=None if image_dim is None else 24,
    ).eval()


def make_wan(
    *, image: bool = False, two_experts: bool = False, scheduler: Any = None, clip_encoder: bool = False
) -> Any:
    """A Wan pipeline of stock classes, random weights: 2.1 or 2.2 (two experts), text or image to video."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
    )
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        CLIPVisionModelWithProjection,
        Qwen2Tokenizer,
        UMT5Config,
        UMT5EncoderModel,
    )

    torch.manual_seed(0)
    channels = 36 if image else 16
    # Wan's own is UMT5's; any tokenizer that pads will do, and this one ships.
    tokenizer = Qwen2Tokenizer.from_pretrained(bundled_folder("tiny-h3") / "tokenizer")
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
    )
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": UMT5EncoderModel(config).eval(),
        "vae": AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval(),
        "scheduler": scheduler or FlowMatchEulerDiscreteScheduler(shift=5.0),
        "transformer": _transformer(channels, 32 if clip_encoder else None),
        "transformer_2": _transformer(channels) if two_experts else None,
        "boundary_ratio": 0.9 if two_experts else None,
    }
    if not image:
        return WanPipeline(**parts)
    if clip_encoder:
        vision = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=16,
            projection_dim=32,
        )
        parts["image_encoder"] = CLIPVisionModelWithProjection(vision).vision_model.eval()
        size = {"height": 32, "width": 32}
        parts["image_processor"] = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    return WanImageToVideoPipeline(**parts)


@pytest.fixture(scope="session")
def build_tiny_wan() -> Callable[..., Any]:
    """See `make_wan`."""
    return make_wan
