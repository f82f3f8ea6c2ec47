"""Latents of rendered clips, kept on the accelerator: what the transformer is trained on."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    audio_latent_num_frames,
    video_latent_num_frames,
)
from transformers import Qwen2Tokenizer

import evals.world
from evals.batched import PATCH
from evals.pixels import normalise
from evals.world.spec import ClipSpec, reference_still
from training.cartoon import cartoon
from training.common import draw, draw_specs, scenes, sounds
from training.skeleton import REFERENCE_EDGE
from training.video_vae import encode_moments
from videoaccel.files import replacing

WORLD = Path(evals.world.__file__).parent


@dataclass
class Latents:
    """N clips of one length. Rows are normalised, float16."""

    specs: list[ClipSpec]
    video: torch.Tensor  # (N, T * 64, 4 C)
    audio: torch.Tensor  # (N, 2 * A, audio C)
    reference: torch.Tensor  # (N, 16, 4 C): the still of the first object
    stills: torch.Tensor  # (N, 64, 64, 3) uint8
    ends: torch.Tensor  # (N, 2, 64, 4 C): first and last frame, each encoded alone
    end_images: torch.Tensor  # (N, 2, 128, 128, 3) uint8
    cartoons: torch.Tensor  # (N, T * 64, CHANNELS): where the objects are
    frames: int
    latent_frames: int
    audio_latents: int

    def __len__(self) -> int:
        return len(self.specs)


@dataclass
class Codec:
    """The two VAEs with their latent statistics; all on one device."""

    vae: AutoencoderKLMiniMaxH3
    audio_vae: AutoencoderKLMiniMaxH3Audio

    def _scale(
        self, vae: torch.nn.Module, device: torch.device, dims: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, -1) + (1,) * dims
        mean = torch.tensor(vae.config.latents_mean, device=device).view(shape)
        return mean, torch.tensor(vae.config.latents_std, device=device).view(shape)

    @torch.no_grad()
    def encode_video(self, frames: torch.Tensor) -> torch.Tensor:
        """uint8 `(B, T, H, W, 3)` to normalised rows `(B, T' * h * w, 4 C)`."""
        pixels = normalise(frames)
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=frames.is_cuda):
            moments = encode_moments(self.vae, pixels).float()
        mean, logvar = moments.chunk(2, dim=1)
        latents = mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * torch.randn_like(mean)
        offset, scale = self._scale(self.vae, frames.device, 3)
        rows = patchify_video_latents((latents - offset) / scale, PATCH)
        return rows.view(len(frames), -1, rows.shape[-1]).half()

    @torch.no_grad()
    def encode_audio(self, waves: torch.Tensor) -> torch.Tensor:
        """`(B, 2, N)` to normalised channel-major rows `(B, 2 * A, audio C)`."""
        latents = self.audio_vae.encode(waves.flatten(0, 1)[:, None]).latent_dist.mode()
        offset, scale = self._scale(self.audio_vae, waves.device, 1)
        rows = ((latents - offset) / scale).transpose(1, 2)
        return rows.reshape(len(waves), -1, rows.shape[-1]).half()


def build_latents(
    codec: Codec, start: int, count: int, frames: int, device: torch.device, batch: int = 192
) -> Latents:
    """Draw, render and encode training clips from consecutive seeds."""
    specs = draw_specs(start, count, frames)
    audio_latents = audio_latent_num_frames(frames)
    samples = audio_latents * codec.audio_vae.hop_length
    video, audio, ends, images, stills, references, cartoons = [], [], [], [], [], [], []
    clips, poses = scenes(specs, batch), scenes([reference_still(spec) for spec in specs], batch)
    for i, scene, pose in zip(range(0, count, batch), clips, poses, strict=True):
        part = specs[i : i + batch]
        clip = draw(scene, device)
        video.append(codec.encode_video(clip))
        cartoons.append(cartoon(clip))
        pair = clip[:, [0, -1]]
        images.append(pair)
        ends.append(codec.encode_video(pair.flatten(0, 1)[:, None]).unflatten(0, (len(part), 2)))
        still = draw(pose, device, REFERENCE_EDGE)
        stills.append(still[:, 0])
        references.append(codec.encode_video(still))
        audio.append(codec.encode_audio(sounds(part, device, samples)))
    return Latents(
        specs=specs,
        video=torch.cat(video),
        audio=torch.cat(audio),
        reference=torch.cat(references),
        stills=torch.cat(stills),
        ends=torch.cat(ends),
        end_images=torch.cat(images),
        cartoons=torch.cat(cartoons),
        frames=frames,
        latent_frames=video_latent_num_frames(frames, 17, 5),
        audio_latents=audio_latents,
    )


def digest(codec: Codec) -> str:
    """What latents depend on beside their seeds, in few letters: the codec and the world's source files."""
    found = hashlib.sha256()
    for vae in (codec.vae, codec.audio_vae):
        statistics = [list(vae.config[key]) for key in ("latents_mean", "latents_std")]
        found.update(json.dumps(statistics).encode())
        for name, value in sorted(vae.state_dict().items()):
            found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            found.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    for source in sorted(WORLD.glob("*.py")):
        found.update(source.name.encode() + source.read_bytes())
    return found.hexdigest()[:12]


def keep_latents(path: Path | None, build: Callable[[], Latents], device: torch.device) -> Latents:
    """What `build` gives, kept in a file for the next run of the same clips; `None` keeps nothing.

    The file is a pickle of this project's own making: do not load one from elsewhere.
    """
    if path is not None and path.exists():
        return torch.load(path, map_location=device, weights_only=False)
    latents = build()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            torch.save(latents, temporary)
    return latents


@dataclass
class Prompts:
    """Token ids of every clip, bucketed by length so that a batch needs no padding."""

    ids: list[torch.Tensor]  # per bucket (n, L)
    clips: list[torch.Tensor]  # per bucket (n,) clip index
    weights: torch.Tensor


def tokenise(tokenizer: Qwen2Tokenizer, texts: list[str], device: torch.device) -> Prompts:
    """Bucket prompts by token count."""
    buckets: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for index, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        buckets[len(ids)].append((index, ids))
    ordered = [buckets[length] for length in sorted(buckets)]
    return Prompts(
        ids=[torch.tensor([ids for _, ids in bucket], device=device) for bucket in ordered],
        clips=[torch.tensor([index for index, _ in bucket], device=device) for bucket in ordered],
        weights=torch.tensor([float(len(bucket)) for bucket in ordered]),
    )
