"""`videoaccel generate`: one clip from a prompt, as an mp4 with sound."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from videoaccel.cli.inputs import (
    add_model_arguments,
    canvas_note,
    check_files,
    check_outputs_spare_inputs,
    check_prompt,
    check_task,
    check_tiers,
    preflight,
    quiet_libraries,
    read_config,
    read_request,
    tier_help,
    with_canvas,
)
from videoaccel.cli.progress import ProgressReport
from videoaccel.cli.values import filled
from videoaccel.cli.written import failures_recorded, stops_name
from videoaccel.config import AccelConfig
from videoaccel.errors import UserError
from videoaccel.media import check_writable
from videoaccel.pipelines.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from videoaccel.runner import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `generate`."""
    parser.add_argument("prompt", help="what the clip shows, in words")
    parser.add_argument(
        "--reference",
        action="append",
        type=filled,
        default=[],
        metavar="FILE",
        help="image, video or sound; may be repeated",
    )
    parser.add_argument("--first-frame", type=filled, metavar="IMAGE", help="image the clip starts from")
    parser.add_argument("--last-frame", type=filled, metavar="IMAGE", help="image the clip ends on")
    add_model_arguments(parser, task="read off what is given; --reference means ref2va")
    parser.add_argument("--tier", help=f"{tier_help()}; default: exact")
    parser.add_argument(
        "--config", type=filled, metavar="YAML", help="an AccelConfig; --tier beats the one in it"
    )
    parser.add_argument(
        "-o", "--out", type=filled, default="clip.mp4", metavar="MP4", help="default: clip.mp4"
    )
    parser.add_argument(
        "--receipt",
        type=filled,
        metavar="JSON",
        help="also write the request's receipt, of a request that fails or is stopped too",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary")


def run(args: argparse.Namespace) -> int:
    """Makes the clip. Whatever can be refused is refused before the model's weights are read."""
    config = asked_config(args.config, args.tier)
    check_tiers([config.tier])
    check_task(args.task)
    check_prompt(args.prompt)
    out = check_writable(args.out, suffix=".mp4")
    if args.receipt:
        check_writable(args.receipt, suffix=".json")
    check_files(args)
    model = args.model or DEFAULT_MODEL
    inputs = [("--reference", path) for path in args.reference]
    inputs += [("--first-frame", args.first_frame), ("--last-frame", args.last_frame)]
    inputs += [("--config", args.config), ("--model", model)]
    check_outputs_spare_inputs({"-o": args.out, "--receipt": args.receipt}, inputs)

    with stops_name({"clip": out, "receipt": args.receipt}):
        report(args, out, make(args, config, model, out))
    return 0


def asked_config(path: str | None, tier: str | None) -> AccelConfig:
    """The config of `--config` and `--tier`; the flag's tier stands in for the file's.

    Raises:
        UserError: as `read_config`, or the tier and what the file sets don't go together.
    """
    if path is not None:
        return read_config(path, tier)
    return AccelConfig() if tier is None else AccelConfig(tier=tier)


def check_kernels(config: AccelConfig, model: str) -> None:
    """Refuses kernels, by a model's small files, for a family that takes none.

    Raises:
        UserError: as `Family.fittings`.
    """
    from videoaccel.pipelines.loading import family_for

    if "kernels" in config.sections():
        family_for(model).fittings(None)  # of a pipeline with nothing loaded: none, or a refusal


def make(args: argparse.Namespace, config: AccelConfig, model: str, out: Path) -> Outcome:
    """The request, run: its clip and its receipt written."""
    from videoaccel.install import accelerate
    from videoaccel.pipelines.loading import check_device, load
    from videoaccel.runner import run_request

    quiet_libraries()
    request = read_request(args)
    device = check_device(args.device)
    plan = preflight(model, request, args.res)
    check_kernels(config, model)
    with ProgressReport(enabled=not (args.quiet or args.json)) as progress:
        progress.stage("load")
        pipe = load(model, device=device, task=plan.task if plan is not None else request.task)
        with accelerate(pipe, config, model=model, weights="pretrained") as handle:
            request = with_canvas(handle.family, pipe, request, args.res)
            with failures_recorded(args.receipt):
                outcome = run_request(
                    handle,
                    request,
                    out=out,
                    on_progress=progress,
                    on_mux=lambda: progress.stage("mux"),
                    notes=canvas_note(request, args.res),
                )
    if args.receipt:
        try:
            outcome.receipt.save(args.receipt)
        except UserError as error:
            raise UserError(f"{error} (the clip is written: {out})") from error
    return outcome


def report(args: argparse.Namespace, out: Path, outcome: Outcome) -> None:
    """Prints what was made, as JSON or in words."""
    from videoaccel.runner import noise_digest

    receipt = outcome.receipt
    if args.json:
        made = {
            "output": str(out),
            "initial_noise_sha256": noise_digest(outcome.clip),
            "receipt": receipt.to_dict(),
        }
        print(json.dumps(made, indent=2, allow_nan=False))
    elif not args.quiet:
        times = receipt.timings
        sound = "with sound" if outcome.clip.audio is not None else "no sound"
        print(
            f"{out}: {receipt.frames} frames of {receipt.width}x{receipt.height}, "
            f"{receipt.frames / receipt.fps:.2f} s at {receipt.fps:g} fps, {sound}; {receipt.task}, "
            f"tier {receipt.tier_served}, {receipt.forwards.run} forwards, seed {receipt.seed}"
        )
        print(
            f"{times.total_s:.1f} s: encode {times.encode_s:.1f}, denoise {times.denoise_s:.1f}, "
            f"decode {times.decode_s:.1f}, mux {times.mux_s:.1f}"
        )
        for line in (*receipt.notes, *receipt.warnings):
            print(f"note: {line}")
