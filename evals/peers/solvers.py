"""Fewer steps with a multistep solver: diffusers' own schedulers, along the model's own noise levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

from videoaccel.forward import ForwardCall
from videoaccel.pipelines.request import StepInfo, Streams
from videoaccel.pipelines.schedule import own_scheduler

NEAR_ONE = 1 - 1e-6
"""The first noise level, kept clear of a logarithm of 0 as diffusers' UniPC does."""


def dpm_solver(sigmas: Sequence[float]) -> Any:
    """DPM-Solver++(2M), set to run N + 1 noise levels, the terminal 0 included."""
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(len(sigmas) - 1)
    # It makes levels of its own and takes none; a run reads them off this attribute alone.
    scheduler.sigmas = torch.tensor([min(sigma, NEAR_ONE) for sigma in sigmas])
    scheduler.set_begin_index(0)
    return scheduler


def unipc(sigmas: Sequence[float]) -> Any:
    """UniPC of second order, set to run N + 1 noise levels, the terminal 0 included."""
    scheduler = UniPCMultistepScheduler(
        solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
    )
    own = own_scheduler(scheduler, sigmas=sigmas)
    own.set_timesteps(len(sigmas) - 1)
    own.set_begin_index(0)
    return own


class Solver:
    """Runs every step, and answers with the velocity that takes Euler's step to where the solver would go.

    Args:
        build: noise levels to a scheduler that is set to run them.
    """

    def __init__(self, build: Callable[[Sequence[float]], Any]) -> None:
        self._build = build
        self._schedulers: dict[str, Any] = {}

    def velocity(self, call: ForwardCall) -> Streams:
        """One forward; each stream has a solver of its own."""
        step = call.step
        answers: Streams = {}
        for stream, velocity in call.dense().items():
            if stream not in self._schedulers:
                self._schedulers[stream] = self._build(step.schedules[stream].sigmas)
            scheduler, x = self._schedulers[stream], call.latents[stream]
            # (1, L, C), as diffusers has it; and its velocities point to the noise, MiniMax-H3's to the data.
            time = scheduler.timesteps[step.index]
            after = scheduler.step(-velocity[None], time, x[None].clone(), return_dict=False)[0][0]
            answers[stream] = (after - x) / (step.sigma[stream] - step.sigma_next[stream])
        return answers

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """None."""
        return None
