"""Samples many clips of the bundled model at once, for evaluations over hundreds of prompts.

The stock pipeline packs one request into one sequence and takes one prompt a call. Here clips of equal layout
share a batch; the arithmetic is the stock scheduler's and the noise is the one that the stock pipeline draws
for the same seed, so a clip equals the pipeline's own up to the rounding of batched kernels
(tests/evals/test_sampling.py).
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    audio_latent_num_frames,
    video_latent_num_frames,
)
from diffusers.utils.torch_utils import randn_tensor

from evals.batched import (
    PATCH,
    TEXT_TAG,
    VIDEO_TAG,
    Layout,
    make_layout,
    presentation,
    text_forward,
    transformer_forward,
)
from evals.pixels import PIXEL_MEAN, PIXEL_STD, denormalise
from evals.world.render import build_scene, render
from evals.world.spec import ClipSpec, reference_still

CONDITION_TIME = 0.999


@dataclass(frozen=True)
class Sampled:
    """One finished clip: `latents` `(C, T, h, w)` and `audio_latents` `(2, C, A)`, float32 on the CPU."""

    spec: ClipSpec
    latents: torch.Tensor
    audio_latents: torch.Tensor


@dataclass
class Prepared:
    """One clip's prompt as tokens, and the pictures that condition it."""

    spec: ClipSpec
    ids: list[int]
    tags: list[int]
    images: list[np.ndarray]  # the vision tower's pictures, (H, W, 3) uint8


@dataclass
class Packed:
    """A batch of clips of one layout before its first step, on the device."""

    clips: list[Prepared]
    layout: Layout
    frames: int  # latent frames
    edge: int  # latent height and width
    audio: int  # audio latents a channel
    kept: torch.Tensor  # (B, Nc, 96) condition rows
    video: torch.Tensor  # (B, Nv, 96) generated rows: noise
    sound: torch.Tensor  # (B, Na, 32) likewise
    text: torch.Tensor  # (B, Nt, text_dim)
    blank: torch.Tensor | None  # the same of blank prompts, where there is guidance

    def finished(self, index: int, video: torch.Tensor, sound: torch.Tensor) -> Sampled:
        """Clip `index` of the batch, from its rows `(Nv, 96)` and `(Na, 32)` after the last step.

        Raises:
            FloatingPointError: a latent is not finite.
        """
        if not (torch.isfinite(video).all() and torch.isfinite(sound).all()):
            raise FloatingPointError(f"a latent of clip {self.clips[index].spec.seed} is not finite")
        return Sampled(
            spec=self.clips[index].spec,
            latents=unpatchify(video, self.frames, self.edge).cpu(),
            audio_latents=sound.view(2, self.audio, -1).transpose(1, 2).contiguous().cpu(),
        )


class Sampler:
    """Batched sampling with one pipeline's networks.

    Args:
        pipe: a MiniMax-H3 pipeline whose text encoder reads `text_layer`.
        device: where to run; the networks are moved there.
        amp: bfloat16 autocast, for accelerators.
        guidance: video and audio weights of classifier-free guidance against blank prompts; for a model into
            which no guidance has been distilled yet.
    """

    def __init__(
        self,
        pipe: Any,
        device: torch.device,
        *,
        amp: bool = False,
        guidance: tuple[float, float] | None = None,
    ) -> None:
        self.pipe, self.device, self.amp, self.guidance = pipe, device, amp, guidance
        transformer = getattr(pipe, "transformer", None)
        self.transformer = transformer if transformer is not None else pipe.transformer_ref
        for network in (self.transformer, pipe.text_encoder, pipe.vae, pipe.audio_vae):
            network.to(device).eval()

    def _prepare(self, spec: ClipSpec, task: str, anchors: tuple[str, ...], size: int) -> Prepared:
        tokenizer = self.pipe.tokenizer
        images: list[np.ndarray] = []
        if task == "ref2va":
            edge = self.pipe.config.reference_image_short_edge
            images = [render(build_scene([reference_still(spec)], edge))[0, 0].numpy()]
        elif task == "fl2va":
            clip = render(build_scene([spec], size))[0]
            images = [clip[0 if anchor == "first" else -1].numpy() for anchor in anchors]
        ids, tags = presentation(tokenizer, [i.shape[0] // 32 * (i.shape[1] // 32) for i in images])
        prompt = spec.reference_prompt() if task == "ref2va" else spec.caption()
        words = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return Prepared(spec, ids + words, tags + [TEXT_TAG] * len(words), images)

    @torch.no_grad()
    def sample(
        self,
        specs: Sequence[ClipSpec],
        *,
        forwards: int = 49,
        task: str = "t2va",
        anchors: tuple[str, ...] = (),
        batch: int = 64,
        size: int = 128,
    ) -> list[Sampled]:
        """Dense Euler sampling along the pipeline's own schedules, in the order of `specs`.

        Args:
            specs: clips of one length; the captions are the prompts.
            forwards: network evaluations; diffusers calls this `num_inference_steps - 1`.
            task: `t2va`, `ref2va` (the first object's still is the reference) or `fl2va` (see `anchors`).
            anchors: which keyframes of the true clip condition `fl2va`: "first", "last".
        """
        done: dict[int, Sampled] = {}
        for places, packed in self.packed(specs, task=task, anchors=anchors, batch=batch, size=size):
            video, sound = self._denoise(packed, forwards)
            for index, place in enumerate(places):
                done[place] = packed.finished(index, video[index], sound[index])
        return [done[index] for index in range(len(specs))]

    def packed(
        self, specs: Sequence[ClipSpec], *, task: str, anchors: tuple[str, ...], batch: int, size: int
    ) -> Iterator[tuple[list[int], Packed]]:
        """The clips in batches of one layout, each with the places in `specs` that it holds.

        The arguments are those of `sample`.
        """
        groups: dict[tuple[int, ...], list[tuple[int, Prepared]]] = defaultdict(list)
        for place, spec in enumerate(specs):
            clip = self._prepare(spec, task, anchors, size)
            groups[tuple(clip.tags)].append((place, clip))
        for members in groups.values():
            for start in range(0, len(members), batch):
                part = members[start : start + batch]
                clips = [clip for _, clip in part]
                yield [place for place, _ in part], self._pack(clips, task, anchors, size)

    def _conditions(self, request: Prepared) -> list[torch.Tensor]:
        found = []
        for image in request.images:
            pixels = torch.from_numpy(image).to(self.device).permute(2, 0, 1)[None, :, None]
            found.append(encode_vae_condition(self.pipe.vae, pixels, PIXEL_MEAN, PIXEL_STD))
        return found

    def _start(self, request: Prepared, frames: int, edge: int, audio: int) -> tuple[torch.Tensor, ...]:
        """Condition rows, video rows and audio rows of one request, drawn in the stock order on the CPU."""
        generator = torch.Generator().manual_seed(request.spec.seed)
        channels = self.pipe.vae.config.latent_channels
        kept = []
        for condition in self._conditions(request):
            noise = randn_tensor(condition.shape, generator=generator, dtype=torch.float32)
            kept.append(
                patchify_video_latents(CONDITION_TIME * condition + (1 - CONDITION_TIME) * noise, PATCH)
            )
        video = randn_tensor((1, channels, frames, edge, edge), generator=generator, dtype=torch.float32)
        sound = randn_tensor((audio * 2, self.pipe.audio_vae.config.latent_channels), generator=generator)
        rows = patchify_video_latents(video, PATCH)
        return torch.cat(kept) if kept else rows[:0], rows, sound

    def _pack(self, clips: list[Prepared], task: str, anchors: tuple[str, ...], size: int) -> Packed:
        device = self.device
        length, tags = clips[0].spec.frames, clips[0].tags
        compression = self.pipe.vae.spatial_compression_ratio
        frames, edge = video_latent_num_frames(length, 17, 5), size // compression
        audio = audio_latent_num_frames(length)
        layout = make_layout(
            torch.tensor(tags),
            frames,
            edge,
            audio,
            device,
            anchors=anchors,
            reference_edge=clips[0].images[0].shape[0] // compression if task == "ref2va" else None,
        )
        kept, video, sound = (
            torch.stack(rows).to(device)
            for rows in zip(*(self._start(clip, frames, edge, audio) for clip in clips), strict=True)
        )
        ids = torch.tensor([clip.ids for clip in clips], device=device)
        images = grid = None
        if clips[0].images:
            images = torch.from_numpy(np.stack([np.stack(clip.images) for clip in clips])).to(device)
            grid = (images.shape[2] // 16, images.shape[3] // 16)
        encoder, layer = self.pipe.text_encoder, self.pipe.text_encoder_layer
        text, blank = text_forward(encoder, ids, layer, images, grid), None
        if self.guidance is not None:
            prompt_start = max((i + 1 for i, tag in enumerate(tags) if tag == VIDEO_TAG), default=0)
            ids = ids.clone()
            ids[:, prompt_start:] = self.pipe.tokenizer.convert_tokens_to_ids("<|endoftext|>")
            blank = text_forward(encoder, ids, layer, images, grid)
        return Packed(clips, layout, frames, edge, audio, kept, video, sound, text, blank)

    def _denoise(self, packed: Packed, forwards: int) -> tuple[torch.Tensor, torch.Tensor]:
        schedules = []
        for scheduler in (self.pipe.scheduler, self.pipe.audio_scheduler):
            own = copy.deepcopy(scheduler)
            own.set_timesteps(forwards + 1)
            schedules.append((own.timesteps.tolist(), own.sigmas.tolist()))
        (times, sigmas), (audio_times, audio_sigmas) = schedules
        video, sound = packed.video, packed.sound
        texts = [packed.text] if packed.blank is None else [packed.text, packed.blank]
        for i in range(len(times)):
            levels = noise_levels(times[i], audio_times[i], device=self.device).expand(len(video), -1)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                rows = torch.cat([packed.kept, video], dim=1)
                answers = [
                    transformer_forward(self.transformer, packed.layout, rows, sound, text, levels)
                    for text in texts
                ]
            velocity, audio_velocity = answers[0]
            if self.guidance is not None:
                velocity, audio_velocity = (
                    blank + weight * (told - blank)
                    for told, blank, weight in zip(answers[0], answers[1], self.guidance, strict=True)
                )
            video = euler(video, velocity, times[i], sigmas[i], sigmas[i + 1])
            sound = euler(sound, audio_velocity, audio_times[i], audio_sigmas[i], audio_sigmas[i + 1])
        return video, sound

    @torch.no_grad()
    def decode(self, clips: Sequence[Sampled], batch: int = 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Frames `(T, H, W, 3)` uint8 and sound `(2, N)` float32 of each clip, as in the pipeline."""
        vae, audio_vae = self.pipe.vae, self.pipe.audio_vae
        mean, std = (
            torch.tensor(v, device=self.device) for v in (vae.config.latents_mean, vae.config.latents_std)
        )
        audio_mean, audio_std = (
            torch.tensor(v, device=self.device)
            for v in (audio_vae.config.latents_mean, audio_vae.config.latents_std)
        )
        for start in range(0, len(clips), batch):
            part = clips[start : start + batch]
            latents = torch.stack([clip.latents for clip in part]).to(self.device)
            latents = latents * std.view(1, -1, 1, 1, 1) + mean.view(1, -1, 1, 1, 1)
            frames = denormalise(vae.decode(latents, return_dict=False)[0]).cpu().numpy()
            sound = torch.cat([clip.audio_latents for clip in part]).to(self.device)
            sound = sound * audio_std.view(1, -1, 1) + audio_mean.view(1, -1, 1)
            waves = audio_vae.decode(sound, return_dict=False)[0].float().view(len(part), 2, -1).cpu().numpy()
            yield from zip(frames, waves, strict=True)


def noise_levels(time: float, audio_time: float, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """`(3,)` clean-ward times of a forward: generated video, generated audio and conditions."""
    return torch.tensor([time, audio_time, max(time, CONDITION_TIME)], device=device)


def euler(x: torch.Tensor, velocity: torch.Tensor, time: float, sigma: float, after: float) -> torch.Tensor:
    """The stock scheduler's step, whose x0 takes sigma from the timestep."""
    ratio = after / sigma
    return ratio * x + (1.0 - ratio) * (x + (1 - time) * velocity)


def unpatchify(rows: torch.Tensor, frames: int, edge: int) -> torch.Tensor:
    """Video rows `(Nv, 96)` as latents `(24, frames, edge, edge)`."""
    patch_t, patch_h, patch_w = PATCH
    x = rows.view(frames // patch_t, edge // patch_h, edge // patch_w, -1, patch_t, patch_h, patch_w)
    return x.permute(3, 0, 4, 1, 5, 2, 6).reshape(-1, frames, edge, edge)
