"""A request's own shift and sigmas, and samplers without coefficients, on both families."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from videoaccel.errors import UserError
from videoaccel.forward import current_forward
from videoaccel.install import accelerate
from videoaccel.pipelines.family import ForwardCall, Request, Run, StepInfo, Streams, family_of

H3 = Request(prompt="a red square", steps=5, num_frames=22, height=64, width=64, seed=3)
WAN = Request(prompt="a red square", steps=4, num_frames=5, height=32, width=32, seed=3, guidance=4.0)
Build = Callable[..., Any]


def shifted(levels: list[float], shift: float) -> list[float]:
    """The published shift of a noise level: s x / (1 + (s - 1) x)."""
    return [shift * level / (1 + (shift - 1) * level) for level in levels]


def state_of(scheduler: Any) -> dict[str, str]:
    return {key: str(value) for key, value in vars(scheduler).items()}


def stock_latents(pipe: Any, request: Request, **more: Any) -> Streams:
    """What the stock call makes; the pipeline is a copy of one, so that its schedulers may be set."""
    generator = torch.Generator("cpu").manual_seed(request.seed)
    inputs: dict[str, Any] = {
        "prompt": request.prompt,
        "height": request.height,
        "width": request.width,
        "num_frames": request.num_frames,
        "num_inference_steps": request.steps,
        "generator": generator,
    }
    if family_of(pipe).name == "minimax_h3":
        state = pipe(**inputs, output_type="np")
        return {"video": state.get("latents"), "audio": state.get("audio_latents")}
    pipe.set_progress_bar_config(disable=True)
    return {"video": pipe(**inputs, guidance_scale=request.guidance, output_type="latent").frames}


def with_schedulers(pipe: Any, **shift: float) -> Any:
    """A shallow copy of an H3 pipeline with `set_shift` called on schedulers of its own."""
    other = copy.copy(pipe)
    for name, value in shift.items():
        setattr(other, name, copy.deepcopy(getattr(pipe, name)))
        getattr(other, name).set_shift(value)
    return other


def assert_equal(clip: Any, latents: Streams) -> None:
    for name, value in latents.items():
        assert torch.equal(clip.latents[name], value), name


def test_h3_runs_a_requests_shift_as_the_stock_pipeline_with_set_shift(tiny: Any) -> None:
    request = dataclasses.replace(H3, shift={"video": 6.0, "audio": 5.0})
    before = {name: state_of(getattr(tiny, name)) for name in ("scheduler", "audio_scheduler")}
    with accelerate(tiny) as handle:
        own, _ = handle.run(H3)
        clip, receipt = handle.run(request)
        only_sound, _ = handle.run(dataclasses.replace(H3, shift={"audio": 5.0}))
    assert {name: state_of(getattr(tiny, name)) for name in before} == before
    assert_equal(clip, stock_latents(with_schedulers(tiny, scheduler=6.0, audio_scheduler=5.0), H3))
    assert_equal(only_sound, stock_latents(with_schedulers(tiny, audio_scheduler=5.0), H3))
    assert not torch.equal(clip.latents["video"], own.latents["video"])
    assert receipt.shift == {"video": 6.0, "audio": 5.0} and receipt.sigmas == {}
    steps = family_of(tiny).steps(tiny, clip.plan)
    for stream, shift in request.shift.items():  # type: ignore[union-attr]
        levels = shifted([1, 0.75, 0.5, 0.25, 0], shift)
        assert [step.sigma[stream] for step in steps] == pytest.approx(levels[:-1], abs=1e-6)
        expected = [now - after for now, after in pairwise(levels)]
        assert [step.coefficient[stream] for step in steps] == pytest.approx(expected, abs=1e-6)


def test_h3_runs_a_requests_sigmas_as_they_stand(tiny: Any) -> None:
    family = family_of(tiny)
    # As the scheduler rounds them: the bits of the run must be the same, too.
    levels = family.schedules(tiny, 5, shift={"video": 6.0})["video"].sigmas
    sound = family.schedules(tiny, 5)["audio"].sigmas
    with accelerate(tiny) as handle:
        by_shift, _ = handle.run(dataclasses.replace(H3, shift={"video": 6.0}))
        video, _ = handle.run(dataclasses.replace(H3, steps=None, sigmas={"video": levels}))
        both, receipt = handle.run(dataclasses.replace(H3, sigmas={"video": list(levels), "audio": sound}))
        few, _ = handle.run(dataclasses.replace(H3, steps=None, sigmas={"video": [1.0, 0.9, 0.0]}))
    assert_equal(both, by_shift.latents)
    # With sigmas the steps are theirs, for the stream without any as well.
    assert_equal(video, by_shift.latents)
    assert receipt.sigmas == {"video": levels, "audio": sound}
    assert (few.plan.steps, few.plan.forwards) == (3, 2)
    steps = family.steps(tiny, few.plan)
    assert [step.coefficient["video"] for step in steps] == pytest.approx([0.1, 0.9], abs=1e-6)


def schedulers() -> dict[str, Callable[[float], Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    unipc = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    return {
        "euler": lambda shift: FlowMatchEulerDiscreteScheduler(shift=shift),
        "unipc": lambda shift: UniPCMultistepScheduler(flow_shift=shift, **unipc),
    }


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_wan_runs_a_requests_shift_and_sigmas(build_tiny_wan: Build, name: str) -> None:
    make = schedulers()[name]
    pipe = build_tiny_wan(scheduler=make(5.0))
    other = build_tiny_wan(scheduler=make(5.0))
    if name == "euler":
        other.scheduler.set_shift(3.0)
    else:  # it has no set_shift: diffusers says to make it from its config
        other.scheduler = type(other.scheduler).from_config(other.scheduler.config, flow_shift=3.0)
    before, family = state_of(pipe.scheduler), family_of(pipe)
    # UniPC moves a first level of 1 itself, by 1e-6.
    levels = (1.0, *family.schedules(pipe, 4, shift={"video": 3.0})["video"].sigmas[1:])
    with accelerate(pipe) as handle:
        clip, receipt = handle.run(dataclasses.replace(WAN, shift={"video": 3.0}))
        given, _ = handle.run(dataclasses.replace(WAN, steps=None, sigmas={"video": levels}))
        own, _ = handle.run(WAN)
    assert_equal(clip, stock_latents(other, WAN))
    assert_equal(given, clip.latents)
    assert not torch.equal(own.latents["video"], clip.latents["video"])
    assert state_of(pipe.scheduler) == before and receipt.shift == {"video": 3.0}
    assert given.plan.steps == given.plan.forwards == 4
    expected = family.schedules(other, 4)["video"].coefficients
    for plan in (clip.plan, given.plan):
        found = [step.coefficient["video"] for step in family.steps(pipe, plan)]
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"shift": {"vidoe": 3.0}}, "did you mean 'video'"),
        ({"shift": {"video": 0.0}}, "above 0, got 0.0"),
        ({"shift": {"video": "6"}}, "must be a number"),
        ({"sigmas": {"sound": [1.0, 0.0]}}, "known: video, audio"),
        ({"sigmas": {"video": [1.0, 0.5]}}, "to a final 0, got 1, 0.5"),
        ({"sigmas": {"video": [0.5, 0.7, 0.0]}}, "fall from at most 1"),
        ({"sigmas": {"video": [1.5, 0.7, 0.0]}}, "fall from at most 1"),
        ({"sigmas": {"video": [0.0]}}, "fall from at most 1"),
        ({"sigmas": {"video": "1, 0"}}, "a list of numbers"),
        ({"sigmas": {"video": [1.0, float("nan"), 0.0]}}, "must be a number"),
        ({"sigmas": {"video": [1.0, 0.0]}, "shift": {"video": 3.0}}, "give one of the two"),
        ({"sigmas": {"video": [1.0, 0.0], "audio": [1.0, 0.5, 0.0]}}, "equally many"),
        ({"sigmas": {"video": [1.0, 0.5, 0.0]}, "steps": 5}, "are 3 steps, not 5"),
    ],
)
def test_a_schedule_that_cannot_be_run_gets_one_line(tiny: Any, asked: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        family_of(tiny).resolve(tiny, dataclasses.replace(H3, **{"steps": None, **asked}))
    assert "\n" not in str(caught.value)


def test_a_scheduler_that_changes_what_it_is_given_is_refused(build_tiny_wan: Build) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    for scheduler in (
        FlowMatchEulerDiscreteScheduler(shift=5.0, use_karras_sigmas=True),
        UniPCMultistepScheduler(),
    ):
        pipe = build_tiny_wan(scheduler=scheduler)
        with pytest.raises(UserError, match=r"give a shift|leave out the shift"):
            family_of(pipe).schedules(pipe, 3, sigmas={"video": (0.9, 0.8, 0.3, 0.0)})


class Dense:
    """A controller that keeps what it was asked; `asks` makes it want the coefficients."""

    def __init__(self, run: Run, *, asks: bool) -> None:
        self.calls: list[ForwardCall] = []
        self.coefficients = [step.coefficient for step in run.steps] if asks else None

    def velocity(self, call: ForwardCall) -> Streams:
        self.calls.append(call)
        assert current_forward() is not None and current_forward().step is call.step  # type: ignore[union-attr]
        return call.dense()

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        return None


def test_a_sampler_that_draws_noise_runs_and_only_coefficients_are_refused(build_tiny_wan: Build) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = build_tiny_wan(scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0, stochastic_sampling=True))
    family = family_of(pipe)
    # Such a sampler draws from torch's own generator.
    torch.manual_seed(11)
    expected = stock_latents(pipe, WAN)
    torch.manual_seed(11)
    with accelerate(pipe) as handle:
        clip, _ = handle.run(WAN)
    assert_equal(clip, expected)
    run = family.start(pipe, WAN)
    torch.manual_seed(11)
    run.make_latents(controllers={"dense": Dense(run, asks=False)})
    assert torch.equal(run.latents["video"], expected["video"])
    with pytest.raises(UserError, match="no fixed step coefficients"):
        Dense(family.start(pipe, WAN), asks=True)


def test_each_guidance_branch_and_expert_is_a_forward_with_its_context(build_tiny_wan: Build) -> None:
    pipe = build_tiny_wan(two_experts=True)
    found: list[tuple[str, int, str]] = []

    def hook(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            call = current_forward()
            assert call is not None and call.step.component == name
            found.append((name, call.step.index, call.branch))

        return note

    hooks = [
        getattr(pipe, name).blocks[0].attn1.register_forward_pre_hook(hook(name))
        for name in ("transformer", "transformer_2")
    ]
    with accelerate(pipe) as handle:
        clip, receipt = handle.run(WAN)
    for each in hooks:
        each.remove()
    steps = family_of(pipe).steps(pipe, clip.plan)
    assert found == [(step.component, step.index, branch) for step in steps for branch in ("cond", "uncond")]
    assert {name for name, _, _ in found} == {"transformer", "transformer_2"}
    assert receipt.forwards.dense == 8


@pytest.mark.parametrize("family", ["minimax_h3", "wan"])
def test_the_stock_call_and_loop_that_are_timed_are_the_stock_ones(
    tiny: Any, build_tiny_wan: Build, family: str
) -> None:
    pipe, request = (tiny, H3) if family == "minimax_h3" else (build_tiny_wan(), WAN)
    expected = stock_latents(pipe, request)["video"]
    forwards: list[Any] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda *_: forwards.append(current_forward()))
    try:
        for whole in (True, False):
            run = family_of(pipe).start(pipe, request)
            if not whole:
                run.encode()
            seconds = run.stock_call() if whole else run.stock_loop()
            assert seconds is not None and seconds > 0
            # Four steps of one branch, or of two; no run of ours around any of them.
            assert forwards == [None] * (4 if family == "minimax_h3" else 8)
            forwards.clear()
    finally:
        hook.remove()
    assert torch.equal(stock_latents(pipe, request)["video"], expected)
