"""The H3 family against the stock diffusers call, on the bundled model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from videoaccel.errors import RequestError, UserError
from videoaccel.pipelines.family import (
    Cancelled,
    ForwardCall,
    Progress,
    Reference,
    Request,
    StepInfo,
    Streams,
    family_of,
)

from .conftest import assert_is_stock, assert_stack_is_what_runs, picture, stock_h3

SMALL: dict[str, Any] = {
    "prompt": "a red square bounces",
    "steps": 4,
    "num_frames": 22,
    "height": 64,
    "width": 96,
}


def ref_video(frames: int = 14) -> Reference:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (frames, 128, 128, 3), dtype=np.uint8)
    sound = torch.from_numpy(rng.standard_normal((2, 16000), dtype=np.float32)) * 0.1
    return Reference(kind="video", frames=pixels, fps=24.0, audio=sound, sample_rate=32000)


REQUESTS = {
    "t2va": Request(**SMALL, seed=3),
    "first": Request(**SMALL, seed=4, first_frame=picture(0)),
    "last": Request(**SMALL, seed=5, last_frame=picture(1)),
    "both": Request(**SMALL, seed=6, first_frame=picture(0), last_frame=picture(1, 50, 90)),
    "images": Request(
        **SMALL,
        seed=7,
        references=(
            Reference(kind="image", image=picture(2)),
            Reference(kind="image", image=picture(3, 64, 120)),
        ),
    ),
    "mixed": Request(
        **SMALL,
        seed=8,
        references=(
            ref_video(),
            Reference(kind="audio", audio=torch.ones(1, 8000) * 0.05),
            Reference(kind="image", image=picture(4)),
        ),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_dense_run_is_the_stock_call_bit_for_bit(tiny: Any, name: str) -> None:
    request = REQUESTS[name]
    clip = family_of(tiny).generate(tiny, request)
    assert_is_stock(clip, stock_h3(tiny, request))


@pytest.mark.parametrize("name", REQUESTS)
def test_layout_names_the_rows_the_stock_indices_address(tiny: Any, name: str) -> None:
    run = family_of(tiny).start(tiny, REQUESTS[name])
    run.encode()
    state, layout = run._state, run.layout  # type: ignore[attr-defined]

    def rows(*segments: Any) -> list[int]:
        return [row for segment in segments for row in range(segment.start, segment.stop)]

    conditions = layout.of("condition")
    video = [s for s in conditions if s.modality == "video"] + [layout.stream("video")]
    audio = [s for s in conditions if s.modality == "audio"] + [layout.stream("audio")]
    assert rows(*layout.of("text")) == state.get("text_indices").tolist()
    assert rows(*video) == state.get("video_indices").tolist()
    assert rows(*audio) == state.get("audio_indices").tolist()
    assert sum(s.rows for s in video[:-1]) == state.get("num_condition_video_rows")
    assert sum(s.rows for s in audio[:-1]) == state.get("num_condition_audio_rows")
    assert layout.rows == len(state.get("token_tags"))
    request = REQUESTS[name]
    given = len(request.references) or sum(f is not None for f in (request.first_frame, request.last_frame))
    assert len({s.index for s in conditions}) == given


def test_sound_at_another_rate_is_resampled_and_said(tiny: Any) -> None:
    def request(rate: int) -> Request:
        tone = torch.sin(torch.arange(rate // 2) * (2 * torch.pi * 440 / rate)).expand(2, -1)
        given = Reference(kind="audio", audio=tone, sample_rate=rate)
        return Request(**SMALL, references=(Reference(kind="image", image=picture(2)), given))

    family = family_of(tiny)
    runs = {rate: family.start(tiny, request(rate)) for rate in (32000, 48000)}
    for run in runs.values():
        run.encode()
    assert runs[32000].plan.notes == ()
    assert runs[48000].plan.notes == ("the sound of reference 2 was resampled from 48000 to 32000 Hz.",)
    assert runs[48000].layout == runs[32000].layout
    heard = {rate: run._state.get("audio_condition_latents")[0] for rate, run in runs.items()}  # type: ignore[attr-defined]
    assert torch.linalg.norm(heard[48000] - heard[32000]) < 0.3 * torch.linalg.norm(heard[32000])


def test_noise_is_the_cpu_generators_in_the_stock_order(tiny: Any) -> None:
    clip = family_of(tiny).generate(tiny, REQUESTS["t2va"])
    generator = torch.Generator("cpu").manual_seed(3)
    video = torch.randn(clip.latents["video"].shape, generator=generator)
    channels, width, length = clip.latents["audio"].shape
    audio = torch.randn(channels * length, width, generator=generator)
    assert torch.equal(clip.initial_noise["video"], video)
    assert torch.equal(clip.initial_noise["audio"], audio.view(channels, length, width).transpose(1, 2))


class Recorder:
    """A dense controller that keeps every velocity."""

    def __init__(self) -> None:
        self.velocities: list[Streams] = []

    def velocity(self, call: ForwardCall) -> Streams:
        found = call.dense()
        assert {name: value.shape for name, value in found.items()} == {
            name: value.shape for name, value in call.latents.items()
        }
        self.velocities.append({name: value.double().clone() for name, value in found.items()})
        return found

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        return None


@pytest.mark.parametrize("name", ["t2va", "both", "mixed"])
def test_a_dense_controller_changes_nothing_and_coefficients_rebuild_the_final_latent(
    tiny: Any, name: str
) -> None:
    family, recorder = family_of(tiny), Recorder()
    plain = family.generate(tiny, REQUESTS[name])
    run = family.start(tiny, REQUESTS[name])
    run.encode()
    state = run._state  # type: ignore[attr-defined]
    skip = {"video": state.get("num_condition_video_rows"), "audio": state.get("num_condition_audio_rows")}
    start = {
        "video": state.get("latents")[skip["video"] :].double().clone(),
        "audio": state.get("audio_latents")[skip["audio"] :].double().clone(),
    }
    buffers = {"video": state.get("latents"), "audio": state.get("audio_latents")}
    run.denoise(controllers={"test": recorder})
    for stream, buffer in buffers.items():
        assert torch.equal(run.latents[stream], plain.latents[stream])
        total = start[stream]
        for step, velocity in zip(run.steps, recorder.velocities, strict=True):
            total = total + step.coefficient[stream] * velocity[stream]
        # The loop writes the packed rows in place, so the buffer holds the scheduler's own result.
        torch.testing.assert_close(buffer[skip[stream] :].double(), total, rtol=1e-5, atol=1e-5)


def test_controller_can_replace_velocities_and_correct_the_sample(tiny: Any) -> None:
    class Zero(Recorder):
        def velocity(self, call: ForwardCall) -> Streams:
            return {name: torch.zeros_like(value) for name, value in call.latents.items()}

        def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
            return {"video": latents["video"] + 1.0} if step.index == 0 else None

    clip = family_of(tiny).generate(tiny, REQUESTS["mixed"], controllers={"test": Zero()})
    torch.testing.assert_close(clip.latents["audio"], clip.initial_noise["audio"])
    torch.testing.assert_close(clip.latents["video"], clip.initial_noise["video"] + 1.0)


def test_what_is_not_finite_ends_the_request(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Recorder):
        def velocity(self, call: ForwardCall) -> Streams:
            return {name: value * torch.nan for name, value in call.dense().items()}

    family = family_of(tiny)
    with pytest.raises(RequestError, match=r"not finite after 3 forwards.*damaged.*float32"):
        family.generate(tiny, REQUESTS["t2va"], controllers={"test": Broken()})
    # Finite latents can still break a half-precision decoder.
    decode = type(tiny.vae).decode
    monkeypatch.setattr(
        type(tiny.vae), "decode", lambda *args, **kwargs: (decode(*args, **kwargs)[0] * torch.nan,)
    )
    with pytest.raises(RequestError, match=r"decoded frames hold .* not finite.*damaged"):
        family.generate(tiny, REQUESTS["t2va"])


@pytest.mark.parametrize("build", ["h3", "wan"])
def test_stages_run_in_order_and_once(tiny: Any, build_wan: Any, build: str) -> None:
    if build == "h3":
        run = family_of(tiny).start(tiny, REQUESTS["t2va"])
    else:
        pipe, embeds = build_wan(), torch.zeros(1, 512, 32)
        request = Request(prompt="a boat", height=32, width=32, num_frames=5, steps=2, guidance=1.0)
        run = family_of(pipe).start(pipe, request, prompt_embeds=embeds)
    for early in (run.decode, run.denoise):
        with pytest.raises(UserError, match=r"encode\(\) is next"):
            early()
    with pytest.raises(UserError, match="no latents yet"):
        run.undecoded()
    run.encode()
    with pytest.raises(UserError, match=r"denoise\(\) is next, not encode\(\)"):
        run.encode()
    run.denoise()
    latents = run.latents["video"].clone()
    with pytest.raises(UserError, match=r"decode\(\) is next"):
        run.denoise()
    assert torch.equal(run.latents["video"], latents)
    run.decode()
    with pytest.raises(UserError, match=r"this run is over, not decode\(\)"):
        run.decode()


def test_progress_reports_every_stage_and_step_with_times(tiny: Any) -> None:
    seen: list[Progress] = []
    clip = family_of(tiny).generate(tiny, REQUESTS["t2va"], on_progress=seen.append)
    assert [(p.stage, p.done, p.total) for p in seen] == [
        ("encode", 0, 1),
        ("encode", 1, 1),
        ("denoise", 0, 3),
        ("denoise", 1, 3),
        ("denoise", 2, 3),
        ("denoise", 3, 3),
        ("decode", 0, 1),
        ("decode", 1, 1),
    ]
    assert [p.elapsed_s for p in seen] == sorted(p.elapsed_s for p in seen)
    assert len(clip.timings.step_s) == 3 and sum(clip.timings.step_s) <= clip.timings.denoise_s
    assert min(clip.timings.encode_s, clip.timings.decode_s, *clip.timings.step_s) > 0


@pytest.mark.parametrize("after", [0, 2])
def test_cancel_stops_before_the_next_step(tiny: Any, after: int) -> None:
    done = 0

    def count(progress: Progress) -> None:
        nonlocal done
        done = progress.done if progress.stage == "denoise" else done

    with pytest.raises(Cancelled):
        family_of(tiny).generate(tiny, REQUESTS["t2va"], on_progress=count, cancel=lambda: done >= after)
    assert done == after


def test_an_exception_at_step_five_leaves_the_next_run_as_fresh(tiny: Any) -> None:
    class Breaks(Recorder):
        def velocity(self, call: ForwardCall) -> Streams:
            if call.step.index == 5:
                raise RuntimeError("step five")
            return call.dense()

    family = family_of(tiny)
    before = {name: copy.deepcopy(vars(getattr(tiny, name))) for name in ("scheduler", "audio_scheduler")}
    attributes = set(vars(tiny))
    fresh = family.generate(tiny, REQUESTS["first"])
    long = Request(**{**SMALL, "steps": 9, "width": 64})
    with pytest.raises(RuntimeError, match="step five"):
        family.generate(tiny, long, controllers={"test": Breaks()})
    again = family.generate(tiny, REQUESTS["first"])
    assert np.array_equal(fresh.frames, again.frames)
    assert torch.equal(fresh.latents["video"], again.latents["video"])
    assert set(vars(tiny)) == attributes
    for name, state in before.items():
        now = vars(getattr(tiny, name))
        assert {key: str(value) for key, value in now.items()} == {
            key: str(value) for key, value in state.items()
        }


def test_two_interleaved_runs_of_one_pipeline_are_independent(tiny: Any) -> None:
    family = family_of(tiny)
    alone = [family.generate(tiny, REQUESTS[name]) for name in ("t2va", "images")]
    runs = [family.start(tiny, REQUESTS[name]) for name in ("t2va", "images")]

    def other_denoises(progress: Progress) -> None:
        if progress.done == 1:
            runs[1].denoise()

    for run in runs:
        run.encode()
    runs[0].denoise(on_progress=other_denoises)
    for run, clip in zip(runs, alone, strict=True):
        assert torch.equal(run.latents["video"], clip.latents["video"])
        assert torch.equal(run.latents["audio"], clip.latents["audio"])


def test_given_prompt_embeds_skip_the_text_encoder(tiny: Any) -> None:
    family = family_of(tiny)
    run = family.start(tiny, REQUESTS["t2va"])
    run.encode()
    embeds = run._state.get("prompt_embeds")  # type: ignore[attr-defined]
    bare = copy.copy(tiny)
    bare.text_encoder = bare.processor = None
    clip = family.generate(bare, REQUESTS["t2va"], prompt_embeds=embeds)
    assert np.array_equal(clip.frames, family.generate(tiny, REQUESTS["t2va"]).frames)
    with pytest.raises(UserError, match="text_encoder"):
        family.generate(bare, REQUESTS["t2va"])


def test_a_pipeline_pruned_to_one_workflow_serves_that_one_only(tiny: Any) -> None:
    pruned = copy.copy(tiny)
    pruned._blocks = tiny.blocks.get_workflow("t2va")
    family = family_of(pruned)
    clip = family.generate(pruned, REQUESTS["t2va"])
    assert_is_stock(clip, stock_h3(pruned, REQUESTS["t2va"]))
    with pytest.raises(UserError, match="workflow='ref2va'"):
        family.generate(pruned, REQUESTS["images"])


def test_stack_says_what_a_block_takes_and_returns(tiny: Any) -> None:
    family = family_of(tiny)
    for task, component in (("t2va", "transformer"), ("fl2va", "transformer"), ("ref2va", "transformer_ref")):
        assert family.components(tiny, task) == (component,)
        assert_stack_is_what_runs(
            tiny, component, REQUESTS[{"t2va": "t2va", "fl2va": "both"}.get(task, "images")]
        )
