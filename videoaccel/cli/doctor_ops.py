"""What `doctor` says of each op: the choice, what it costs at least, and its share of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.profile import DeviceProfile
from videoaccel.kernels.registry import Choice, select
from videoaccel.kernels.work import Floor, OpCall, floor_of, work_of
from videoaccel.pipelines.op_calls import ForwardOps

TORCH = {"linear": "matrix multiplications, AdaLN's projections among them"}
"""Ops that torch runs: nothing is to be chosen."""


@dataclass(frozen=True, kw_only=True)
class OpReport:
    """One op of a forward on a device.

    Attributes:
        op: its name.
        what: what it computes.
        calls: in one forward, in the order of the model, sizes that differ apart.
        heaviest: the call that takes most of it, whose sizes decide the choice.
        choice: see `select`; None for what torch runs.
        problem: why nothing can run it here; None where something can.
        floor: what all the calls take at least.
        share: of the floors of all ops of the forward; None where the device's figures don't say.
    """

    op: str
    what: str
    calls: tuple[OpCall, ...]
    heaviest: OpCall
    choice: Choice | None
    problem: str | None
    floor: Floor
    share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As docs/doctor.md describes it."""
        choice = self.choice
        fallback = None if choice is None else choice.fallback
        return {
            "op": self.op,
            "what": self.what,
            "impl": None if self.problem is not None else "torch" if choice is None else choice.impl.name,
            "why": self.problem
            or ("which runs every matrix multiplication here" if choice is None else choice.why),
            "rejected": [{"impl": r.impl, "why": r.why} for r in (choice.rejected if choice else ())],
            "better": None if fallback is None else fallback.removeprefix(f"{self.op}: "),
            "calls": sum(call.count for call in self.calls),
            "tflop": self.floor.work.flops / 1e12,
            "gb": self.floor.work.bytes / 1e9,
            "bound": self.floor.bound,
            "floor_ms": None if self.floor.seconds is None else self.floor.seconds * 1e3,
            "share": self.share,
        }


def peak_tflops(device: DeviceProfile, dtype: torch.dtype) -> float | None:
    """The device's matrix peak in a precision; the catalogue holds none for float32."""
    return device.bf16_tflops if dtype in (torch.bfloat16, torch.float16) else None


def op_reports(
    forward: ForwardOps,
    device: DeviceProfile,
    dtype: torch.dtype,
    packages: Mapping[str, str] | None = None,
) -> list[OpReport]:
    """Every op of a forward, the one that takes longest first where that is known.

    Args:
        forward: the model's.
        device: where.
        dtype: of the activations.
        packages: canonical names to versions; default: what is installed.
    """
    reports: list[OpReport] = []
    for name in (*OPS, *TORCH):
        calls = tuple(call for call in forward.calls if call.op == name)
        if calls:
            reports.append(_report(name, calls, device, dtype, packages))
    seconds = [report.floor.seconds for report in reports]
    known = [value for value in seconds if value is not None]
    if len(known) < len(reports) or not known:
        return reports
    shared = [
        dataclasses.replace(report, share=value / sum(known))
        for report, value in zip(reports, known, strict=True)
    ]
    return sorted(shared, key=lambda report: -(report.share or 0.0))


def _report(
    name: str,
    calls: tuple[OpCall, ...],
    device: DeviceProfile,
    dtype: torch.dtype,
    packages: Mapping[str, str] | None,
) -> OpReport:
    peak, element = peak_tflops(device, dtype), dtype.itemsize

    def weight(call: OpCall) -> tuple[float, float]:
        work = work_of(call, element)
        return call.count * work.flops, call.count * work.bytes

    heaviest = max(calls, key=weight)
    choice = problem = None
    if name in OPS:
        try:
            choice = select(OPS[name], heaviest.sizes, dtype, device, packages=packages)
        except UserError as error:
            problem = str(error)
    return OpReport(
        op=name,
        what=OPS[name].what if name in OPS else TORCH[name],
        calls=calls,
        heaviest=heaviest,
        choice=choice,
        problem=problem,
        floor=floor_of(calls, device, peak, element),
    )
