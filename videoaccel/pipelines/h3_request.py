"""Checks a MiniMax-H3 request against the model at hand and fills in its defaults."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from videoaccel.errors import UserError, unknown
from videoaccel.media import resample
from videoaccel.pipelines.checks import (
    READ,
    check_aspect,
    check_canvas,
    check_has_prompt,
    check_image,
    check_keyframes,
    check_num_frames,
    check_number,
    check_references,
    check_seed,
    check_shift,
    check_sigmas,
    check_steps,
    is_whole,
    shown,
    steps_asked,
)
from videoaccel.pipelines.facts import ModelFacts
from videoaccel.pipelines.registry import FAMILIES
from videoaccel.pipelines.request import Plan, Reference, Request

TASKS = FAMILIES["minimax_h3"].tasks
STREAMS = ("video", "audio")
SCHEDULERS = {"video": "scheduler", "audio": "audio_scheduler"}
"""Stream to the pipeline component that schedules it."""
# What the released checkpoint accepts; the defaults of diffusers' MiniMaxH3Ref2VASetupStep.
LIMITS = {"image": 9, "video": 3, "audio": 3}
MAX_REFERENCES = 12
MIN_VIDEO_SECONDS = 0.55
MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def facts_of(pipe: Any) -> ModelFacts:
    """The checkpoint's facts; a pipeline of the stock class has the stock ones."""
    facts = getattr(pipe, "model_facts", None)
    return facts if isinstance(facts, ModelFacts) else ModelFacts()


def task_of(request: Request) -> str:
    """The task a request means, by name or by what it carries.

    Raises:
        UserError: an unknown task, or inputs that belong to another one.
    """
    keyframes = request.first_frame is not None or request.last_frame is not None
    implied = "ref2va" if request.references else "fl2va" if keyframes else "t2va"
    task = request.task or implied
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if request.references and keyframes:
        raise UserError(
            "references and keyframes cannot be combined; drop --reference or --first-frame/--last-frame"
        )
    if task == "ref2va" and not request.references:
        raise UserError("task ref2va needs at least one --reference")
    if task == "fl2va" and not keyframes:
        raise UserError("task fl2va needs --first-frame, --last-frame or both")
    if task != implied:
        raise UserError(
            f"task {task} takes no {'references' if request.references else 'keyframes'}; use {implied}"
        )
    return task


def canvas_for(pipe: Any, short_edge: int | None = None) -> tuple[int, int]:
    """The default `(height, width)`, or the same shape at another short edge, on the model's own grid."""
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size

    canvas = facts_of(pipe).canvas
    edge, area = pipe.config.canvas_short_edge, pipe.config.canvas_max_pixels
    if short_edge is None and canvas is not None:
        return canvas
    if short_edge is not None:
        if short_edge < pipe.canvas_multiple:
            raise UserError(
                f"a short edge of {short_edge} px is too small; use at least {pipe.canvas_multiple}"
            )
        # The area cap belongs to the released short edge; it scales with the one asked for.
        area = area * (short_edge / edge) ** 2
        edge = short_edge
    aspect = (canvas[1], canvas[0]) if canvas is not None else (16, 9)
    height, width = resolve_canvas_size(*aspect, pipe.canvas_multiple, edge, area)
    return int(height), int(width)


Forwards = Callable[[int, Mapping[str, float], Mapping[str, tuple[float, ...]]], int]
"""Steps, shift and sigmas to the schedule's number of forwards."""


def resolve(pipe: Any, request: Request, forwards: Forwards) -> Plan:
    """See `Family.resolve`."""
    check_references(request)
    task = task_of(request)
    notes: list[str] = []
    _check_prompt(pipe, request)
    _check_media(pipe, request)
    for number, reference in enumerate(request.references, start=1):
        rate, target = reference.sample_rate, pipe.audio_sampling_rate
        if reference.audio is not None and rate not in (None, target):
            notes.append(f"the sound of reference {number} was resampled from {rate} to {target} Hz.")
    height, width = _canvas(pipe, request, task)
    num_frames = _frames(pipe, request, notes)
    shift, sigmas = check_shift(request, STREAMS), check_sigmas(request, STREAMS)
    asked = steps_asked(request, sigmas, 2)
    steps = facts_of(pipe).default_steps if asked is None else asked
    check_steps(steps, 2, "N steps are N-1 forwards")
    if request.guidance is not None or request.guidance_low_noise is not None or request.negative_prompt:
        raise UserError("MiniMax-H3 is guidance-distilled; drop the guidance scale and the negative prompt")
    return Plan(
        family="minimax_h3",
        task=task,
        height=height,
        width=width,
        num_frames=num_frames,
        fps=float(pipe.fps),
        steps=steps,
        forwards=forwards(steps, shift, sigmas),
        seed=check_seed(request.seed),
        shift=shift,
        sigmas=sigmas,
        notes=tuple(notes),
    )


def _check_prompt(pipe: Any, request: Request) -> None:
    check_has_prompt(request)
    tokenizer = getattr(pipe, "tokenizer", None)
    if tokenizer is None:
        return
    limit = facts_of(pipe).max_prompt_tokens
    # Tokenizers without a limit of their own carry a huge number in its place.
    limit = int(min(limit or math.inf, tokenizer.model_max_length, 10**9))
    tokens = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
    count = len(tokens)
    # They would be read as the image of a reference that isn't there, and fail deep in the text encoder.
    marks = [mark for mark in MEDIA_TOKENS if tokenizer.convert_tokens_to_ids(mark) in tokens]
    if marks:
        raise UserError(f"the prompt holds {marks[0]}, which the model reserves for references; take it out")
    if count > limit:
        raise UserError(f"the prompt is {count} tokens long and the model reads at most {limit}; shorten it")


def _check_media(pipe: Any, request: Request) -> None:
    check_keyframes(request)
    kinds: list[str] = [reference.kind for reference in request.references]
    for given in kinds:
        if given not in LIMITS:
            raise unknown("kind of reference", given, LIMITS)
    for kind, most in LIMITS.items():
        if kinds.count(kind) > most:
            raise UserError(f"at most {most} {kind} references are read, got {kinds.count(kind)}; drop some")
    if len(kinds) > MAX_REFERENCES:
        raise UserError(f"at most {MAX_REFERENCES} references are read, got {len(kinds)}; drop some")
    if kinds and set(kinds) == {"audio"}:
        raise UserError("a sound reference needs an image or video reference beside it; add one")
    for number, reference in enumerate(request.references, start=1):
        what = f"reference {number} ({reference.kind})"
        if reference.kind == "image":
            if reference.image is None:
                raise UserError(f"{what} holds no image; decode the file first")
            check_aspect(what, *check_image(f"the image of {what}", reference.image).size)
        elif reference.kind == "video":
            if reference.frames is not None and not isinstance(reference.frames, np.ndarray):
                tensor = isinstance(reference.frames, torch.Tensor)
                fix = "call .cpu().numpy() on it" if tensor else f"read it with {READ}video"
                raise UserError(
                    f"the frames of {what} must be a NumPy array, got {shown(reference.frames)}; {fix}"
                )
            if reference.frames is None or reference.frames.ndim != 4 or reference.frames.shape[-1] != 3:
                raise UserError(f"{what} must hold (T, H, W, 3) frames; decode the file first")
            if reference.frames.dtype != np.uint8:
                raise UserError(
                    f"{what} must hold uint8 frames, not {reference.frames.dtype}; scale to 0-255"
                )
            if reference.fps is None:
                raise UserError(f"{what} needs its frame rate; set fps")
            if check_number(f"the fps of {what}", reference.fps, "try 24") <= 0:
                raise UserError(f"{what} needs its frame rate; set fps, got {reference.fps}")
            check_aspect(what, reference.frames.shape[2], reference.frames.shape[1])
            # The text encoder reads two frames a second and merges them in pairs: one pair at least.
            if reference.frames.shape[0] / reference.fps < MIN_VIDEO_SECONDS:
                raise UserError(f"{what} is too short; give at least {MIN_VIDEO_SECONDS} seconds")
        elif reference.audio is None:
            raise UserError(f"{what} holds no sound; decode the file first")
        if reference.audio is not None:
            _check_sound(what, reference.audio, reference.sample_rate)


def _check_sound(what: str, audio: torch.Tensor, rate: int | None) -> None:
    if not isinstance(audio, torch.Tensor):
        fix = "pass it through torch.from_numpy" if isinstance(audio, np.ndarray) else f"see {READ}audio"
        raise UserError(f"the sound of {what} must be a tensor, got {shown(audio)}; {fix}")
    shape = tuple(audio.shape)
    if len(shape) != 2 or shape[0] not in (1, 2) or not shape[1]:
        raise UserError(f"the sound of {what} must be (1 or 2 channels, samples), got {shape}")
    if not audio.is_floating_point() or not bool(torch.isfinite(audio).all()):
        raise UserError(f"the sound of {what} must be finite floats in [-1, 1], not {audio.dtype}; scale it")
    if rate is not None and (not is_whole(rate) or rate < 1):
        raise UserError(f"the sound of {what} needs its sample rate, got {rate!r}; set sample_rate")


def resampled(pipe: Any, reference: Reference) -> Reference:
    """The reference with its sound at the audio VAE's rate, where the stock blocks could not bring it there.

    They resample with torchaudio, which this package does not need; without it ffmpeg's resampler stands in.
    """
    rate, target = reference.sample_rate, int(pipe.audio_sampling_rate)
    if reference.audio is None or rate is None or rate == target:
        return reference
    if importlib.util.find_spec("torchaudio") is not None:
        return reference
    audio = torch.from_numpy(resample(reference.audio.cpu().float().numpy(), rate, target))
    return replace(reference, audio=audio, sample_rate=target)


def _canvas(pipe: Any, request: Request, task: str) -> tuple[int, int]:
    asked = check_canvas(request, pipe.canvas_multiple, facts_of(pipe).max_pixels)
    if asked is not None:
        return asked
    keyframe = request.first_frame if request.first_frame is not None else request.last_frame
    if task == "fl2va" and keyframe is not None and facts_of(pipe).canvas is None:
        from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size

        edge, area = pipe.config.canvas_short_edge, pipe.config.canvas_max_pixels
        height, width = resolve_canvas_size(*keyframe.size, pipe.canvas_multiple, edge, area)
        return int(height), int(width)
    return canvas_for(pipe)


def _frames(pipe: Any, request: Request, notes: list[str]) -> int:
    fps, chunk, tail = int(pipe.fps), int(pipe.vae_frames_per_chunk), int(pipe.vae_latents_per_chunk)
    low, high = float(pipe.min_duration), float(pipe.max_duration)

    def up(frames: int) -> int:
        return max(0, -(-(frames - tail) // chunk)) * chunk + tail

    if request.num_frames is not None:
        asked = check_num_frames(request.num_frames)
        frames = up(asked)
        said = f"{asked} frames"
    elif request.seconds is not None:
        seconds = check_number("seconds", request.seconds, f"try {low:g} to {high:g}")
        if not low <= seconds <= high:
            raise UserError(f"{seconds:g} seconds is outside what this model makes; give {low:g} to {high:g}")
        asked = max(1, round(seconds * fps))
        frames = up(asked)
        # A length inside the range must not be refused for the grid: 15 s is 360 frames, whose next is 362.
        if frames / fps > high:
            frames -= chunk
        said = f"{seconds:g} seconds"
    else:
        asked = facts_of(pipe).default_frames
        frames = up(asked)
        said = f"{asked} frames"
    if not low <= frames / fps <= high:
        least, most = up(math.ceil(low * fps)), (int(high * fps) - tail) // chunk * chunk + tail
        raise UserError(
            f"{said} is outside what this model makes; "
            f"give {least} to {most} frames ({low:g} to {high:g} seconds)"
        )
    if frames != asked:
        notes.append(
            f"{said} became {frames} frames ({frames / fps:.3f} s): the video VAE makes {chunk}n+{tail}."
        )
    return frames
