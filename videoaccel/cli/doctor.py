"""`videoaccel doctor`: which kernel each op gets on a device, why, at what cost, and what is amiss here."""

from __future__ import annotations

import argparse
import json

from videoaccel.cli.values import filled
from videoaccel.cli.written import stops_name
from videoaccel.kernels.catalogue import CATALOGUE
from videoaccel.media import check_writable, write_json
from videoaccel.pipelines.registry import BUNDLED, DEFAULT_MODEL, FAMILIES

DTYPES = ("bf16", "fp16", "fp32")


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
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the activations; default: bf16")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time every implementation that can run, on the card in the machine",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the tables")
    parser.add_argument("--out", type=filled, metavar="JSON", help="write the JSON to a file as well")


def run(args: argparse.Namespace) -> int:
    """Prints what was found; nothing that is found is an error of the command."""
    if args.out is not None:
        check_writable(args.out, suffix=".json")
    from videoaccel.cli.doctor_report import examine

    report = examine(args.model, args.device, args.dtype, measure=args.measure)
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
