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

    The first row is a plain copy: what memory-bound ops can reach in practice. Each is timed alone, at the sizes of the op's heaviest call, with events on the card. One that fails gives
    its error in place of a time.
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
    source = torch.zeros(COPY_BYTES // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    milliseconds = timed(lambda: target.copy_(source))
    achieved = 2 * COPY_BYTES / 1e9 / (milliseconds / 1e3)
    ceiling = profile.bandwidth_gb_s
    return {
        "op": "copy",
        "impl": "torch",
        "ms": milliseconds,
        "achieved": achieved,
        "unit": "GB/s",
        "ceiling": ceiling,
        "of_ceiling": achieved / ceiling if ceiling else None,
        "error": None,
    }


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
    """One implementation's row."""
    row: dict[str, Any] = {"op": report.op, "impl": name, "ms": None, "achieved": None, "error": None}
    work = work_of(report.heaviest, dtype.itemsize)
    row |= {"unit": unit_of(work), "ceiling": ceiling_of(work, profile, dtype), "of_ceiling": None}
    if report.op not in SAMPLES:
        return row | {"error": "nobody has said what arguments to time it with"}
    try:
        arguments = SAMPLES[report.op](report.heaviest.sizes, Draw(dtype, device))
        milliseconds = timed(lambda: function(*arguments))
    except Exception as error:  # Compilers and drivers raise types of their own: the next row may still run.
        return row | {
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        }
    finally:
        arguments = ()
        torch.cuda.empty_cache()
    achieved = (work.flops / 1e12 if work.flops else work.bytes / 1e9) / (milliseconds / 1e3)
    of_ceiling = achieved / row["ceiling"] if row["ceiling"] else None
    return row | {"ms": milliseconds, "achieved": achieved, "of_ceiling": of_ceiling}


def unit_of(work: Work) -> str:
    """What an op is measured in."""
    return "TFLOP/s" if work.flops else "GB/s"


def ceiling_of(work: Work, profile: DeviceProfile, dtype: torch.dtype) -> float | None:
    """The card's own figure in that unit."""
    return peak_tflops(profile, dtype) if work.flops else profile.bandwidth_gb_s


def timed(call: Callable[[], Any]) -> float:
    """Median milliseconds of a call on the current CUDA device."""
    for _ in range(WARMUPS):
        call()
    torch.cuda.synchronize()
    spent: list[float] = []
    while len(spent) < LEAST or (len(spent) < MOST and sum(spent) < SECONDS * 1e3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end))
    return statistics.median(spent)
