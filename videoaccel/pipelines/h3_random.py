"""The full-size MiniMax-H3 with random weights, built on the device in seconds: for timing only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.facts import ModelFacts
from videoaccel.pipelines.family import FullSize


def build_random_h3(
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    folded: bool = False,
    config: Mapping[str, Any] | None = None,
    vaes: bool = True,
    vae_config: Mapping[str, Any] | None = None,
    audio_vae_config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    seed: int = 0,
) -> Any:
    """An `H3Pipeline` whose transformer (33.1 B parameters by default) and VAEs carry random weights.

    Not built: text encoder, tokenizer and processor (the released encoder alone is 62 GB in bf16). Pass
    `random_prompt_embeds` to `Family.start` in their place, and report the encode stage as not run.

    Args:
        device: where the weights are made; they never pass through host memory.
        dtype: precision of the block stack. The modules the checkpoint keeps in float32 stay so.
        folded: leave the AdaLN projections (13.0 B parameters) on the meta device. The caller must put tables
            in their place before the first forward.
        config: arguments of `MiniMaxH3Transformer3DModel`; None is the released size.
        vaes: also build the video VAE (2.6 B) and the audio VAE (0.15 B).
        vae_config, audio_vae_config: their arguments; None is the released size.
        facts: what the checkpoint's `videoaccel.json` would say.
        seed: of the weights.

    Raises:
        UserError: the weights do not fit the device.
    """
    from diffusers import (
        AutoencoderKLMiniMaxH3,
        AutoencoderKLMiniMaxH3Audio,
        MiniMaxH3Scheduler,
        MiniMaxH3Transformer3DModel,
    )
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks

    from videoaccel.pipelines.h3_pipeline import H3Pipeline
    from videoaccel.pipelines.loading import check_device, default_dtype

    place = check_device(device)
    kind = dtype or default_dtype(place)
    pipe = H3Pipeline(MiniMaxH3Blocks(), facts=facts)
    try:
        transformer = random_transformer(
            MiniMaxH3Transformer3DModel, dict(config or {}), place, kind, folded=folded, seed=seed
        )
        pipe.register_components(transformer=transformer, transformer_ref=transformer)
        if vaes:
            # Their classes initialise from torch's own generators; the caller's draws go on undisturbed.
            with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
                torch.manual_seed(seed)
                vae = _on_device(AutoencoderKLMiniMaxH3, dict(vae_config or {}), place, kind)
                audio = _on_device(AutoencoderKLMiniMaxH3Audio, dict(audio_vae_config or {}), place, kind)
            pipe.register_components(vae=vae, audio_vae=audio)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the random H3 does not fit {place}: {str(error)[:200]}; use a larger device"
        ) from error
    # The shifts of the released checkpoint.
    pipe.register_components(
        scheduler=MiniMaxH3Scheduler(shift=12.0), audio_scheduler=MiniMaxH3Scheduler(shift=3.0)
    )
    return pipe


def random_transformer(
    model_class: Any,
    config: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    *,
    folded: bool = False,
    seed: int = 0,
) -> torch.nn.Module:
    """A transformer of `model_class(**config)` with random weights, made on `device`.

    Weights are normal with deviation 1/sqrt(fan_in), and 1/sqrt(2 * blocks) of that where a block writes to
    the residual stream, so activations keep their size through any depth; biases are 0, norm gains 1.
    """
    from accelerate import init_empty_weights

    # Parameters on the meta device, buffers (rotary frequencies) real: they are computed, not loaded.
    with init_empty_weights(include_buffers=False):
        model: torch.nn.Module = model_class(**config)
    depth = len(model.transformer_blocks)  # type: ignore[arg-type]
    keep: list[str] = list(getattr(model, "_keep_in_fp32_modules", None) or [])
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        if folded and ".adaln_proj." in name:
            continue
        kind = torch.float32 if any(part in name for part in keep) else dtype
        data = torch.empty(parameter.shape, dtype=kind, device=device)
        if parameter.ndim < 2:
            data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            deviation = 1 / math.sqrt(parameter.shape[1:].numel())
            if ".to_out." in name or ".ff.net.2." in name:
                deviation /= math.sqrt(2 * depth)
            data.normal_(0.0, deviation, generator=generator)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(data, requires_grad=False))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(
                name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set
            )
    return model.eval()


def random_prompt_embeds(pipe: Any, rows: int, seed: int = 0) -> torch.Tensor:
    """Stand-in text conditioning `(1, rows, D)`, for a pipeline with no text encoder."""
    model = pipe.transformer
    generator = torch.Generator("cpu").manual_seed(seed)
    embeds = torch.randn(1, rows, model.config.text_dim, generator=generator)
    return embeds.to(device=pipe._execution_device, dtype=model.dtype)


def _on_device(
    model_class: Any, config: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    """A small model with its class's own initialisation, run on the device."""
    with torch.device(device):
        model: torch.nn.Module = model_class(**config)
    # Only from_pretrained spares the modules that the checkpoint keeps in float32, so they are named here.
    keep: list[str] = list(getattr(model, "_keep_in_fp32_modules", None) or [])
    for name, parameter in model.named_parameters():
        kept = any(part in name.split(".") for part in keep)
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
    return model.to(device).eval()


HEIGHT, WIDTH = 768, 1344


def full_size_gb(seconds: float, pixels: float) -> float:
    """Decimal GB that the full-size H3 and its VAEs need in bf16: a line in seconds times pixels.

    72.9 and 85.0 GB were measured on one H200 at 1344x768 for 5 and 15 s, transformer and activations; VAEs
    add 5.5, and 2 are spare.
    """
    return 72.9 + (85.0 - 72.9) * (seconds * pixels / (HEIGHT * WIDTH) - 5) / 10 + 5.5 + 2.0


FULL_SIZE = FullSize(
    title="MiniMax-H3 (full size)",
    height=HEIGHT,
    width=WIDTH,
    seconds=5.0,
    gigabytes=full_size_gb,
    build=build_random_h3,
    prompt_embeds=random_prompt_embeds,
)
"""See `Family.full_size`."""
