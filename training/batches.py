"""Turns cached latents into training batches of one task and one layout, and runs the model on them."""

import copy
from dataclasses import dataclass

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames
from transformers import Qwen2Tokenizer

from evals.batched import (
    TEXT_TAG,
    Layout,
    make_layout,
    presentation,
    text_forward,
    transformer_forward,
)
from training.latents import Latents, Prompts, tokenise
from training.skeleton import TEXT_LAYER

TASKS = ("t2va", "ref2va", "fl2va")
VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
CONDITION_TIME = 0.999
# Of ten noise levels, this many lie evenly along the schedule, and this many on the part of it where objects
# take form, above 0.9: at 0.98, 0.95, 0.9 a trained network knows 72, 92, 97 % of a true clip's cartoon. The
# rest lie evenly in sigma: textures and sharp edges are decided there.
SCHEDULE_TENTHS, FORMING_TENTHS = 4, 2
FORMING = 0.45
EDGE = 16  # latent height and width of the 128 px canvas
GRID = (EDGE // 2) ** 2  # video rows of a latent frame
WINDOW = (5, 2)  # frames, and latent frames, of the shortest clip: what opens each chunk of a longer one
CHUNK = (17, 5)


@dataclass
class Batch:
    """One batch, clean. `images` are the vision tower's `(B, k, H, W, 3)` uint8 pictures, if any."""

    task: str
    layout: Layout
    token_ids: torch.Tensor  # (B, L)
    prompt_start: int  # tokens before the prompt proper: labels and vision blocks
    video: torch.Tensor  # (B, Nv', 64) generated rows, clean
    audio: torch.Tensor  # (B, Na, 16)
    conditions: torch.Tensor | None  # (B, c, 64)
    images: torch.Tensor | None
    cartoon: torch.Tensor  # (B, Nv', CHANNELS)
    heard: bool  # whether the audio is worth learning; a window cuts it between two latents


class Batcher:
    """Draws batches from one `Latents`: whole clips, or windows of them (see `short`)."""

    window = False

    def __init__(self, data: Latents, tokenizer: Qwen2Tokenizer) -> None:
        self.data, self.device = data, data.video.device
        self.captions = tokenise(tokenizer, [spec.caption() for spec in data.specs], self.device)
        self.references = tokenise(tokenizer, [spec.reference_prompt() for spec in data.specs], self.device)
        self.tokenizer = tokenizer
        self.blank = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.layouts: dict[tuple[str, int, tuple[str, ...]], tuple[Layout, list[int]]] = {}

    def short(self) -> "Batcher":
        """The same clips, five frames of each at a time.

        A chunk is encoded on its own, so its first two latent frames are those of a clip of five frames. They
        hold a fifth of the rows of the shortest whole clip, and as much of what shape and colour are.
        """
        other = copy.copy(self)
        other.window, other.layouts = True, {}
        return other

    @property
    def _lengths(self) -> tuple[int, int]:
        """Latent frames, and audio latents of a channel."""
        if self.window:
            return WINDOW[1], audio_latent_num_frames(WINDOW[0])
        return self.data.latent_frames, self.data.audio_latents

    def _cut(self, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Video rows, audio rows and cartoon of clips; of a random chunk's opening, if windows are drawn."""
        data = self.data
        if not self.window:
            return data.video[clips], data.audio[clips], data.cartoons[clips]
        chunk = int(torch.randint((data.latent_frames - WINDOW[1]) // CHUNK[1] + 1, ()))
        frames, latents = self._lengths
        start, opening = chunk * CHUNK[1] * GRID, round(chunk * CHUNK[0] * data.audio_latents / data.frames)
        # Cut first: indexing copies, and most of a clip is outside its window.
        video, cartoon = (
            rows[:, start : start + frames * GRID][clips] for rows in (data.video, data.cartoons)
        )
        audio = data.audio.unflatten(1, (2, -1))[:, :, opening : opening + latents][clips]
        return video, audio.flatten(1, 2), cartoon

    def _layout(self, task: str, length: int, anchors: tuple[str, ...]) -> tuple[Layout, list[int]]:
        key = (task, length, anchors)
        if key not in self.layouts:
            count, tokens = {"t2va": (0, 0), "ref2va": (1, 4), "fl2va": (len(anchors), 16)}[task]
            ids, tags = presentation(self.tokenizer, [tokens] * count)
            layout = make_layout(
                torch.tensor(tags + [TEXT_TAG] * length),
                self._lengths[0],
                EDGE,
                self._lengths[1],
                self.device,
                anchors=anchors,
                reference_edge=8 if task == "ref2va" else None,
            )
            self.layouts[key] = (layout, ids)
        return self.layouts[key]

    def draw(self, task: str, size: int, anchors: tuple[str, ...] = ()) -> Batch:
        """A random batch of a task; `anchors` names the keyframes of `fl2va`."""
        prompts: Prompts = self.references if task == "ref2va" else self.captions
        bucket = int(torch.multinomial(prompts.weights, 1))
        picks = torch.randint(len(prompts.clips[bucket]), (size,), device=self.device)
        return self.make(task, prompts.clips[bucket][picks], prompts.ids[bucket][picks], anchors)

    def make(self, task: str, clips: torch.Tensor, ids: torch.Tensor, anchors: tuple[str, ...] = ()) -> Batch:
        """The batch of given clips whose prompts `(B, L)` have one length."""
        layout, prefix = self._layout(task, ids.shape[1], anchors)
        head = torch.tensor(prefix, device=self.device, dtype=ids.dtype).expand(len(ids), -1)
        video, audio, cartoon = self._cut(clips)
        conditions = images = None
        if task == "ref2va":
            conditions, images = self.data.reference[clips], self.data.stills[clips][:, None]
        elif task == "fl2va":
            which = torch.tensor([("first", "last").index(anchor) for anchor in anchors], device=self.device)
            conditions = self.data.ends[clips][:, which].flatten(1, 2)
            images = self.data.end_images[clips][:, which]
        return Batch(
            task=task,
            layout=layout,
            token_ids=torch.cat([head, ids], dim=1),
            prompt_start=len(prefix),
            video=video.float(),
            audio=audio.float(),
            conditions=None if conditions is None else conditions.float(),
            images=images,
            cartoon=cartoon.float(),
            heard=not self.window,
        )


def draw_sigmas(
    count: int, device: torch.device, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both noise levels, tied as the schedulers tie them: most along the schedule, others even in sigma."""
    u = torch.rand(count, device=device, generator=generator)
    even = u / (VIDEO_SHIFT - (VIDEO_SHIFT - 1) * u)
    forming = FORMING + (1 - FORMING) * u
    kind = torch.arange(count, device=device) % 10
    base = torch.where(kind < SCHEDULE_TENTHS + FORMING_TENTHS, forming, even)
    base = torch.where(kind < SCHEDULE_TENTHS, u, base).clamp(5e-4, 1.0)
    return tuple(shift * base / (1 + (shift - 1) * base) for shift in (VIDEO_SHIFT, AUDIO_SHIFT))


def blank_prompts(batch: Batch, rows: torch.Tensor, blank: int) -> torch.Tensor:
    """Token ids with the prompt (not the pictures) of chosen rows replaced by blanks."""
    ids = batch.token_ids.clone()
    ids[:, batch.prompt_start :] = torch.where(rows[:, None], blank, ids[:, batch.prompt_start :])
    return ids


@dataclass
class Noisy:
    """A batch at its noise levels, and the data-ward velocities that lead back."""

    video: torch.Tensor
    audio: torch.Tensor
    times: torch.Tensor
    video_sigma: torch.Tensor
    video_target: torch.Tensor
    audio_target: torch.Tensor


def add_noise(batch: Batch, sigmas: tuple[torch.Tensor, torch.Tensor]) -> Noisy:
    """`x = (1 - sigma) data + sigma noise`; conditions are held at t = 0.999."""
    video_sigma, audio_sigma = sigmas
    v, a = video_sigma[:, None, None], audio_sigma[:, None, None]
    video_noise, audio_noise = torch.randn_like(batch.video), torch.randn_like(batch.audio)
    video = (1 - v) * batch.video + v * video_noise
    if batch.conditions is not None:
        kept = CONDITION_TIME * batch.conditions + (1 - CONDITION_TIME) * torch.randn_like(batch.conditions)
        video = torch.cat([kept, video], dim=1)
    condition_time = torch.maximum(1 - video_sigma, torch.full_like(video_sigma, CONDITION_TIME))
    return Noisy(
        video=video,
        audio=(1 - a) * batch.audio + a * audio_noise,
        times=torch.stack([1 - video_sigma, 1 - audio_sigma, condition_time], dim=1),
        video_sigma=video_sigma,
        video_target=batch.video - video_noise,
        audio_target=batch.audio - audio_noise,
    )


def predict(
    models,
    batch: Batch,
    token_ids: torch.Tensor,
    noisy: Noisy,
    block_fn,
    states: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both velocities, through the text encoder and the transformer of `models`; `states` as there."""
    grid = None if batch.images is None else (batch.images.shape[2] // 16, batch.images.shape[3] // 16)
    text = text_forward(models["text_encoder"], token_ids, TEXT_LAYER, batch.images, grid)
    return transformer_forward(
        models["transformer"], batch.layout, noisy.video, noisy.audio, text, noisy.times, block_fn, states
    )
