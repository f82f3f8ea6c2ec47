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
        initial: a, the weight of the initial sample.
    """

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    coefficients: tuple[float, ...]
    initial: float


def stream_schedule(
    scheduler: Any, steps: int | None = None, sigmas: Sequence[float] | None = None
) -> StreamSchedule:
    """Probe a copy of `scheduler` for the linear map of one run; the scheduler itself is not touched.

    A deterministic sampler without thresholding is linear in its sample and its model outputs, whatever its
    order, so one run over unit vectors gives every coefficient: column i carries velocity 1 at step i and 0
    elsewhere, and the last column carries the initial sample. Float64 throughout.

    Args:
        scheduler: a diffusers scheduler with `set_timesteps` and `step`.
        steps: number of inference steps as the scheduler counts them.
        sigmas: a custom schedule for `set_timesteps(sigmas=...)`, instead of `steps`.

    Raises:
        UserError: the scheduler adds noise or thresholds, so no such coefficients exist.
    """
    config = scheduler.config
    for key in ("thresholding", "stochastic_sampling"):
        if config.get(key, False):
            raise UserError(
                f"{type(scheduler).__name__} with {key}=True has no fixed step coefficients; set it to False."
            )
    if "sde" in str(config.get("algorithm_type", "")):
        raise UserError(
            f"{type(scheduler).__name__} with an SDE solver adds noise; use its ODE algorithm_type."
        )
    probe = copy.deepcopy(scheduler)
    if sigmas is not None:
        probe.set_timesteps(sigmas=list(sigmas))
    else:
        probe.set_timesteps(steps)
    timesteps = probe.timesteps
    count = len(timesteps)
    columns = torch.eye(count + 1, dtype=torch.float64).view(count + 1, 1, 1, 1, count + 1)
    # (1, 1, 1, 1, N + 1): multistep schedulers index batch and channel axes.
    sample = columns[count].unsqueeze(0)
    for index, timestep in enumerate(timesteps):
        sample = probe.step(columns[index].unsqueeze(0), timestep, sample, return_dict=False)[0].double()
    weights = sample.flatten().tolist()
    levels = [float(value) for value in probe.sigmas.double()]
    return StreamSchedule(
        timesteps=tuple(float(value) for value in timesteps.double()),
        sigmas=tuple(levels[: count + 1]),
        coefficients=tuple(weights[:count]),
        initial=weights[count],
    )
