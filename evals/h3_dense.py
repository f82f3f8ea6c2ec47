"""Times the full-size MiniMax-H3, dense: `python -m evals.h3_dense --out evals/results/h3_dense_h200.json`.

Random weights, the transformer alone, denoising only: a speed and a memory figure, never a quality. A forward
is one step of the denoise loop through the family adapter, device synchronised at both ends. The same
forwards are run through diffusers' own loop in between, in pairs that take turns to go first, which gives the
ratio. After each block of two forwards the result so far goes to the output file, so a run that is cut short
still says what it measured (`config.complete` is then false).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evals.command import user_errors
from evals.results_file import write_result
from videoaccel.cli.values import whole
from videoaccel.environment import device_name
from videoaccel.errors import UserError
from videoaccel.install import accelerate
from videoaccel.media import check_writable
from videoaccel.pipelines.family import Run
from videoaccel.pipelines.h3_random import build_random_h3, random_prompt_embeds
from videoaccel.pipelines.loading import check_device
from videoaccel.pipelines.request import Request
from videoaccel.session import peak_memory

CLIP_FORWARDS = 49
"""Forwards of a clip at the published setting: 50 steps are 49 forwards in diffusers."""

TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "ffn_dim": 32,
    "patch_size": (1, 2, 2),
    "text_dim": 8,
    "freq_dim": 8,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}
"""A transformer for `--dry-run`: the real class and the real layout, at a size that a CPU runs in seconds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One clip length to time.

    Attributes:
        key: suffix of its metrics.
        frames: frames of the clip.
        blocks: requests the forwards are spread over.
        forwards: forwards of each request.
        compare: also run each block through diffusers' own loop.
    """

    key: str
    frames: int
    blocks: int
    forwards: int
    compare: bool


def timed_request(frames: int, height: int, width: int, forwards: int) -> Request:
    """A request of so many forwards, for a pipeline with no text encoder."""
    return Request(
        prompt="random weights: the text encoder is not built",
        num_frames=frames,
        height=height,
        width=width,
        steps=forwards + 1,
    )


class Bench:
    """A pipeline and the measurements taken on it so far."""

    def __init__(self, pipe: Any, *, height: int, width: int, text_rows: int) -> None:
        self.pipe = pipe
        self.handle = accelerate(pipe)
        self.embeds = random_prompt_embeds(pipe, text_rows)
        self.height, self.width = height, width
        self.device = torch.device(pipe._execution_device)
        self.metrics: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def encoded(self, frames: int, forwards: int) -> Run:
        """A request of `forwards` forwards, ready to denoise."""
        request = timed_request(frames, self.height, self.width, forwards)
        run = self.handle.family.start(self.pipe, request, prompt_embeds=self.embeds, decode=False)
        run.encode()
        return run

    def measure(self, case: Case, clock: float, save: Callable[[], None]) -> None:
        """Warms up, then times `case` block by block; metrics, rows and file are up to date after each."""
        warm = self.encoded(case.frames, 1)
        say(f"{case.key}: {case.frames} frames, {warm.layout.rows} rows; warming up", clock)
        warm.denoise()
        row: dict[str, Any] = {
            "case": case.key,
            "frames": case.frames,
            "rows": warm.layout.rows,
            "forward_s": [],
            "loop_s_per_forward": [],
            "bare_diffusers_loop_s_per_forward": [],
            "peak_gb": [],
            "peak_reserved_gb": [],
        }
        self.rows.append(row)
        for block in range(case.blocks):
            sides = ("ours", "bare") if case.compare else ("ours",)
            # Clocks and temperature drift: taking turns puts the drift on both sides alike.
            for side in sides if block % 2 == 0 else reversed(sides):
                run = self.encoded(case.frames, case.forwards)
                if side == "ours":
                    with peak_memory(self.device) as peak:
                        run.denoise()
                    if peaks := peak.read():
                        row["peak_gb"].append(peaks["peak_allocated"] / 1e9)
                        row["peak_reserved_gb"].append(peaks["peak_reserved"] / 1e9)
                    row["forward_s"] += run.timings.step_s
                    row["loop_s_per_forward"].append(run.timings.denoise_s / case.forwards)
                    say(f"{case.key}: forwards {', '.join(f'{s:.3f}' for s in run.timings.step_s)} s", clock)
                    continue
                seconds = run.stock_loop()
                if seconds is None:
                    raise RuntimeError("this family's stock loop is not wired up for timing")
                row["bare_diffusers_loop_s_per_forward"].append(seconds / case.forwards)
                say(f"{case.key}: diffusers' own loop {seconds / case.forwards:.3f} s a forward", clock)
            self.book(case.key, row)
            save()

    def book(self, key: str, row: dict[str, Any]) -> None:
        """The metrics that `row` holds so far."""
        median = statistics.median(row["forward_s"])
        row["forwards_timed"] = len(row["forward_s"])
        self.metrics[f"forward_s_{key}"] = median
        self.metrics[f"clip_s_{key}_extrapolated"] = CLIP_FORWARDS * median
        if row["peak_gb"]:
            # The allocator's high-water mark over our own forwards: the transformer and its activations.
            self.metrics[f"peak_gb_{key}"] = max(row["peak_gb"])
        if bare := row["bare_diffusers_loop_s_per_forward"]:
            ratio = statistics.median(row["loop_s_per_forward"]) / statistics.median(bare)
            self.metrics["ratio_to_bare_diffusers"] = ratio


def say(text: str, clock: float) -> None:
    """A progress line with the seconds since the start."""
    print(f"[{time.perf_counter() - clock:6.1f} s] {text}", file=sys.stderr, flush=True)


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m evals.h3_dense", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="JSON")
    parser.add_argument("--device", help="default: the accelerator")
    parser.add_argument(
        "--forwards", type=whole(1), default=8, help="forwards timed for each length, in pairs (default 8)"
    )
    parser.add_argument("--lengths", nargs="+", choices=["5s", "15s"], default=["5s", "15s"])
    parser.add_argument("--text-rows", type=whole(1), default=256)
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny transformer on a small canvas, for a CPU"
    )
    args = parser.parse_args(argv)
    clock = time.perf_counter()
    check_writable(args.out, suffix=".json")
    device = check_device(args.device)
    if device.type == "cpu" and not args.dry_run:
        raise UserError("the full-size model needs an accelerator; use --dry-run to try the command on a CPU")
    say("building the transformer on the device", clock)
    pipe = build_random_h3(device=device, vaes=False, config=TINY if args.dry_run else None)
    height, width = (64, 96) if args.dry_run else (768, 1344)
    bench = Bench(pipe, height=height, width=width, text_rows=args.text_rows)
    blocks = -(-args.forwards // 2)
    cases = {
        "5s": Case(key="5s", frames=124, blocks=blocks, forwards=2, compare=True),
        # 345 frames, not 360: the video VAE makes 17n+5. A forward takes six times as long here, and the
        # comparison with diffusers is made once, at 5 s.
        "15s": Case(key="15s", frames=345, blocks=blocks, forwards=2, compare=False),
    }
    parameters = sum(p.numel() for p in pipe.transformer.parameters())
    config = {
        "model": "tiny dry run" if args.dry_run else "MiniMax-H3, transformer only",
        "weights": "random",
        "parameters": parameters,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "tier": "exact",
        "task": "t2va",
        "canvas": f"{width}x{height}",
        "text_rows": args.text_rows,
        "clip_forwards": CLIP_FORWARDS,
        "scope": "transformer alone, denoising; text encoder and VAEs not built; clip_s_* are"
        f" {CLIP_FORWARDS} x the median forward, extrapolated",
        "dry_run": args.dry_run,
    }
    say(f"{parameters / 1e9:.2f} B parameters", clock)

    def save(complete: bool = False) -> None:
        write_result(
            Path(args.out).stem,
            device=device_name(device),
            config={**config, "complete": complete},
            metrics=bench.metrics,
            rows=bench.rows,
            path=args.out,
        )

    for length in args.lengths:
        bench.measure(cases[length], clock, save)
    save(complete=True)
    say(f"wrote {args.out}", clock)
    for key, value in bench.metrics.items():
        print(f"{key:28} {value:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
