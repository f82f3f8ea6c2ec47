"""The batched forwards that training and sampling use, made of the stock modules' own weights.

The stock MiniMax-H3 forward shares one set of timesteps over a batch and encodes one request at a time. Here
each sample has its own timesteps, and a batch shares one layout (same task, canvas, frames and text length).
tests/evals/test_batched.py holds both against the stock forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
)
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference
from transformers import Qwen3VLForConditionalGeneration

PATCH = (1, 2, 2)
AUDIO_TAG, TEXT_TAG, VIDEO_TAG = 2, 1, 0
TAGS = 3
# The three noise levels of a sequence: generated video (and text), generated audio, conditions.
VIDEO_TIME, AUDIO_TIME, CONDITION_TIME = 0, 1, 2


@dataclass
class Layout:
    """The packed sequence of a batch, on a device. S rows, of which Nv video, Na audio and Nt text."""

    position_ids: torch.Tensor  # (S, 3)
    video: torch.Tensor  # (Nv,) conditions first
    audio: torch.Tensor  # (Na,)
    text: torch.Tensor  # (Nt,)
    conditions: int  # leading video rows that are conditions
    tags: torch.Tensor  # (S,) modality of each row
    runs: tuple[tuple[int, int], ...]  # (time and tag, rows) of each stretch of like rows, in order
    times: torch.Tensor  # (S, 3) one-hot over times

    @property
    def rows(self) -> int:
        return len(self.position_ids)


def presentation(tokenizer: Any, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """What H3 puts in front of a prompt: a label and a vision block for each picture.

    Args:
        tokenizer: the text encoder's.
        tokens: vision tokens of each picture, in order.

    Returns:
        Token ids, and the modality tag of each.
    """
    start, pad, end = (
        tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end")
    )
    ids: list[int] = []
    tags: list[int] = []
    for number, count in enumerate(tokens, 1):
        label = tokenizer(f"<Picture {number}>: ", add_special_tokens=False)["input_ids"]
        block = [start] + [pad] * count + [end]
        ids += label + block
        tags += [TEXT_TAG] * len(label) + [VIDEO_TAG] * len(block)
    return ids, tags


def make_layout(
    text_tags: torch.Tensor,
    frames: int,
    edge: int,
    audio_latents: int,
    device: torch.device,
    anchors: tuple[str, ...] = (),
    reference_edge: int | None = None,
) -> Layout:
    """Lay a request out with the stock builders.

    Args:
        text_tags: `(Nt,)` modality tag of each text row.
        frames: latent frames. edge: latent height and width. audio_latents: per channel.
        anchors: keyframes of `fl2va`. reference_edge: latent edge of the one image reference of `ref2va`.
    """
    if reference_edge is not None:
        reference = MiniMaxH3ImageReference(image=None)
        still = torch.zeros(1, 1, 1, reference_edge, reference_edge)
        built = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            text_tags,
            [reference],
            [still],
            [],
            frames,
            edge,
            edge,
            audio_latents,
            PATCH,
            2,
            AUDIO_TAG,
            VIDEO_TAG,
        )
    else:
        built = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            text_tags, frames, edge, edge, audio_latents, PATCH, 2, AUDIO_TAG, VIDEO_TAG, anchors
        )
    position_ids, tags, video, audio, text, conditions, _ = built
    time = torch.full((len(tags),), VIDEO_TIME)
    time[audio] = AUDIO_TIME
    time[video[:conditions]] = CONDITION_TIME
    return Layout(
        position_ids=position_ids.float().to(device),
        video=video.to(device),
        audio=audio.to(device),
        text=text.to(device),
        conditions=conditions,
        tags=tags.to(device),
        runs=tuple((kind, len(list(rows))) for kind, rows in groupby((time * TAGS + tags).tolist())),
        times=F.one_hot(time, 3).float().to(device),
    )


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def _attention(
    attn: torch.nn.Module, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> torch.Tensor:
    shape = (*x.shape[:2], attn.heads, attn.head_dim)
    q, k, v = attn.to_q(x).view(shape), attn.to_k(x).view(shape), attn.to_v(x).view(shape)
    q, k = _norm(q, attn.norm_q.weight, attn.norm_q.eps), _norm(k, attn.norm_k.weight, attn.norm_k.eps)
    if cos is not None and sin is not None:
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return attn.to_out[0](out.transpose(1, 2).flatten(2))


def _swiglu(ff: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    value, gate = ff.net[0].proj(x).chunk(2, dim=-1)
    return ff.net[2](value * F.silu(gate))


def block_forward(
    block: torch.nn.Module,
    x: torch.Tensor,
    temb: torch.Tensor,
    runs: Sequence[tuple[int, int]],
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """One transformer block over `(B, S, D)` with per-sample modulation `(B, 3, time_embed_dim)`."""
    table = block.adaln_proj.linear(F.silu(temb)).view(len(x), 3 * TAGS, -1)
    # Expanded, not multiplied out, and part by part: compiled, no row's modulation is ever written to memory,
    # nor its gradient.
    shift1, scale1, gate1, shift2, scale2, gate2 = (
        torch.cat([part[:, kind : kind + 1].expand(-1, count, -1) for kind, count in runs], dim=1)
        for part in table.chunk(6, dim=-1)
    )
    y = _norm(x, block.norm1.weight, block.norm1.eps) * (1 + scale1) + shift1
    x = x + gate1 * _attention(block.attn, y, cos, sin)
    y = _norm(x, block.norm2.weight, block.norm2.eps) * (1 + scale2) + shift2
    return x + gate2 * _swiglu(block.ff, y)


@dataclass
class StackContext:
    """What every block of a forward reads beside the hidden states."""

    temb: torch.Tensor  # (B, 3, time_embed_dim) float32, by noise level
    cos: torch.Tensor  # (1, S, 1, rotated channels) in the hidden states' dtype
    sin: torch.Tensor


def enter_blocks(
    model: MiniMaxH3Transformer3DModel,
    layout: Layout,
    video: torch.Tensor,
    audio: torch.Tensor,
    text: torch.Tensor,
    times: torch.Tensor,
) -> tuple[torch.Tensor, StackContext]:
    """What the first block is passed, `(B, S, D)`; the arguments are `transformer_forward`'s."""
    cos, sin = model.rope(layout.position_ids)
    cos, sin = cos[None, :, None], sin[None, :, None]
    words = model.context_embedder(text)
    for block in model.token_refiner.refiner_blocks:
        words = words + _attention(block.attn, _norm(words, block.norm1.weight, block.norm1.eps), None, None)
        words = words + _swiglu(block.ff, _norm(words, block.norm2.weight, block.norm2.eps))
    final = model.token_refiner.final_norm
    words = _norm(words, final.weight, final.eps)
    x = words.new_zeros(len(video), layout.rows, words.shape[-1])
    x = x.index_copy(1, layout.text, words)
    x = x.index_copy(1, layout.video, model.proj_in(video).to(x.dtype))
    x = x.index_copy(1, layout.audio, model.audio_proj_in(audio).to(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        temb = model.time_embedder(model.time_proj(times.flatten())).unflatten(0, times.shape)
    return x, StackContext(temb, cos.to(x.dtype), sin.to(x.dtype))


def run_blocks(
    model: MiniMaxH3Transformer3DModel,
    layout: Layout,
    x: torch.Tensor,
    context: StackContext,
    start: int,
    stop: int,
    block_fn=block_forward,
    states: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Blocks `[start, stop)` over hidden states `(B, S, D)`; `states` as in `transformer_forward`."""
    for block in model.transformer_blocks[start:stop]:
        x = block_fn(block, x, context.temb, layout.runs, context.cos, context.sin)
        if states is not None:
            states.append(x)
    return x


def leave_blocks(
    model: MiniMaxH3Transformer3DModel, layout: Layout, x: torch.Tensor, context: StackContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Velocities from the last block's hidden states, as `transformer_forward` returns them."""
    out = model.norm_out
    table = out.linear(F.silu(context.temb)).to(x.dtype)
    shift, scale = torch.matmul(layout.times.to(x.dtype), table).chunk(2, dim=-1)
    x = _norm(x, out.norm.weight, out.norm.eps) * (1 + scale) + shift
    generated = layout.video[layout.conditions :]
    return model.proj_out(x[:, generated]).float(), model.audio_proj_out(x[:, layout.audio]).float()


def transformer_forward(
    model: MiniMaxH3Transformer3DModel,
    layout: Layout,
    video: torch.Tensor,
    audio: torch.Tensor,
    text: torch.Tensor,
    times: torch.Tensor,
    block_fn=block_forward,
    states: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Velocities of a batch.

    Args:
        video: `(B, Nv, 64)` rows, conditions first. audio: `(B, Na, 16)`. text: `(B, Nt, text_dim)`.
        times: `(B, 3)` clean-ward times in [0, 1] of generated video, generated audio and conditions.
        states: if given, the hidden states `(B, S, D)` after each block are appended.

    Returns:
        Video `(B, Nv - conditions, 64)` and audio `(B, Na, 16)` velocities, data-ward, float32.
    """
    x, context = enter_blocks(model, layout, video, audio, text, times)
    x = run_blocks(model, layout, x, context, 0, len(model.transformer_blocks), block_fn, states)
    return leave_blocks(model, layout, x, context)


def patches_of(images: torch.Tensor, patch: int = 16, merge: int = 2) -> torch.Tensor:
    """Qwen-VL patches of uint8 images.

    Args:
        images: `(B, H, W, 3)`, edges multiples of `patch * merge`.

    Returns:
        `(B, n, 3 * 2 * patch * patch)` float32, merge blocks contiguous, the frame repeated in time.
    """
    x = (images.float() / 255.0 - 0.5) / 0.5
    batch, height, width, _ = x.shape
    rows, columns = height // patch // merge, width // patch // merge
    x = x.view(batch, rows, merge, patch, columns, merge, patch, 3)
    x = x.permute(0, 1, 4, 2, 5, 7, 3, 6)  # B, rows, columns, merge, merge, C, patch, patch
    x = x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return x.reshape(batch, rows * columns * merge * merge, -1)


def vision_features(encoder: Qwen3VLForConditionalGeneration, images: torch.Tensor) -> torch.Tensor:
    """`(B, n / 4, text_dim)` vision tokens of `(B, H, W, 3)` uint8 images of one size, batched.

    The stock tower runs its attention image by image; here images are a batch axis.
    """
    from transformers.models.qwen3_vl import modeling_qwen3_vl as stock

    tower = encoder.model.visual
    patches = patches_of(images, tower.patch_size, tower.spatial_merge_size)
    batch, count, _ = patches.shape
    grid = torch.tensor(
        [[1, images.shape[1] // tower.patch_size, images.shape[2] // tower.patch_size]], device=images.device
    )
    positions, angles = _tower_positions(tower, grid, stock)
    x = tower.patch_embed(patches.flatten(0, 1)).view(batch, count, -1)
    x = x + positions.to(x.dtype)
    cos, sin = (part.to(x.device) for part in angles)
    for block in tower.blocks:
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).view(batch, count, 3, attn.num_heads, -1).unbind(2)
        q, k = stock.apply_rotary_pos_emb_vision(q, k, cos, sin)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).to(q.dtype)
        )
        x = x + attn.proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return tower.merger(x.flatten(0, 1)).view(batch, count // tower.spatial_merge_size**2, -1)


def _tower_positions(tower, grid, stock):
    """Position embeddings of one grid, whichever way this transformers version computes them."""
    if hasattr(tower, "fast_pos_embed_interpolate"):
        embedded = tower.fast_pos_embed_interpolate(grid)
        angles = tower.rot_pos_emb(grid).reshape(len(embedded), -1)
        angles = torch.cat((angles, angles), dim=-1)
        return embedded, (angles.cos(), angles.sin())
    indices, weights = stock.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.config.spatial_merge_size,
        kwargs={},
    )
    embedded = (tower.pos_embed(indices) * weights[:, :, None]).sum(1)
    places = stock.get_vision_position_ids(grid, tower.spatial_merge_size, kwargs={})
    return embedded, tower.rotary_pos_emb(embedded, places)


def text_forward(
    encoder: Qwen3VLForConditionalGeneration,
    token_ids: torch.Tensor,
    layer: int,
    images: torch.Tensor | None = None,
    image_grid: tuple[int, int] | None = None,
) -> torch.Tensor:
    """`(B, L, text_dim)` hidden states that condition the transformer.

    Args:
        token_ids: `(B, L)`; image pads, if any, stand at the same places in every sample.
        images: `(B, k, H, W, 3)` uint8, k images a sample. image_grid: patches (rows, columns) of each.
    """
    model = encoder.model
    x = model.language_model.embed_tokens(token_ids)
    pad = token_ids[0] == encoder.config.image_token_id
    grid = None
    if images is not None and image_grid is not None:
        count = images.shape[1]
        features = vision_features(encoder, images.flatten(0, 1)).view(len(x), -1, x.shape[-1])
        x = x.index_copy(1, torch.nonzero(pad).flatten(), features.to(x.dtype))
        grid = torch.tensor([[1, *image_grid]] * count, device=x.device)
    kinds = pad.long()[None]
    positions, _ = model.get_rope_index(token_ids[:1], mm_token_type_ids=kinds, image_grid_thw=grid)
    states = model.language_model(
        inputs_embeds=x,
        position_ids=positions.expand(-1, len(x), -1),
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    return states[layer]
