"""Checks a Wan request against the pipeline at hand and fills in its defaults."""

from __future__ import annotations

from typing import Any

from videoaccel.errors import UserError
from videoaccel.pipelines.checks import (
    check_canvas,
    check_has_prompt,
    check_keyframes,
    check_num_frames,
    check_number,
    check_references,
    check_seed,
    check_shift,
    check_sigmas,
    check_steps,
    steps_asked,
)
from videoaccel.pipelines.request import Plan, Request
from videoaccel.pipelines.wan_facts import STREAMS, canvas_for, canvas_multiple, experts

# The stock call's own defaults.
DEFAULT_STEPS, DEFAULT_FRAMES, DEFAULT_GUIDANCE = 50, 81, 5.0
MAX_SECONDS = 15.0
# Four times the largest canvas that a released checkpoint was trained on.
MAX_PIXELS = 4 * 1280 * 720


def resolve(pipe: Any, request: Request, text_rows: int) -> Plan:
    """See `Family.resolve`; `text_rows` is the longest prompt in tokens."""
    check_references(request)
    task = request.task or ("i2v" if request.first_frame is not None else "t2v")
    experts(pipe, task)
    if request.references:
        raise UserError(
            "Wan takes no references; drop --reference, or use --first-frame with an i2v checkpoint"
        )
    if task == "i2v" and request.first_frame is None:
        raise UserError("task i2v needs --first-frame")
    if task == "t2v" and (request.first_frame is not None or request.last_frame is not None):
        raise UserError("task t2v takes no keyframes; drop them or load an image-to-video checkpoint")
    check_keyframes(request)
    _check_prompts(pipe, request, text_rows)
    notes: list[str] = []
    height, width = check_canvas(request, canvas_multiple(pipe), MAX_PIXELS) or canvas_for(pipe)
    # TI2V-5B (the one that expands timesteps) is trained at 24 frames a second, the others at 16.
    fps = 24.0 if pipe.config.expand_timesteps else 16.0
    sigmas = check_sigmas(request, STREAMS)
    asked = steps_asked(request, sigmas, 1)
    steps = DEFAULT_STEPS if asked is None else asked
    check_steps(steps, 1, "N steps are N forwards a guidance branch")
    two = pipe.config.boundary_ratio is not None
    if request.guidance_low_noise is not None and not two:
        raise UserError("this checkpoint has one expert; drop the low-noise guidance scale")
    guidance = DEFAULT_GUIDANCE if request.guidance is None else request.guidance
    low = (guidance if request.guidance_low_noise is None else request.guidance_low_noise) if two else None
    for name, value in (("guidance", guidance), ("low-noise guidance", low)):
        if value is not None and check_number(name, value, "try 5") < 0:
            raise UserError(f"{name} must be at least 0, got {value}")
    return Plan(
        family="wan",
        task=task,
        height=height,
        width=width,
        num_frames=_frames(pipe, request, fps, notes),
        fps=fps,
        steps=steps,
        forwards=steps,
        seed=check_seed(request.seed),
        guidance=float(guidance),
        guidance_low_noise=None if low is None else float(low),
        shift=check_shift(request, STREAMS),
        sigmas=sigmas,
        notes=tuple(notes),
    )


def _check_prompts(pipe: Any, request: Request, text_rows: int) -> None:
    check_has_prompt(request)
    if getattr(pipe, "tokenizer", None) is None:
        return
    for name, text in (("prompt", request.prompt), ("negative prompt", request.negative_prompt)):
        count = len(pipe.tokenizer(text or "", add_special_tokens=True)["input_ids"])
        # The stock pipeline cuts it off without a word.
        if count > text_rows:
            raise UserError(
                f"the {name} is {count} tokens long and the model reads at most {text_rows}; shorten it"
            )


def _frames(pipe: Any, request: Request, fps: float, notes: list[str]) -> int:
    stride = pipe.vae_scale_factor_temporal
    if request.num_frames is not None:
        asked, said = check_num_frames(request.num_frames), f"{request.num_frames} frames"
    elif request.seconds is not None:
        if check_number("seconds", request.seconds, "try 5") <= 0:
            raise UserError(f"seconds must be a positive number, got {request.seconds}")
        asked, said = max(1, round(request.seconds * fps)), f"{request.seconds:g} seconds"
    else:
        asked, said = DEFAULT_FRAMES, f"{DEFAULT_FRAMES} frames"
    if asked > MAX_SECONDS * fps:
        raise UserError(f"{said} is outside what this model makes; give at most {MAX_SECONDS:g} seconds")
    frames = -(-(asked - 1) // stride) * stride + 1
    if frames != asked:
        notes.append(
            f"{said} became {frames} frames ({frames / fps:.3f} s): the video VAE makes {stride}n+1."
        )
    return int(frames)
