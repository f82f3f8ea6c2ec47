"""`videoaccel bench`: clips an hour, latency, stage times and memory, in a closed loop on one device."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from videoaccel.cli.inputs import (
    add_model_arguments,
    check_outputs_spare_inputs,
    check_task,
    check_tiers,
    preflight,
    quiet_libraries,
    with_canvas,
)
from videoaccel.cli.latency import P95_NEEDS
from videoaccel.cli.values import MAX_WHOLE, Resolution, filled, names, whole
from videoaccel.cli.written import stops_name
from videoaccel.config import AccelConfig
from videoaccel.errors import UserError
from videoaccel.media import check_writable, write_json
from videoaccel.pipelines.registry import BUNDLED, DEFAULT_MODEL, FAMILIES

if TYPE_CHECKING:
    import torch

    from videoaccel.pipelines.family import Family, FullSize
    from videoaccel.pipelines.request import Request

PROMPT = "A red ball bounces on a wooden floor while the camera pans slowly to the left."
TEXT_ROWS = 256
REQUESTS_BUNDLED = P95_NEEDS
REQUESTS = 2
"""The default of a model that may take minutes a clip."""
DENSE_MARGIN = 1.03
"""The dense row may take at most this many times what bare diffusers takes; beyond it the report says so."""


def gigabytes(full: FullSize, seconds: float, res: Resolution) -> float:
    """Decimal GB that a full-size model needs at a length and a canvas; a short edge keeps its own shape."""
    if res.width is not None and res.height is not None:
        return full.gigabytes(seconds, res.width * res.height)
    own = min(full.height, full.width)
    return full.gigabytes(seconds, full.height * full.width * ((res.short_edge or own) / own) ** 2)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What will be measured.

    Attributes:
        model: name or path for `load`, and for the report.
        weights: "pretrained" or "random".
        res: canvas, None for the model's own.
        seconds: length, None for the model's own.
        notes: what differs from what was asked.
    """

    model: str
    weights: str
    res: Resolution | None
    seconds: float | None
    notes: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench`."""
    add_model_arguments(parser, task="the model's text-to-video task")
    parser.add_argument(
        "--weights",
        choices=["pretrained", "random"],
        help=f"random: full-size {FAMILIES[BUNDLED[DEFAULT_MODEL]].title} built on the device",
    )
    parser.add_argument("--tiers", type=names, default=["exact"], help="comma-separated; default: exact")
    parser.add_argument(
        "--requests",
        type=whole(1),
        help=f"timed requests a tier, a p95 needs {P95_NEEDS}; default: {REQUESTS_BUNDLED} of the bundled "
        f"model, {REQUESTS} of another",
    )
    parser.add_argument(
        "--inflight", type=whole(1), default=1, help="requests in the system at once; default: 1"
    )
    parser.add_argument("--warmup", type=whole(0), default=1, help="whole requests before timing; default: 1")
    parser.add_argument("--no-bare", action="store_true", help="leave out the comparison with bare diffusers")
    parser.add_argument(
        "--out", type=filled, default="bench.json", metavar="JSON", help="default: bench.json"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def choose(args: argparse.Namespace, device: torch.device) -> Target:
    """The bundled model's family at full size where it fits, else the bundled model itself, saying so.

    Raises:
        UserError: random weights were asked for on a device that can't hold them.
    """
    from videoaccel.pipelines.loading import family_for

    full = family_for(DEFAULT_MODEL).full_size()
    length = args.seconds or full.seconds
    res = args.res or Resolution(min(full.height, full.width), None, None)
    need = gigabytes(full, length, res)
    free = free_gb(device)
    if args.weights == "random":
        if args.model is not None:
            raise UserError(f"--weights random builds {full.title} and takes no --model; drop one of them")
        if free < need:
            raise UserError(
                f"--weights random needs about {need:.0f} GB and {device} has {free:.0f} GB free; "
                "drop it to measure the bundled model"
            )
    elif args.model is not None:
        return Target(model=args.model, weights="pretrained", res=args.res, seconds=args.seconds)
    if free >= need and args.weights != "pretrained":
        return Target(model=full.title, weights="random", res=res, seconds=length)
    if device.type == "cpu":
        why = "no accelerator"
    elif free < need:
        why = f"{device} has {free:.0f} GB free of the {need:.0f} GB needed"
    else:
        why = "pretrained weights without --model"
    asked = f", not {args.res}" if args.res is not None else ""
    bundled = f"the bundled {DEFAULT_MODEL} at its own canvas{asked}"
    note = f"{why}: this measures {bundled}, not the full-size model"
    return Target(model=DEFAULT_MODEL, weights="pretrained", res=None, seconds=args.seconds, notes=(note,))


def check_seeds(args: argparse.Namespace) -> None:
    """Refuses a first seed from which the requests, warm-up among them, would count past the largest one."""
    most = MAX_WHOLE - (max(args.requests, args.warmup) - 1)
    if args.seed > most:
        raise UserError(
            f"--seed {args.seed} is too large for {max(args.requests, args.warmup)} requests, whose seeds "
            f"count up from it: give {most} at most"
        )


def free_gb(device: torch.device) -> float:
    """Free memory of a CUDA device, decimal GB; 0 for a CPU, which no full-size run is offered on."""
    import torch

    return torch.cuda.mem_get_info(device)[0] / 1e9 if device.type == "cuda" else 0.0


def synthetic_request(family: Family, args: argparse.Namespace, target: Target) -> Request:
    """The request that is measured; a task that takes an image gets a drawn one."""
    from PIL import Image, ImageDraw

    drawn = Image.new("RGB", (256, 256), (96, 128, 160))
    ImageDraw.Draw(drawn).ellipse((64, 64, 192, 192), fill=(200, 40, 40))
    request = family.sample_request(PROMPT, drawn, args.task)
    return dataclasses.replace(request, seed=args.seed, steps=args.steps, seconds=target.seconds)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the JSON. Bad input is refused before anything is loaded."""
    check_tiers(args.tiers)
    check_task(args.task)
    check_writable(args.out, suffix=".json")
    check_outputs_spare_inputs({"--out": args.out}, [("--model", args.model)])

    from videoaccel.pipelines.loading import check_device, family_for, load

    device = check_device(args.device)
    target = choose(args, device)
    if args.requests is None:
        args.requests = REQUESTS_BUNDLED if target.model == DEFAULT_MODEL else REQUESTS
    check_seeds(args)
    say = reporter(enabled=not args.quiet)
    for note in target.notes:
        print(f"note: {note}", file=sys.stderr)
    quiet_libraries()
    pretrained = target.weights == "pretrained"
    family = family_for(target.model if pretrained else DEFAULT_MODEL)
    request = synthetic_request(family, args, target)
    if pretrained:
        plan = preflight(target.model, request, target.res)
        say(f"loading {target.model} on {device}")
        pipe = load(target.model, device=device, task=plan.task if plan is not None else args.task)
    else:
        say(f"building {target.model} with random weights on {device}")
        pipe = family.full_size().build(device=device)
    report = bench(pipe, target, request, args, say)
    with stops_name({"report": args.out}):
        write_json(args.out, report)
        print(json.dumps(report, indent=2, allow_nan=False) if args.json else table(report))
        if not args.json:
            print(f"wrote {args.out}")
    return 0


def bench(pipe: Any, target: Target, request: Request, args: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Every tier's row on one pipeline, and what they share."""
    from videoaccel.cli.bench_loop import Work, measure, row_of
    from videoaccel.environment import command_line, commit, device_name, versions
    from videoaccel.install import accelerate

    notes = list(target.notes)
    random = target.weights == "random"
    rows = []
    # The first is installed next anyway; of another that is refused, the user learns before hours of work.
    for tier in args.tiers[1:]:
        accelerate(pipe, AccelConfig(tier=tier), model=target.model, weights=target.weights).remove()
    for tier in args.tiers:
        config = AccelConfig(tier=tier)
        with accelerate(pipe, config, model=target.model, weights=target.weights) as handle:
            family = handle.family
            work = Work(
                request=with_canvas(family, pipe, request, target.res),
                prompt_embeds=family.full_size().prompt_embeds(pipe, TEXT_ROWS) if random else None,
                stages=stages_of(family, pipe, random=random),
                streams=family.streams,
            )
            dense = tier == "exact"
            measured = measure(
                handle,
                work,
                requests=args.requests,
                inflight=args.inflight,
                warmup=args.warmup,
                compare=dense and not args.no_bare,
                say=functools.partial(say, tier),
            )
            rows.append(row_of(tier, config, work, measured, inflight=args.inflight))
    over = [row["bare_diffusers"]["ratio"] for row in rows if row["bare_diffusers"] is not None]
    if over and max(over) > DENSE_MARGIN:
        notes.append(
            f"the dense row takes {max(over):.3f}x bare diffusers, over the {DENSE_MARGIN:g}x it should: "
            "measure again on a quiet machine with more --requests"
        )
    if random:
        notes.append(
            "random weights: a timing, not a quality; the text encoder is not built, "
            f"{TEXT_ROWS} random text rows stand in for it, and encoding was not run"
        )
    first = rows[0]["receipts"][0]
    said = (
        f"{row['tier']}: {line}"
        for row in rows
        for receipt in row["receipts"]
        for line in (*receipt["notes"], *receipt["warnings"])
    )
    notes += dict.fromkeys(said)
    return {
        "model": target.model,
        "weights": first["weights"],
        "task": first["task"],
        "canvas": f"{first['width']}x{first['height']}",
        "frames": first["frames"],
        "fps": first["fps"],
        "rows": first["rows"],
        "total_rows": sum(first["rows"].values()),
        "device": device_name(pipe._execution_device),
        "versions": versions(),
        "commit": commit(),
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": {
            "prompt": None if random else request.prompt,
            "seed": args.seed,
            "requests": args.requests,
            "inflight": args.inflight,
            "warmup": args.warmup,
        },
        "notes": notes,
        "tiers": rows,
    }


def stages_of(family: Family, pipe: Any, *, random: bool) -> tuple[str, ...]:
    """The stages this pipeline's components can run; the others are reported as null, never as a number."""
    stages = ("denoise",) if random else ("encode", "denoise")
    return (*stages, "decode", "mux") if family.decodes(pipe) else stages


def reporter(*, enabled: bool) -> Any:
    """A function that prints its words as a progress line on stderr, or does nothing."""

    def say(*words: str) -> None:
        if enabled:
            print(": ".join(words), file=sys.stderr, flush=True)

    return say


def counted(number: int, thing: str) -> str:
    """`1 frame`, `2 frames`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def table(report: dict[str, Any]) -> str:
    """The report as text: what was measured, one line a tier, what the hourly figure counts."""

    def shown(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    head = ["tier", "steps", "forwards", "n", "p50 (s)", "p95 (s)"]
    head += ["encode (s)", "denoise (s)", "decode (s)", "mux (s)", "step (s)"]
    head += ["clips/h", "alloc (GB)", "reserved (GB)", "vs bare"]
    lines = [head]
    for row in report["tiers"]:
        bare = row["bare_diffusers"]
        stages = row["stage_s"]
        lines.append(
            [row["tier"], str(row["steps"]), str(row["forwards"]), str(row["requests"])]
            + [shown(row["latency_s"][key]) for key in ("p50", "p95")]
            + [shown(stages[key]) for key in ("encode", "denoise", "decode", "mux")]
            + [shown(row["step_s_median"], 3), shown(row["clips_per_hour"], 1)]
            + [shown(row["peak_allocated_gb"]), shown(row["peak_reserved_gb"])]
            + ["-" if bare is None else f"{bare['ratio']:.3f}x"]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        f"{report['model']}, {report['weights']} weights, {report['task']}, {report['canvas']}, "
        f"{counted(report['frames'], 'frame')}, on {report['device']}"
    ]
    text += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    row = report["tiers"][0]
    kinds = ", ".join(f"{name} {rows}" for name, rows in report["rows"].items() if rows)
    text.append(
        f"n: {counted(row['requests'], 'timed request')} a tier, {row['inflight']} in flight; "
        f"clips/h counts {row['counts']}"
    )
    text.append("p50, p95: seconds from submission to file; encode to mux and step: medians")
    if row["latency_s"]["p95"] is None:
        text.append(f"p95: not given below {P95_NEEDS} requests; ask for more with --requests")
    text.append(f"the transformer's sequence: {counted(report['total_rows'], 'row')} (tokens): {kinds}")
    if any(row["bare_diffusers"] is not None for row in report["tiers"]):
        text.append("vs bare: time over bare diffusers, below 1 is faster")
    text += [f"note: {note}" for note in report["notes"]]
    return "\n".join(text)
