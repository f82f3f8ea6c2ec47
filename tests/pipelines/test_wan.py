"""The Wan family against the stock pipelines: 2.1 and 2.2, text and image to video, tiny random weights."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.family import (
    Cancelled,
    Clip,
    ForwardCall,
    Progress,
    Request,
    StepInfo,
    Streams,
    family_of,
)

from .conftest import assert_stack_is_what_runs, picture

BASE: dict[str, Any] = {
    "prompt": "a red square",
    "steps": 6,
    "num_frames": 9,
    "height": 32,
    "width": 48,
    "seed": 3,
}
Build = Callable[..., Any]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2.1 t2v": ({}, {}),
    "2.1 t2v, no guidance": ({}, {"guidance": 1.0}),
    "2.1 i2v with clip": ({"image": True, "clip_encoder": True}, {"first_frame": picture(0)}),
    "2.2 t2v": (
        {"two_experts": True},
        {"guidance": 4.0, "guidance_low_noise": 3.0, "negative_prompt": "blur"},
    ),
    "2.2 i2v": ({"image": True, "two_experts": True}, {"first_frame": picture(0)}),
    "2.2 first and last": (
        {"image": True, "two_experts": True},
        {"first_frame": picture(0), "last_frame": picture(1)},
    ),
}


def stock(pipe: Any, request: Request) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """Frames and latents of the stock call."""
    extra: dict[str, Any] = {}
    if request.first_frame is not None:
        extra = {"image": request.first_frame, "last_image": request.last_frame}
    if request.guidance_low_noise is not None:
        extra["guidance_scale_2"] = request.guidance_low_noise
    outputs = [
        pipe(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            num_inference_steps=request.steps,
            guidance_scale=5.0 if request.guidance is None else request.guidance,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type=kind,
            **extra,
        ).frames
        for kind in ("pil", "latent")
    ]
    return np.stack([np.asarray(frame) for frame in outputs[0][0]]), outputs[1]


@pytest.mark.parametrize("case", CASES)
def test_dense_run_is_the_stock_call_bit_for_bit(build_tiny_wan: Build, case: str) -> None:
    built, asked = CASES[case]
    pipe, request = build_tiny_wan(**built), Request(**BASE, **asked)
    clip = family_of(pipe).generate(pipe, request)
    frames, latents = stock(pipe, request)
    assert np.array_equal(clip.frames, frames)
    assert torch.equal(clip.latents["video"], latents)
    assert clip.audio is None and clip.fps == 16.0


class Recorder:
    """A dense controller that keeps every branch's velocity."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.calls: list[tuple[int, str, str]] = []
        self.guided: dict[int, torch.Tensor] = {}
        self.breaks_at = breaks_at

    def velocity(self, call: ForwardCall) -> Streams:
        if call.step.index == self.breaks_at:
            raise RuntimeError("broken step")
        found = call.dense()
        self.calls.append((call.step.index, call.step.component, call.branch))
        part = call.step.branches[call.branch] * found["video"].double()
        self.guided[call.step.index] = self.guided.get(call.step.index, 0) + part
        return found

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        return None


def schedulers() -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    return {
        "euler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "unipc": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
    }


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
@pytest.mark.parametrize("case", ["2.1 t2v", "2.2 t2v", "2.2 i2v"])
def test_coefficients_and_branch_weights_rebuild_the_final_latent(
    build_tiny_wan: Build, case: str, scheduler: str
) -> None:
    built, asked = CASES[case]
    pipe, request = build_tiny_wan(**built, scheduler=schedulers()[scheduler]), Request(**BASE, **asked)
    family, recorder = family_of(pipe), Recorder()
    clip = family.generate(pipe, request, controllers={"test": recorder})
    assert torch.equal(clip.latents["video"], family.generate(pipe, request).latents["video"])
    steps = family.steps(pipe, clip.plan)
    total = clip.initial_noise["video"].double() * family.schedules(pipe, 6)["video"].initial
    for step in steps:
        total += step.coefficient["video"] * recorder.guided[step.index]
    torch.testing.assert_close(clip.latents["video"].double(), total, rtol=1e-4, atol=1e-4)
    expected = [(step.index, step.component, branch) for step in steps for branch in ("cond", "uncond")]
    assert recorder.calls == expected


def test_the_second_expert_takes_over_below_the_boundary(build_tiny_wan: Build) -> None:
    pipe = build_tiny_wan(two_experts=True)
    family = family_of(pipe)
    plan = family.resolve(pipe, Request(**BASE, guidance=4.0, guidance_low_noise=3.0))
    steps = family.steps(pipe, plan)
    names = [step.component for step in steps]
    assert names == ["transformer" if step.timestep["video"] >= 900 else "transformer_2" for step in steps]
    assert set(names) == {"transformer", "transformer_2"} and names == sorted(names)
    assert {step.branches["cond"] for step in steps if step.component == "transformer"} == {4.0}
    assert {step.branches["uncond"] for step in steps if step.component == "transformer_2"} == {-2.0}
    assert family.components(pipe, "t2v") == ("transformer", "transformer_2")


@pytest.mark.parametrize("component", ["transformer", "transformer_2"])
def test_stack_says_what_a_block_takes_and_returns(build_tiny_wan: Build, component: str) -> None:
    pipe = build_tiny_wan(two_experts=True)
    assert_stack_is_what_runs(pipe, component, Request(**BASE))


def test_an_exception_leaves_the_pipeline_and_the_next_run_as_fresh(build_tiny_wan: Build) -> None:
    pipe, request = build_tiny_wan(), Request(**BASE)
    family = family_of(pipe)
    attributes = dict(vars(pipe))
    fresh: Clip = family.generate(pipe, request)
    wider = Request(**{**BASE, "width": 64})
    with pytest.raises(RuntimeError, match="broken step"):
        family.generate(pipe, wider, controllers={"test": Recorder(breaks_at=5)})
    assert {key: id(value) for key, value in vars(pipe).items()} == {k: id(v) for k, v in attributes.items()}
    assert torch.equal(family.generate(pipe, request).latents["video"], fresh.latents["video"])


@pytest.mark.parametrize("stage", ["encode", "decode"])
def test_a_run_in_the_middle_of_anothers_vae_disturbs_neither(build_tiny_wan: Build, stage: str) -> None:
    """What two threads do by chance, at a fixed place: the VAE's cache of frames belongs to one clip."""
    pipe = build_tiny_wan(image=True)
    family, requests = family_of(pipe), [Request(**BASE, first_frame=picture(n)) for n in range(2)]
    alone = [family.generate(pipe, request) for request in requests]
    runs = [family.start(pipe, request) for request in requests]
    if stage == "decode":
        for run in runs:
            run.make_latents()
    clips: list[Clip] = []

    def intrude(*_: Any) -> None:
        hook.remove()
        if stage == "encode":
            runs[1].make_latents()
        clips.append(runs[1].make_clip())

    place = pipe.vae.encoder.mid_block if stage == "encode" else pipe.vae.decoder.mid_block
    hook = place.register_forward_hook(intrude)
    if stage == "encode":
        runs[0].make_latents()
    clips.insert(0, runs[0].make_clip())
    for clip, expected in zip(clips, alone, strict=True):
        assert np.array_equal(clip.frames, expected.frames)


def test_cancel_stops_before_the_next_step(build_tiny_wan: Build) -> None:
    pipe, done = build_tiny_wan(), 0

    def count(progress: Progress) -> None:
        nonlocal done
        done = progress.done if progress.stage == "denoise" else done

    with pytest.raises(Cancelled, match="2 of 6"):
        family_of(pipe).generate(pipe, Request(**BASE), on_progress=count, cancel=lambda: done >= 2)
    assert done == 2


def test_lengths_snap_to_4n_plus_1(build_tiny_wan: Build) -> None:
    pipe = build_tiny_wan()
    resolve = family_of(pipe).resolve
    assert resolve(pipe, Request(prompt="a", seconds=5)).num_frames == 81
    assert resolve(pipe, Request(prompt="a", num_frames=10)).num_frames == 13
    plan = resolve(pipe, Request(prompt="a"))
    assert (plan.height, plan.width, plan.num_frames, plan.steps, plan.forwards) == (480, 832, 81, 50, 50)


@pytest.mark.parametrize(
    ("built", "asked", "line"),
    [
        ({}, {"first_frame": picture(0)}, "serves t2v, not i2v"),
        ({"image": True}, {}, "serves i2v, not t2v"),
        ({"image": True}, {"task": "i2v"}, "--first-frame"),
        ({}, {"task": "t2va"}, "did you mean 't2v'"),
        ({}, {"height": 40, "width": 32}, "multiple of 16, got 40; try 32"),
        ({}, {"height": 4096, "width": 4096}, "at most 3686400; try 1920x1920"),
        ({}, {"width": 32}, "together"),
        ({}, {"prompt": ""}, "prompt is empty"),
        ({}, {"negative_prompt": 7}, "negative prompt must be text"),
        ({}, {"references": "x.png"}, "must be a tuple of Reference"),
        ({"image": True}, {"first_frame": "x.png"}, "read_image"),
        ({}, {"prompt": "word " * 600}, "at most 512; shorten"),
        ({}, {"steps": 0}, "from 1 to 1000"),
        ({}, {"seconds": 99}, "at most 15 seconds"),
        ({}, {"num_frames": 0}, "positive whole number"),
        ({}, {"guidance": float("inf")}, "guidance"),
        ({}, {"guidance_low_noise": 2.0}, "one expert"),
    ],
)
def test_bad_requests_get_one_line(build_tiny_wan: Build, built: Any, asked: Any, line: str) -> None:
    pipe = build_tiny_wan(**built)
    with pytest.raises(UserError, match=line) as caught:
        family_of(pipe).start(pipe, Request(**{"prompt": "a red square", **asked}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("built", "without", "asked", "given"),
    [
        ({}, "transformer", {}, {}),
        ({}, "vae", {}, {}),
        ({}, "text_encoder", {}, {}),
        # The embeddings are the prompt's; guidance asks for those of the negative prompt too.
        ({}, "text_encoder", {}, {"prompt_embeds": torch.zeros(1, 512, 32)}),
        ({"two_experts": True}, "transformer_2", {}, {}),
        ({"image": True}, "vae", {"first_frame": picture(0)}, {"decode": False}),
        ({"image": True, "clip_encoder": True}, "image_encoder", {"first_frame": picture(0)}, {}),
    ],
)
def test_a_component_that_the_run_needs_is_asked_for_at_its_start(
    build_tiny_wan: Build, built: Any, without: str, asked: Any, given: Any
) -> None:
    pipe = build_tiny_wan(**built)
    setattr(pipe, without, None)
    with pytest.raises(UserError, match=f"{without}|no transformer is loaded"):
        family_of(pipe).start(pipe, Request(**BASE, **asked), **given)


def test_ftfy_is_asked_for_where_a_prompt_is_encoded(
    build_tiny_wan: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    pipe, embeds = build_tiny_wan(image=True), torch.zeros(1, 512, 32)
    family, request = family_of(pipe), Request(**BASE, first_frame=picture(0))
    for given in (None, embeds):
        with pytest.raises(UserError, match="pip install ftfy"):
            family.start(pipe, request, prompt_embeds=given)
    family.start(pipe, dataclasses.replace(request, guidance=1.0), prompt_embeds=embeds).encode()


def test_without_decoding_no_vae_is_needed(build_tiny_wan: Build) -> None:
    pipe, request = build_tiny_wan(), Request(**BASE)
    family = family_of(pipe)
    expected = family.generate(pipe, request).latents["video"]
    pipe.vae = None
    run = family.start(pipe, request, decode=False)
    run.make_latents()
    assert torch.equal(run.undecoded().latents["video"], expected)
