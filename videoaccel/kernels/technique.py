"""The kernels as a technique: chooses an implementation of each op, and has the family put them in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from videoaccel.config import AccelConfig, KernelsConfig, Section
from videoaccel.errors import UserError, unknown
from videoaccel.forward import Controller, ForwardCall
from videoaccel.kernels.compiling import BACKEND, CompileCount, compiled
from videoaccel.kernels.devices import live_profile
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.registry import EAGER, Choice, installed_packages, select
from videoaccel.receipt import Recorder

if TYPE_CHECKING:
    from videoaccel.pipelines.family import Family, Run
    from videoaccel.pipelines.fitting import Fitting, MakeTables
    from videoaccel.pipelines.request import StepInfo, Streams

_LOG = logging.getLogger(__name__)


class Kernels:
    """See `videoaccel.protocols.Technique`."""

    per_request = False

    def spends(self, section: Section) -> bool:
        """FP8 is another maths; all else computes the same."""
        return _of(section).precision == "fp8"

    def install(
        self, pipe: Any, family: Family, config: AccelConfig, section: Section, undo: ExitStack
    ) -> None:
        section = _of(section)
        fp8 = section.precision == "fp8"
        _check(section, config)
        place = torch.device(pipe._execution_device)
        device, packages = live_profile(place), installed_packages()
        fittings = family.fittings(pipe)
        known = {op for f in fittings for op in (*f.sizes, *(f.fp8_sizes if fp8 else ()))}
        unused = sorted(set(section.pin) - known)
        if unused:
            raise unknown("op to pin", unused[0], sorted(known))
        state = Installed(place)
        for fitting in fittings:
            fitting.check(fused=section.fuse, folded=section.fold)
            part = Part(fitting)
            if section.fuse:
                sizes = {**fitting.sizes, **(fitting.fp8_sizes if fp8 else {})}
                # Of what is compiled, torch writes the kernels, from the ops' own references.
                pins = {op: EAGER for op in sizes if section.compile and op != "attention"}
                pins |= section.pin
                part.choices = {
                    op: select(OPS[op], size, fitting.dtype, device, pinned=pins.get(op), packages=packages)
                    for op, size in sizes.items()
                }
                compiler = compiled if section.compile else None
                part.notes = fitting.fuse(part.choices, undo, fp8=fp8, compiled=compiler)
            if section.fold:
                part.fold = fitting.fold(undo)
            state.parts.update(dict.fromkeys(fitting.components, part))
        state.warn_once()
        # On the pipeline, where it goes with it; two pipelines are two states.
        vars(pipe)[_STATE] = state
        undo.callback(vars(pipe).pop, _STATE, None)

    def begin(self, run: Run, recorder: Recorder, section: Section) -> Controller | None:
        section = _of(section)
        _check(section, recorder.config)
        state: Installed = vars(run.pipe)[_STATE]
        if torch.device(run.pipe._execution_device) != state.place:
            raise UserError(
                f"kernels were chosen for {state.place}, and the pipeline is on {run.pipe._execution_device} "
                "now: remove() the acceleration, move the pipeline, and accelerate() it again"
            )
        folds: dict[str, MakeTables] = {}
        for component in dict.fromkeys(step.component for step in run.steps):
            part = state.parts[component]
            if getattr(run.pipe, component) is not part.fitting.transformer:
                raise UserError(
                    f"{component} was replaced since accelerate(): call remove(), and accelerate() again"
                )
            part.fitting.check(fused=section.fuse, folded=section.fold)
            for record in part.fitting.running(part.choices):
                if section.compile and record.op != "attention":
                    record = replace(record, impl=BACKEND, why="compiled with its block (kernels.compile)")
                recorder.kernel(record)
            for choice in part.choices.values():
                if choice.fallback is not None:
                    recorder.warn(choice.fallback)
            for note in part.notes:
                recorder.note(note)
            if part.fold is not None:
                folds[component] = part.fold
        if section.precision == "fp8":
            recorder.warn(FP8_WARNING)
        if section.compile:
            counter = CompileCount()
            counter.start()
            recorder.on_end(counter.stop)
            recorder.compiling(lambda: (counter.count, counter.seconds))
        return FoldedTables(run, recorder, folds) if folds else None


def _of(section: Section) -> KernelsConfig:
    if not isinstance(section, KernelsConfig):
        raise TypeError(f"kernels takes a KernelsConfig, not {type(section).__name__}")
    return section


def _check(section: KernelsConfig, config: AccelConfig) -> None:
    """Raises `UserError` for settings that contradict each other or the budget."""
    if not section.fuse and not section.fold:
        raise UserError("kernels with fuse and fold both off do nothing: use tier 'exact'")
    if not section.fuse and section.pin:
        raise UserError("kernels.pin is of no use without fuse: leave pin out, or set fuse: true")
    if section.compile:
        if not section.fuse:
            raise UserError("kernels.compile compiles the fused blocks: set fuse: true with it")
        if section.precision == "fp8" or any(op != "attention" for op in section.pin):
            raise UserError(
                "kernels.compile has torch write the kernels: leave out pin, but for attention, and precision"
            )
    if section.precision != "fp8":
        return
    if not section.fuse:
        raise UserError("kernels.precision fp8 quantises in the fused ops: set fuse: true with it")
    budget = config.budget()
    if min(budget.video, budget.audio) == 0:
        raise UserError(
            "kernels.precision fp8 is another precision than the model's: give a risk_budget that it may "
            "spend, such as 0.05"
        )


_STATE = "videoaccel_kernels"
FP8_WARNING = (
    "the blocks' linears run in FP8 (e4m3, a scale a row), whose error this version does not estimate: it is "
    "not in the risk spent"
)


class Part:
    """What was installed on one transformer.

    Attributes:
        fitting: how.
        choices: op to what it got.
        notes: what stays as it was, in words.
        fold: what makes its tables, see `Fitting.fold`.
    """

    def __init__(self, fitting: Fitting) -> None:
        self.fitting = fitting
        self.choices: dict[str, Choice] = {}
        self.notes: tuple[str, ...] = ()
        self.fold: MakeTables | None = None


class Installed:
    """What was installed on one pipeline.

    Attributes:
        place: the device that it was chosen for.
        parts: by component; one transformer under two names is one part.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.parts: dict[str, Part] = {}

    def warn_once(self) -> None:
        """Each fall below the device's best, in the log."""
        seen = dict.fromkeys(
            choice.fallback for part in self.parts.values() for choice in part.choices.values()
        )
        for sentence in seen:
            if sentence is not None:
                _LOG.warning(sentence)


class FoldedTables:
    """A request's controller: each of its forwards reads the tables of its step, made at the first one."""

    def __init__(self, run: Run, recorder: Recorder, folded: dict[str, MakeTables]) -> None:
        self._run, self._recorder, self._folded = run, recorder, folded
        self._using: dict[str, Callable[[int], AbstractContextManager[None]]] = {}

    @torch.no_grad()
    def velocity(self, call: ForwardCall) -> Streams:
        """The forward itself, with the step's tables in place."""
        component = call.step.component
        if component not in self._folded:
            return call.dense()
        if component not in self._using:
            self._using[component], held = self._folded[component](self._run)
            self._recorder.hold(held)
        with self._using[component](call.step.index):
            return call.dense()

    def after_step(self, step: StepInfo, latents: Streams) -> None:
        """Corrects nothing."""


KERNELS = Kernels()
