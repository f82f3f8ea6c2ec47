"""A stream's schedule, and what each model output is worth on the final latent, read off the scheduler."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from videoaccel.errors import UserError


@dataclass(frozen=True, kw_only=True)
class StreamSchedule:
    """One stream's schedule and its linear map `x_final = a * x_initial + sum_i b_i * v_i`.

    The map is probed when it is first asked for: a schedule alone, as tier `exact` wants it, exists for
    samplers that have no such map, too. Asking such a sampler for it raises `UserError`.

    Attributes:
        timesteps: N values, one a forward.
        sigmas: N + 1 noise levels, the terminal one included.
        probe: computes the 2N + 1 numbers of the map.
    """

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    probe: Callable[[], tuple[float, ...]] = field(repr=False, compare=False)

    @functools.cached_property
    def _map(self) -> tuple[float, ...]:
        return self.probe()

    @property
    def coefficients(self) -> tuple[float, ...]:
        """b_i, N values. Euler: the sigma difference of the step, with the scheduler's own sign.

        A multistep scheduler (UniPC) uses an output in several updates; b_i is the sum over them.
        """
        return self._map[: len(self.timesteps)]

    @property
    def carries(self) -> tuple[float, ...]:
        """c_i, N values: what a change of the sample after step i is worth on the final latent. Euler: 1.

        A scheduler with a corrector (UniPC) starts each update from its own copy of an earlier sample and
        drops most of such a change.
        """
        return self._map[len(self.timesteps) : -1]

    @property
    def initial(self) -> float:
        """a, the weight of the initial sample."""
        return self._map[-1]


def own_scheduler(
    scheduler: Any, *, shift: float | None = None, sigmas: Sequence[float] | None = None
) -> Any:
    """A copy of `scheduler` for one run, with the run's own shift or noise levels.

    Args:
        scheduler: a diffusers scheduler.
        shift: what its `set_shift` is given; on a scheduler without one, its `flow_shift`.
        sigmas: N + 1 noise levels, the terminal 0 included, to run as they stand: `set_timesteps` of the copy
            gives these, whatever number it is asked for.

    Raises:
        UserError: the scheduler takes no shift, or doesn't run noise levels as given.
    """
    own = copy.deepcopy(scheduler)
    if shift is not None:
        _set_shift(own, shift)
    if sigmas is None:
        return own
    wanted = torch.tensor(sigmas, dtype=torch.float64)
    # The shift would be applied to given levels, too, by some schedulers.
    _set_shift(own, 1.0)
    # MiniMax-H3's scheduler wants the terminal 0 said, the flow-matching ones of diffusers add it.
    # UniPC computes on what it is given, so an array it is.
    for said in (np.array(sigmas, np.float64), np.array(sigmas[:-1], np.float64)):
        try:
            own.set_timesteps(sigmas=said)
        except (TypeError, ValueError):
            continue
        found = own.sigmas.double()
        # UniPC moves a first level of 1 by 1e-6, to stay clear of a logarithm of 0.
        if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=1e-5):
            own.set_timesteps = functools.partial(_set_given, own, said)
            return own
    raise UserError(f"{type(own).__name__} does not run sigmas as given; leave them out, or give a shift")


def _set_given(own: Any, sigmas: np.ndarray[Any, Any], *_: Any, device: Any = None) -> None:
    # A function of this module in a partial, so that a deep copy of the scheduler sets its own timesteps.
    type(own).set_timesteps(own, sigmas=sigmas, device=device)


def _set_shift(own: Any, shift: float) -> None:
    if hasattr(own, "set_shift"):
        own.set_shift(shift)
    elif "flow_shift" in own.config:
        own.register_to_config(flow_shift=shift)
    else:
        raise UserError(f"{type(own).__name__} has no shift to set; leave out the shift and the sigmas")


def stream_schedule(
    scheduler: Any,
    steps: int,
    *,
    shift: float | None = None,
    sigmas: Sequence[float] | None = None,
) -> StreamSchedule:
    """The schedule of one run; the scheduler itself is not touched.

    Args:
        scheduler: a diffusers scheduler with `set_timesteps` and `step`.
        steps: number of inference steps as the scheduler counts them.
        shift, sigmas: as for `own_scheduler`.

    Raises:
        UserError: as `own_scheduler`.
    """
    own = own_scheduler(scheduler, shift=shift, sigmas=sigmas)
    # Before set_timesteps: the probe starts from the same state as the run.
    kept = copy.deepcopy(own)
    own.set_timesteps(steps)
    count = len(own.timesteps)
    return StreamSchedule(
        timesteps=tuple(float(value) for value in own.timesteps.double()),
        sigmas=tuple(float(value) for value in own.sigmas.double())[: count + 1],
        probe=functools.partial(_probe, kept, steps),
    )


def _probe(scheduler: Any, steps: int) -> tuple[float, ...]:
    """The linear map of one run of `scheduler`.

    A deterministic sampler without thresholding is linear in its sample and its model outputs, whatever its
    order, so one run over unit vectors gives every coefficient: column i carries velocity 1 at step i and 0
    elsewhere, column N + i a sample changed by 1 after step i, and the last column the initial sample.
    Float64 but for what the scheduler itself rounds (diffusers' flow-matching Euler computes in float32).

    Raises:
        UserError: the scheduler adds noise or thresholds, so no such map exists.
    """
    name, config = type(scheduler).__name__, scheduler.config
    for key in ("thresholding", "stochastic_sampling"):
        if config.get(key, False):
            raise UserError(f"{name} with {key}=True has no fixed step coefficients; set it to False.")
    if "sde" in str(config.get("algorithm_type", "")):
        raise UserError(f"{name} with an SDE solver adds noise; use its ODE algorithm_type.")
    # Not every scheduler that draws noise says so in its config (FlowMatchLCM does not). What it draws here
    # must not move the generator that the run draws from.
    with torch.random.fork_rng(devices=[]):
        weights = _weights(copy.deepcopy(scheduler), steps)
        again = _weights(copy.deepcopy(scheduler), steps)
    if not torch.equal(weights, again):
        raise UserError(f"{name} adds noise at each step; use a deterministic scheduler.")
    return tuple(weights.tolist())


def _weights(scheduler: Any, steps: int) -> torch.Tensor:
    """`(2N + 1,)` float64: weights of N velocities, of N changes of the sample, and of the first sample."""
    scheduler.set_timesteps(steps)
    # As the stock loops do: looked up by value, two timesteps that round alike lose the scheduler its place.
    scheduler.set_begin_index(0)
    count = len(scheduler.timesteps)
    # (1, 1, 1, 1, 2N + 1) each: multistep schedulers index batch and channel axes.
    columns = torch.eye(2 * count + 1, dtype=torch.float64).view(-1, 1, 1, 1, 1, 2 * count + 1)
    sample = columns[-1]
    for index, timestep in enumerate(scheduler.timesteps):
        sample = scheduler.step(columns[index], timestep, sample, return_dict=False)[0].double()
        sample = sample + columns[count + index]
    return sample.flatten()
