"""`videoaccel doctor`: which kernel each op gets on a device, why, at what cost, and what is amiss here."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from videoaccel.cli.inputs import quiet_libraries
from videoaccel.cli.values import filled
from videoaccel.cli.written import stops_name
from videoaccel.errors import UserError
from videoaccel.kernels.catalogue import CATALOGUE
from videoaccel.media import check_writable, write_json
from videoaccel.pipelines.registry import BUNDLED, DEFAULT_MODEL, FAMILIES

if TYPE_CHECKING:
    import torch

    from videoaccel.kernels.profile import DeviceProfile

FORMAT = 1
"""Of the JSON; a key that is renamed or taken away makes it another one."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LIVE = ("cpu", "cuda", "npu", "xpu", "mps")
"""What a device of this machine starts with; anything else is a name in the catalogue."""
ESTIMATE = (
    "shares and floors are an estimate from FLOPs and bytes against the device's stated peaks: what the "
    "listed ops take at best, not what a kernel reaches"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `doctor`."""
    parser.add_argument(
        "--device",
        type=filled,
        help=f"cpu, cuda, cuda:1, or a card to plan for: {', '.join(CATALOGUE)}; default: the accelerator of "
        "this machine if there is one",
    )
    family = BUNDLED[DEFAULT_MODEL]
    parser.add_argument(
        "--model",
        type=filled,
        default=family,
        metavar="FAMILY",
        help=f"{', '.join(FAMILIES)}, at its full size; default: {family}. The shares of a forward are an "
        "estimate from FLOPs and bytes",
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bf16", help="of the activations; default: bf16"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time every implementation that can run, on the card in the machine",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the tables")
    parser.add_argument("--out", type=filled, metavar="JSON", help="write the JSON to a file as well")


def run(args: argparse.Namespace) -> int:
    """Prints what was found; nothing found is an error. Bad input is refused before torch is imported."""
    if args.out is not None:
        check_writable(args.out, suffix=".json")
    report = examine(args)
    with stops_name({"report": args.out}):
        if args.out is not None:
            write_json(args.out, report)
        if args.json:
            print(json.dumps(report, indent=2, allow_nan=False))
            return 0
        from videoaccel.cli.doctor_table import show

        show(report)
        if args.out is not None:
            print(f"wrote {args.out}")
    return 0


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """The whole report, as docs/doctor.md describes it."""
    import torch

    from videoaccel.cli.doctor_ops import op_reports
    from videoaccel.cli.machine import this_machine
    from videoaccel.cli.setup_checks import setup_findings
    from videoaccel.environment import command_line, versions
    from videoaccel.pipelines.family import family_named

    family = family_named(args.model)
    device, place = find_device(args.device)
    if args.measure and (place is None or place.type != "cuda"):
        raise UserError(
            f"--measure times the card in the machine, and {device.name} is none; drop it, or run it there"
        )
    quiet_libraries()
    dtype: torch.dtype = getattr(torch, DTYPES[args.dtype])
    forward = family.forward_ops()
    machine = this_machine()
    reports = op_reports(forward, device, dtype, machine.packages)
    total = [report.floor.seconds for report in reports]
    whole = None if None in total else math.fsum(value or 0.0 for value in total)
    measured = None
    if args.measure and place is not None:
        from videoaccel.cli.doctor_measure import measurements

        with torch.cuda.device(place), torch.inference_mode():
            measured = list(measurements(reports, device, dtype, place))
    return {
        "format": FORMAT,
        "device": device_dict(device, live=place is not None),
        "model": {"family": args.model, "title": forward.title, "size": forward.size, "rows": forward.rows},
        "dtype": args.dtype,
        "ops": [report.to_dict() for report in reports],
        "forward": {
            "tflop": math.fsum(report.floor.work.flops for report in reports) / 1e12,
            "gb": math.fsum(report.floor.work.bytes for report in reports) / 1e9,
            "floor_ms": None if whole is None else whole * 1e3,
        },
        "setup": [vars(finding) for finding in setup_findings(machine, forward.weights * 2 / 1e9)],
        "measured": measured,
        "notes": notes_of(args, device, place, whole),
        "versions": versions(),
        "command": command_line(),
    }


def find_device(name: str | None) -> tuple[DeviceProfile, torch.device | None]:
    """The profile that a name means, and the device where it is one of this machine's.

    Raises:
        UserError: neither this machine nor the catalogue has it.
    """
    import torch

    from videoaccel.environment import device_name
    from videoaccel.kernels.devices import cpu_profile, device_named, live_profile
    from videoaccel.pipelines.loading import check_device, default_device

    if name is not None and name.partition(":")[0].lower() not in LIVE:
        return device_named(name), None
    place = default_device() if name is None else check_device(name.lower())
    if place.type == "cpu":
        return cpu_profile(name=device_name(place)), torch.device("cpu")
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
    args: argparse.Namespace, device: DeviceProfile, place: torch.device | None, floor: float | None
) -> list[str]:
    """What the reader must know of the figures."""
    notes = []
    if args.device is None and place is not None and place.type == "cpu":
        notes.append("this machine has no accelerator; give --device NAME for a card to plan for")
    if floor is not None:
        notes.append(ESTIMATE)
    elif args.dtype == "fp32":
        notes.append("no share of the forward: the catalogue has no float32 peaks; use --dtype bf16")
    else:
        notes.append(f"no share of the forward: no peaks and bandwidth are known for {device.name}")
    if place is None:
        notes.append("choices are with the packages installed here; the set-up is this machine's")
    return notes
