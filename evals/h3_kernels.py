"""What the kernels gain on the full-size MiniMax-H3: `python -m evals.h3_kernels --out FILE.json`.

Random weights, the transformer alone, denoising only: speed, memory and numerical error, never a quality.
Diffusers' own forward is timed before and after the accelerated one, on the same model in the same process,
so that a drift of clocks shows. The error of a velocity is against the same weights in float32 throughout, on
a smaller canvas: attention has no fast kernel in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from evals.command import user_errors
from evals.h3_dense import TINY, say, timed_request
from evals.results_file import write_result
from videoaccel.cli.values import whole
from videoaccel.config import AccelConfig, KernelsConfig
from videoaccel.environment import device_name
from videoaccel.errors import UserError
from videoaccel.install import Handle, accelerate
from videoaccel.media import check_writable
from videoaccel.pipelines.h3_random import build_random_h3, random_prompt_embeds
from videoaccel.pipelines.loading import check_device

MODES = {
    "lossless": AccelConfig(tier="lossless"),
    "fp8": AccelConfig(tier="lossless", risk_budget=0.05, kernels=KernelsConfig(precision="fp8")),
}
PRODUCTS = ("gemm", "nvjet", "cutlass", "wgmma", "splitk", "gemv", "matmul")
ATTENTION = ("flash", "fmha", "sdpa", "attention")


Canvas = tuple[int, int]
"""Height and width, px."""


class Case:
    """One pipeline, and one clip that is timed on it."""

    def __init__(self, pipe: Any, frames: int, canvas: Canvas, text_rows: int) -> None:
        self.pipe, self.frames, self.canvas = pipe, frames, canvas
        self.embeds = random_prompt_embeds(pipe, text_rows)
        self.device = torch.device(pipe._execution_device)

    def run(self, handle: Handle, forwards: int, canvas: Canvas | None = None) -> Any:
        """The receipt of a clip without decoding."""
        height, width = canvas or self.canvas
        asked = timed_request(self.frames, height, width, forwards)
        return handle.run(asked, prompt_embeds=self.embeds, decode=False)[1]

    def timed(self, handle: Handle, forwards: int) -> dict[str, Any]:
        """Seconds of each forward after one that warms up, and the peak memory of the denoising."""
        self.run(handle, 1)
        receipt = self.run(handle, forwards)
        peak = receipt.memory.peak_allocated
        return {
            # The first of a request makes its tables.
            "forward_s": list(receipt.timings.step_s[1:]),
            "first_forward_s": receipt.timings.step_s[0],
            "peak_gb": None if peak is None else peak / 1e9,
            "kernels": {choice.op: choice.impl for choice in receipt.kernels},
        }

    def velocity(self, handle: Handle, canvas: Canvas) -> torch.Tensor:
        """The first forward's velocities, both streams in one vector, float64."""
        seen: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            seen.append(torch.cat([part.double().flatten() for part in output]))

        hook = self.pipe.transformer.register_forward_hook(keep)
        try:
            self.run(handle, 1, canvas)
        finally:
            hook.remove()
        return seen[0]

    def other_ms(self, handle: Handle) -> dict[str, float]:
        """Milliseconds of a forward on the device, by kind of kernel."""
        from torch.profiler import ProfilerActivity, profile

        self.run(handle, 1)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.run(handle, 1)
        found = {"products": 0.0, "attention": 0.0, "other": 0.0}
        for event in profiler.key_averages():
            found[kind_of(event.key)] += event.self_device_time_total / 1e3
        return found


def kind_of(kernel: str) -> str:
    """What a kernel's name says that it does."""
    name = kernel.lower()
    if any(part in name for part in ATTENTION):
        return "attention"
    return "products" if any(part in name for part in PRODUCTS) else "other"


@contextmanager
def in_float32(transformer: Any) -> Iterator[None]:
    """Its forwards compute in float32 with the weights that it has, a block at a time."""
    parts = [
        transformer.context_embedder,
        *transformer.token_refiner.refiner_blocks,
        transformer.token_refiner.final_norm,
        *transformer.transformer_blocks,
        transformer.norm_out,
    ]
    hooks = []

    def wide(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(wide(item) for item in value)
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    for part in parts:
        dtype = next(part.parameters()).dtype

        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            module.float()
            return wide(args), {key: wide(value) for key, value in kwargs.items()}

        def after(module: torch.nn.Module, args: Any, output: Any, dtype: torch.dtype = dtype) -> None:
            module.to(dtype)

        hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(part.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got - want).norm() / want.norm())


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m evals.h3_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="JSON")
    parser.add_argument("--device", help="default: the accelerator")
    parser.add_argument(
        "--forwards", type=whole(2), default=9, help="of a timed run; the first is not counted"
    )
    parser.add_argument("--frames", type=whole(5), default=124)
    parser.add_argument("--text-rows", type=whole(1), default=256)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--dry-run", action="store_true", help="a tiny transformer, for a CPU")
    args = parser.parse_args(argv)
    clock = time.perf_counter()
    check_writable(args.out, suffix=".json")
    device = check_device(args.device)
    if device.type == "cpu" and not args.dry_run:
        raise UserError("the full-size model needs an accelerator; use --dry-run to try the command on a CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pipe = build_random_h3(
        device=device, dtype=torch.bfloat16, vaes=False, config=TINY if args.dry_run else None
    )
    canvas, small = ((64, 96), (64, 64)) if args.dry_run else ((768, 1344), (256, 448))
    case = Case(pipe, args.frames, canvas, args.text_rows)
    blocks = len(pipe.transformer.transformer_blocks)
    metrics: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []

    def save(complete: bool = False) -> None:
        write_result(
            "h3_kernels_dry_run" if args.dry_run else "h3_kernels_h200",
            device=device_name(device),
            config={
                "model": "tiny dry run" if args.dry_run else "MiniMax-H3, transformer only",
                "weights": "random",
                "canvas": "{1}x{0}".format(*canvas),
                "error_canvas": "{1}x{0}".format(*small),
                "frames": args.frames,
                "text_rows": args.text_rows,
                "complete": complete,
            },
            metrics=metrics,
            rows=rows,
            path=args.out,
        )

    def measure(name: str, config: AccelConfig, *, profiled: bool) -> torch.Tensor:
        with accelerate(pipe, config) as handle:
            say(f"{name}: timing", clock)
            row = {"mode": name, **case.timed(handle, args.forwards)}
            if profiled and device.type == "cuda":
                row["ms"] = case.other_ms(handle)
                metrics[f"{name}_other_ms_per_block"] = row["ms"]["other"] / blocks
            rows.append(row)
            say(f"{name}: {statistics.median(row['forward_s']):.3f} s, peak {row['peak_gb']} GB", clock)
            return case.velocity(handle, small)

    with accelerate(pipe) as handle, in_float32(pipe.transformer):
        say("float32 reference", clock)
        truth = case.velocity(handle, small)
    stock = measure("stock", AccelConfig(), profiled=True)
    metrics["stock_velocity_rel_l2"] = relative(stock, truth)
    save()
    for mode in args.modes:
        velocity = measure(mode, MODES[mode], profiled=True)
        metrics[f"{mode}_velocity_rel_l2"] = relative(velocity, truth)
        save()
    measure("stock", AccelConfig(), profiled=False)
    seconds = {
        mode: statistics.median([s for row in rows if row["mode"] == mode for s in row["forward_s"]])
        for mode in ("stock", *args.modes)
    }
    for mode, median in seconds.items():
        metrics[f"{mode}_forward_s"] = median
        metrics[f"{mode}_peak_gb"] = max((row["peak_gb"] or 0.0) for row in rows if row["mode"] == mode)
        if mode != "stock":
            metrics[f"{mode}_speedup"] = seconds["stock"] / median
    save(complete=True)
    say(f"wrote {args.out}", clock)
    for key, value in metrics.items():
        print(f"{key:32} {value:.5g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
