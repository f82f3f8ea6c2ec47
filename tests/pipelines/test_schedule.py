"""Step coefficients: closed forms, custom sigmas, and what has none."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.family import family_of, stream_schedule


@pytest.mark.parametrize("shift", [12.0, 6.0, 3.0, 1.0])
@pytest.mark.parametrize("steps", [2, 8, 50])
def test_h3_coefficients_are_the_sigma_differences(shift: float, steps: int) -> None:
    from diffusers import MiniMaxH3Scheduler

    found = stream_schedule(MiniMaxH3Scheduler(shift), steps)
    # The published grid, in float64: linspace(1, 0, N) through s*x / (1 + (s-1)*x).
    grid = torch.linspace(1, 0, steps, dtype=torch.float64)
    sigmas = (shift * grid / (1 + (shift - 1) * grid)).tolist()
    assert len(found.timesteps) == len(found.coefficients) == steps - 1
    assert found.sigmas == pytest.approx(sigmas, abs=1e-6)
    # x_next = x + (sigma - sigma_next) * v, v pointing at the data.
    expected = [now - after for now, after in pairwise(sigmas)]
    assert found.coefficients == pytest.approx(expected, abs=1e-6)
    assert found.initial == pytest.approx(1.0, abs=1e-12)
    assert sum(found.coefficients) == pytest.approx(1.0, abs=1e-6)


def test_a_set_shift_and_custom_sigmas_count_and_the_pipelines_schedulers_do_not_change(tiny: Any) -> None:
    pipe, family = copy.copy(tiny), family_of(tiny)
    pipe.scheduler = copy.deepcopy(tiny.scheduler)
    stock = family.schedules(pipe, 9)["video"]
    pipe.scheduler.set_shift(3.0)
    before = dict(vars(pipe.scheduler))
    assert (
        family.schedules(pipe, 9)["video"].sigmas == family.schedules(tiny, 9)["audio"].sigmas != stock.sigmas
    )
    levels = [1.0, 0.7, 0.4, 0.0]
    custom = family.schedules(pipe, 9, sigmas={"video": levels, "audio": levels})["video"]
    assert custom.coefficients == pytest.approx([0.3, 0.3, 0.4], abs=1e-6)
    assert dict(vars(pipe.scheduler)) == before
    with pytest.raises(UserError, match="other sigmas"):
        family.schedules(pipe, 9, sigmas={"video": levels})


def test_euler_flow_coefficients_have_the_schedulers_sign() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    found = stream_schedule(FlowMatchEulerDiscreteScheduler(shift=5.0), 10)
    # x_next = x + (sigma_next - sigma) * v, v pointing at the noise.
    expected = [after - now for now, after in pairwise(found.sigmas)]
    assert found.coefficients == pytest.approx(expected, abs=1e-6)


def test_a_multistep_output_counts_in_every_update_it_enters() -> None:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    found = stream_schedule(scheduler, 8)
    euler = [after - now for now, after in pairwise(found.sigmas)]
    assert found.coefficients != pytest.approx(euler, rel=0.05)
    generator = torch.Generator().manual_seed(0)
    scheduler.set_timesteps(8)
    start = sample = torch.randn(1, 4, 2, 3, 3, generator=generator)
    total = found.initial * start.double()
    for timestep, weight in zip(scheduler.timesteps, found.coefficients, strict=True):
        velocity = torch.randn(sample.shape, generator=generator)
        sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0]
        total += weight * velocity.double()
    torch.testing.assert_close(sample.double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_carry_is_what_reaches_the_final_latent_of_a_change_after_a_step(name: str) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    scheduler = {
        "euler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "unipc": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
    }[name]
    generator = torch.Generator().manual_seed(0)
    start, *velocities = torch.randn(9, 1, 4, 2, 3, 3, generator=generator, dtype=torch.float64)

    def final(changed_after: int | None) -> torch.Tensor:
        own, sample = copy.deepcopy(scheduler), start
        own.set_timesteps(8)
        for index, timestep in enumerate(own.timesteps):
            sample = own.step(velocities[index], timestep, sample, return_dict=False)[0]
            sample = sample + (1.0 if index == changed_after else 0.0)
        return sample

    carries = stream_schedule(scheduler, 8).carries
    for index, carry in enumerate(carries):
        torch.testing.assert_close(
            final(index) - final(None), torch.full_like(start, carry), rtol=0, atol=1e-5
        )
    assert carries[-1] == pytest.approx(1.0)
    # Why it is told at all: Euler keeps a correction, UniPC's corrector throws most of it away.
    assert min(carries) == pytest.approx(1.0) if name == "euler" else min(carries) < 0.1


def test_timesteps_that_round_alike_keep_their_place() -> None:
    """UniPC rounds timesteps to whole numbers: of a thousand, many are equal. Stock loops go by index."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    found = stream_schedule(scheduler, 1000)
    assert len(set(found.timesteps)) < len(found.timesteps) == 1000
    scheduler.set_timesteps(1000)
    scheduler.set_begin_index(0)
    generator = torch.Generator().manual_seed(0)
    start = sample = torch.randn(1, 4, 1, 2, 2, generator=generator, dtype=torch.float64)
    total = found.initial * start
    for timestep, weight in zip(scheduler.timesteps, found.coefficients, strict=True):
        velocity = torch.randn(sample.shape, generator=generator, dtype=torch.float64)
        sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0]
        total += weight * velocity
    torch.testing.assert_close(sample.double(), total, rtol=1e-4, atol=1e-4)


def test_samplers_that_add_noise_or_threshold_have_a_schedule_and_no_coefficients() -> None:
    from diffusers import (
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
        FlowMatchLCMScheduler,
        UniPCMultistepScheduler,
    )

    for scheduler in (
        FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        UniPCMultistepScheduler(thresholding=True),
        DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
        FlowMatchLCMScheduler(shift=5.0),
    ):
        found = stream_schedule(scheduler, 4)
        assert len(found.timesteps) == 4 and list(found.sigmas) == sorted(found.sigmas, reverse=True)
        before = torch.get_rng_state()
        for _ in range(2):
            with pytest.raises(UserError):
                _ = found.coefficients
        assert torch.equal(torch.get_rng_state(), before), "asking moves no generator that a run draws from"
