"""`doctor --measure`: every implementation that the card in the machine can run, at the model's sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from videoaccel.cli.doctor_ops import OpReport, peak_tflops
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.profile import DeviceProfile
from videoaccel.kernels.registry import Implementation, installed_packages
from videoaccel.kernels.samples import SAMPLES, Draw
from videoaccel.kernels.work import Work, work_of

WARMUPS, LEAST, MOST, SECONDS = 2, 5, 50, 0.5
"""Calls before timing, and as many timed calls as fit the seconds, within these bounds."""
COPY_BYTES = 1 << 30
"""Beyond every cache."""


def measurements(
    reports: list[OpReport], profile: DeviceProfile, dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row for each implementation of each op that the card could run, as docs/doctor.md describes it.

    The first row is a plain copy: what an op that waits for memory can reach in practice. Each is timed
    alone, at the sizes of the op's heaviest call, with events on the card. One that fails gives its error in
    place of a time.
    """
    packages = installed_packages()
    yield copied(profile, dtype, device)
    for report in reports:
        sizes = report.heaviest.sizes
        if report.op not in OPS:
            yield measured(report, "torch", torch.nn.functional.linear, profile, dtype, device)
            continue
        for impl in OPS[report.op].implementations:
            if impl.needs.missing_on(profile) or impl.needs.missing_in(sizes, dtype, packages):
                continue
            yield measured(report, impl.name, loaded(impl), profile, dtype, device)


def copied(profile: DeviceProfile, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The row of a copy of `COPY_BYTES`, each read once and written once."""

    def arguments() -> tuple[Any, ...]:
        source = torch.zeros(COPY_BYTES // dtype.itemsize, dtype=dtype, device=device)
        return torch.empty_like(source), source

    work = Work(bytes=2.0 * COPY_BYTES)
    return row_of("copy", "torch", torch.Tensor.copy_, arguments, work, profile.bandwidth_gb_s)


def loaded(impl: Implementation) -> Callable[..., Any]:
    """The implementation, imported when it is first called, so that a failure to import is its own row's."""
    return lambda *arguments: impl.load()(*arguments)


def measured(
    report: OpReport,
    name: str,
    function: Callable[..., Any],
    profile: DeviceProfile,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """The row of one implementation of an op."""
    work = work_of(report.heaviest, dtype.itemsize)
    ceiling = peak_tflops(profile, dtype) if work.flops else profile.bandwidth_gb_s

    def arguments() -> tuple[Any, ...]:
        if report.op not in SAMPLES:
            raise ValueError(f"no arguments are known to time {report.op} with")
        return SAMPLES[report.op](report.heaviest.sizes, Draw(dtype, device))

    return row_of(report.op, name, function, arguments, work, ceiling)


def row_of(
    op: str,
    name: str,
    function: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    work: Work,
    ceiling: float | None,
) -> dict[str, Any]:
    """One row: the time of a function, and what that is in TFLOP/s, or in GB/s where it has no FLOPs."""
    row: dict[str, Any] = {"op": op, "impl": name, "ms": None, "achieved": None, "error": None}
    row |= {"unit": "TFLOP/s" if work.flops else "GB/s", "ceiling": ceiling, "of_ceiling": None}
    try:
        milliseconds = timed(function, arguments())
    except Exception as error:  # Compilers and drivers raise types of their own: the next row may still run.
        first = (str(error).splitlines() or [""])[0]
        return row | {"error": f"{type(error).__name__}: {first}"[:200]}
    finally:
        torch.cuda.empty_cache()
    achieved = (work.flops / 1e12 if work.flops else work.bytes / 1e9) / (milliseconds / 1e3)
    return row | {
        "ms": milliseconds,
        "achieved": achieved,
        "of_ceiling": achieved / ceiling if ceiling else None,
    }


def timed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Median milliseconds of a call on the current CUDA device."""
    for _ in range(WARMUPS):
        function(*arguments)
    torch.cuda.synchronize()
    spent: list[float] = []
    while len(spent) < LEAST or (len(spent) < MOST and sum(spent) < SECONDS * 1e3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function(*arguments)
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end))
    return statistics.median(spent)
