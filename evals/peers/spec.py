"""What a sweep needs to know of a peer: its one knob, the values to try, and how to make it for a clip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.lockstep import Job, Lockstep
from evals.world.spec import ClipSpec
from videoaccel.forward import Controller

Make = Callable[[float, Any], Controller | None]
"""Knob value and calibration to a fresh controller; None where the schedule alone is the peer."""
Calibrate = Callable[[Lockstep, Sequence[ClipSpec], int], Any]


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """One peer.

    Attributes:
        name: in results.
        knob: what is swept: `forwards` (of the schedule), `threshold`, `interval`, or `dense` (steps that
            run).
        values: of the knob, from gentle to hard; as many for each peer.
        make: its controller for one clip.
        settings: everything else it is set to, for the result file.
        calibrate: what it learns from dense clips before the sweep; None for most. Called with the harness,
            clips that take no part in the sweep, and the schedule's forwards.
    """

    name: str
    knob: str
    values: tuple[float, ...]
    make: Make
    settings: Mapping[str, Any] = field(default_factory=dict)
    calibrate: Calibrate | None = None

    def job(self, spec: ClipSpec, value: float, *, forwards: int = 49, calibration: Any = None) -> Job:
        """One clip at one value of the knob.

        Args:
            forwards: of the dense schedule; a peer whose knob this is sets its own.
            calibration: what `calibrate` returned for this schedule.

        Raises:
            ValueError: this peer wants a calibration.
        """
        if self.calibrate is not None and calibration is None:
            raise ValueError(f"{self.name} wants what its calibrate() returns for {forwards} forwards")
        controller = self.make(value, calibration)
        return Job(
            spec=spec,
            forwards=int(value) if self.knob == "forwards" else forwards,
            controllers={} if controller is None else {self.name: controller},
        )
