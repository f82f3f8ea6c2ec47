"""The kernels as a technique: chooses an implementation of each op, and has the family put them in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch

from videoaccel.config import AccelConfig, KernelsConfig, Section
from videoaccel.errors import UserError, unknown
from videoaccel.forward import Controller, ForwardCall
from videoaccel.kernels.devices import live_profile
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.registry import Choice, installed_packages, select
from videoaccel.receipt import Recorder

if TYPE_CHECKING:
    from videoaccel.pipelines.family import Family, Run
    from videoaccel.pipelines.fitting import MakeTables
    from videoaccel.pipelines.request import StepInfo, Streams

_LOG = logging.getLogger(__name__)


class Kernels:
    """See `videoaccel.protocols.Technique`. It computes the same, so it spends no risk."""

    spends_risk = False
    per_request = False

    def install(
        self, pipe: Any, family: Family, config: AccelConfig, section: Section, undo: ExitStack
    ) -> None:
        if not isinstance(section, KernelsConfig):
            raise TypeError(f"kernels takes a KernelsConfig, not {type(section).__name__}")
        device = live_profile(pipe._execution_device)
        packages = installed_packages()
        fittings = family.fittings(pipe)
        fp8 = section.precision == "fp8"
        if fp8 and not section.fuse:
            raise UserError("kernels.precision fp8 quantises in the fused ops: set fuse: true with it")
        known = {op for f in fittings for op in (*f.sizes, *(f.fp8_sizes if fp8 else ()))}
        unused = sorted(set(section.pin) - known)
        if unused:
            raise unknown("op to pin", unused[0], sorted(known))
        state = Installed()
        for fitting in fittings:
            choices = {
                op: select(
                    OPS[op], sizes, fitting.dtype, device, pinned=section.pin.get(op), packages=packages
                )
                for op, sizes in {**fitting.sizes, **(fitting.fp8_sizes if fp8 else {})}.items()
            }
            if section.fuse:
                state.notes += fitting.fuse(choices, undo, fp8=fp8)
                state.choices.update(dict.fromkeys(fitting.components, choices))
            elif section.pin:
                raise UserError("kernels.pin is of no use without fuse: leave pin out, or set fuse: true")
            if section.fold:
                state.folded.update(dict.fromkeys(fitting.components, fitting.fold(undo)))
        if fp8:
            state.notes += (FP8_NOTE,)
        state.warn_once()
        # On the pipeline, where it goes with it; two pipelines are two states.
        vars(pipe)[_STATE] = state
        undo.callback(vars(pipe).pop, _STATE, None)

    def begin(self, run: Run, recorder: Recorder, section: Section) -> Controller | None:
        state: Installed = vars(run.pipe)[_STATE]
        components = dict.fromkeys(step.component for step in run.steps)
        for component in components:
            for choice in state.choices.get(component, {}).values():
                recorder.kernel(choice.record())
                if choice.fallback is not None:
                    recorder.warn(choice.fallback)
        for note in state.notes:
            recorder.note(note)
        folded = {
            name: fold for name, fold in state.folded.items() if name in components and fold is not None
        }
        return FoldedTables(run, folded) if folded else None


_STATE = "videoaccel_kernels"
FP8_NOTE = (
    "the blocks' linears run in FP8 (e4m3, a scale a row): an error that no budget of this version books"
)


class Installed:
    """What was installed on one pipeline.

    Attributes:
        choices: component to op to what it got.
        folded: component to what makes its tables: see `Fitting.fold`.
        notes: what stays as it was, in words.
    """

    def __init__(self) -> None:
        self.choices: dict[str, dict[str, Choice]] = {}
        self.folded: dict[str, MakeTables | None] = {}
        self.notes: tuple[str, ...] = ()

    def warn_once(self) -> None:
        """Each fall below the device's best, in the log."""
        seen = dict.fromkeys(
            choice.fallback for choices in self.choices.values() for choice in choices.values()
        )
        for sentence in seen:
            if sentence is not None:
                _LOG.warning(sentence)


class FoldedTables:
    """A request's controller: each of its forwards reads the tables of its step, made at the first one."""

    def __init__(self, run: Run, folded: dict[str, MakeTables]) -> None:
        self._run, self._folded = run, folded
        self._using: dict[str, Callable[[int], AbstractContextManager[None]]] = {}

    @torch.no_grad()
    def velocity(self, call: ForwardCall) -> Streams:
        """The forward itself, with the step's tables in place."""
        component = call.step.component
        if component not in self._folded:
            return call.dense()
        if component not in self._using:
            self._using[component] = self._folded[component](self._run)
        with self._using[component](call.step.index):
            return call.dense()

    def after_step(self, step: StepInfo, latents: Streams) -> None:
        """Corrects nothing."""


KERNELS = Kernels()
