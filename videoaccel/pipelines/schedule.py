"""What each model output is worth on the final latent, read off the scheduler itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from videoaccel.errors import UserError


@dataclass(frozen=True, kw_only=True)
class StreamSchedule:
    """One stream's schedule and its linear map `x_final = a * x_initial + sum_i b_i * v_i`.

    Attributes:
        timesteps: N values, one a forward.
        sigmas: N + 1 noise levels, the terminal one included.
        coefficients: b_i, N values. Euler: the sigma difference of the step, with the scheduler's own sign.
            A multistep scheduler (UniPC) uses an output in several updates; b_i is the sum over them.
        carries: c_i, N values: what a change of the sample after step i is worth on the final latent. 1 for
            Euler. A scheduler with a corrector (UniPC) starts each update from its own copy of an earlier
            sample and drops most of such a change.
        initial: a, the weight of the initial sample.
    """

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    coefficients: tuple[float, ...]
    carries: tuple[float, ...]
    initial: float


def stream_schedule(
    scheduler: Any, steps: int | None = None, sigmas: Sequence[float] | None = None
) -> StreamSchedule:
    """Probe a copy of `scheduler` for the linear map of one run; the scheduler itself is not touched.

    A deterministic sampler without thresholding is linear in its sample and its model outputs, whatever its
    order, so one run over unit vectors gives every coefficient: column i carries velocity 1 at step i and 0
    elsewhere, column N + i a sample changed by 1 after step i, and the last column the initial sample.
    Float64 but for what the scheduler itself rounds (diffusers' flow-matching Euler computes in float32).

    Args:
        scheduler: a diffusers scheduler with `set_timesteps` and `step`.
        steps: number of inference steps as the scheduler counts them.
        sigmas: a custom schedule for `set_timesteps(sigmas=...)`, instead of `steps`.

    Raises:
        UserError: the scheduler adds noise or thresholds, so no such coefficients exist, or it can't run that
            many steps.
    """
    name, config = type(scheduler).__name__, scheduler.config
    for key in ("thresholding", "stochastic_sampling"):
        if config.get(key, False):
            raise UserError(f"{name} with {key}=True has no fixed step coefficients; set it to False.")
    if "sde" in str(config.get("algorithm_type", "")):
        raise UserError(f"{name} with an SDE solver adds noise; use its ODE algorithm_type.")
    probe = copy.deepcopy(scheduler)
    again = copy.deepcopy(scheduler)
    try:
        weights = _weights(probe, steps, sigmas)
        # Not every scheduler that draws noise says so in its config (FlowMatchLCM does not).
        if not torch.equal(weights, _weights(again, steps, sigmas)):
            raise UserError(f"{name} adds noise at each step; use a deterministic scheduler.")
    except (AssertionError, IndexError) as error:
        # UniPC rounds timesteps to whole numbers and loses its place once two of them are equal.
        raise UserError(f"{name} cannot run {steps} steps; use fewer.") from error
    count = len(probe.timesteps)
    values = weights.tolist()
    levels = [float(value) for value in probe.sigmas.double()]
    return StreamSchedule(
        timesteps=tuple(float(value) for value in probe.timesteps.double()),
        sigmas=tuple(levels[: count + 1]),
        coefficients=tuple(values[:count]),
        carries=tuple(values[count : 2 * count]),
        initial=values[-1],
    )


def _weights(scheduler: Any, steps: int | None, sigmas: Sequence[float] | None) -> torch.Tensor:
    """`(2N + 1,)` float64: weights of N velocities, of N changes of the sample, and of the first sample."""
    if sigmas is not None:
        scheduler.set_timesteps(sigmas=list(sigmas))
    else:
        scheduler.set_timesteps(steps)
    count = len(scheduler.timesteps)
    # (1, 1, 1, 1, 2N + 1) each: multistep schedulers index batch and channel axes.
    columns = torch.eye(2 * count + 1, dtype=torch.float64).view(-1, 1, 1, 1, 1, 2 * count + 1)
    sample = columns[-1]
    for index, timestep in enumerate(scheduler.timesteps):
        sample = scheduler.step(columns[index], timestep, sample, return_dict=False)[0].double()
        sample = sample + columns[count + index]
    return sample.flatten()
