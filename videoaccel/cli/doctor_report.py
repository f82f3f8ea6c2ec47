"""The report of `doctor` as plain data, as docs/doctor.md describes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from videoaccel.cli.doctor_ops import op_reports
from videoaccel.cli.inputs import quiet_libraries
from videoaccel.cli.machine import Machine, this_machine
from videoaccel.cli.setup_checks import setup_findings
from videoaccel.environment import command_line, device_name, versions
from videoaccel.errors import UserError
from videoaccel.kernels.devices import cpu_profile, device_named, live_profile
from videoaccel.kernels.profile import DeviceProfile
from videoaccel.pipelines.family import family_named
from videoaccel.pipelines.loading import check_device, default_device

FORMAT = 1
"""Of the JSON; a key that is renamed or taken away makes it another one."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIVE = ("cpu", "cuda", "npu", "xpu", "mps")
"""What a device of this machine starts with; anything else is a name in the catalogue."""
ESTIMATE = (
    "shares and floors are an estimate from FLOPs and bytes against the device's stated peaks: what the "
    "listed ops take at best, not what a kernel reaches"
)


def examine(
    model: str, device: str | None, dtype: str, *, measure: bool = False, machine: Machine | None = None
) -> dict[str, Any]:
    """The whole report.

    Args:
        model: a family.
        device: of this machine, or in the catalogue; None for this machine's own.
        dtype: of the activations, in `DTYPES`.
        measure: time what can run.
        machine: whose set-up is checked, and whose packages count; default: this one.

    Raises:
        UserError: no such family or device, or a device that isn't here was to be measured.
    """
    family = family_named(model)
    profile, place = find_device(device)
    if measure and (place is None or place.type != "cuda"):
        raise UserError(
            f"--measure times a CUDA or ROCm card in the machine, and {profile.name} is none; "
            "drop it, or run it there"
        )
    quiet_libraries()
    found = this_machine() if machine is None else machine
    forward = family.forward_ops()
    reports = op_reports(forward, profile, DTYPES[dtype], found.packages)
    seconds = [report.floor.seconds for report in reports]
    floor = None if None in seconds else math.fsum(value or 0.0 for value in seconds)
    measured = None
    if measure and place is not None:
        from videoaccel.cli.doctor_measure import measurements

        with torch.cuda.device(place), torch.inference_mode():
            measured = list(measurements(reports, profile, DTYPES[dtype], place))
    weights_gb = forward.weights * 2 / 1e9
    return {
        "format": FORMAT,
        "device": device_dict(profile, live=place is not None),
        "model": {"family": model, "title": forward.title, "size": forward.size, "rows": forward.rows},
        "dtype": dtype,
        "ops": [report.to_dict() for report in reports],
        "forward": {
            "tflop": math.fsum(report.floor.work.flops for report in reports) / 1e12,
            "gb": math.fsum(report.floor.work.bytes for report in reports) / 1e9,
            "floor_ms": None if floor is None else floor * 1e3,
            "weights_gb": weights_gb,
        },
        "setup": [asdict(finding) for finding in setup_findings(found, weights_gb)],
        "measured": measured,
        "notes": list(notes_of(profile, place, floor, dtype, weights_gb)),
        "versions": versions(),
        "command": command_line(),
    }


def find_device(name: str | None) -> tuple[DeviceProfile, torch.device | None]:
    """The profile that a name means, and the device where it is one of this machine's.

    Raises:
        UserError: neither this machine nor the catalogue has it.
    """
    if name is not None and name.partition(":")[0].lower() not in LIVE:
        return device_named(name), None
    place = default_device() if name is None else check_device(name.lower())
    if place.type == "cpu":
        return cpu_profile(name=device_name(place)), place
    return live_profile(place), place


def device_dict(device: DeviceProfile, *, live: bool) -> dict[str, Any]:
    """A profile as plain data."""
    return {
        "name": device.name,
        "live": live,
        "vendor": device.vendor,
        "arch": device.arch,
        "memory_gb": device.memory_gb or None,
        "bandwidth_gb_s": device.bandwidth_gb_s,
        "bf16_tflops": device.bf16_tflops,
        "fp8_tflops": device.fp8_tflops,
        "shared_memory_bytes": device.shared_memory,
        "link": device.link or None,
        "link_gb_s": device.link_gb_s,
        "p2p": device.p2p,
        "off": dict(device.off),
        "explicit": {op: list(names) for op, names in device.explicit.items()},
        "source": device.source,
    }


def notes_of(
    device: DeviceProfile, place: torch.device | None, floor: float | None, dtype: str, weights_gb: float
) -> Iterator[str]:
    """What the reader must know of the figures."""
    if place is not None and place.type == "cpu":
        yield "nothing here is planned for a CPU; give --device NAME for a card to plan for"
    elif floor is not None:
        yield ESTIMATE
    elif dtype == "fp32":
        yield "no share of the forward: the catalogue has no float32 peaks; use --dtype bf16"
    else:
        yield f"no share of the forward: no peaks or no bandwidth is known for {device.name}"
    if device.memory_gb and weights_gb > device.memory_gb:
        yield (
            f"the transformer's matrices alone are {weights_gb:.1f} GB in bf16, and {device.name} has "
            f"{device.memory_gb:.1f} GB: one card does not hold them"
        )
    if place is None:
        yield "choices are with the packages installed here, and the set-up is this machine's"
