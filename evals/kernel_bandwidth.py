"""How near each fused op comes to the memory's own speed, on an accelerator.

    python -m evals.kernel_bandwidth --out evals/results/kernel_bandwidth_h200.json

Each op runs at the size of MiniMax-H3 at 5 s and 768p, in bfloat16: its kernel with each config, and the
eager reference beside it. Bytes are what the op must move (`kernels/work.py`), so a kernel that reads twice
shows. The yardstick is a copy of a tensor of the same bytes on the same device. Every timed call finds a cold
cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
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
from videoaccel.kernels.work import OpCall, work_of
from videoaccel.media import check_writable

ROWS, WIDTH, FFN, HEADS, HEAD_DIM, ROTARY = 37_966, 5376, 14_336, 56, 128, 96
TABLE_ROWS = 6
EPS = 1e-5
FLUSH_BYTES = 512 * 1024**2
"""More than the largest level-2 cache in the catalogue."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op to time.

    Attributes:
        op: its name in `WORK`.
        variant: which use of it.
        moved: bytes that the op reads and writes at least.
        eager: the reference.
        kernels: by the words of its config.
    """

    op: str
    variant: str
    moved: float
    eager: Callable[[], Any]
    kernels: dict[str, Callable[[], Any]]


def timed(call: Callable[[], Any], repeats: int, flush: torch.Tensor) -> float:
    """Median seconds of a call by the device's clock, each behind a write that empties its cache."""
    for _ in range(3):
        call()
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def cases(device: torch.device, target: str, rows: int) -> Sequence[Callable[[], Case]]:
    """What is timed, each made when its turn comes: together they would fill the device."""
    from videoaccel.kernels import (
        modulation,
        modulation_triton,
        qk_norm_rope_triton,
        quantize_fp8_triton,
        swiglu_triton,
    )
    from videoaccel.kernels.qk_norm_rope import qk_norm_rope_reference
    from videoaccel.kernels.quantize_fp8 import quantize_fp8_reference
    from videoaccel.kernels.rows_triton import row_configs
    from videoaccel.kernels.swiglu import swiglu_reference

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def made(
        op: str, variant: str, moved: float, eager: Any, kernel: Any, configs: Any, *a: Any, **k: Any
    ) -> Case:
        def bound(function: Any, **more: Any) -> Callable[[], Any]:
            return lambda: function(*a, **k, **more)

        kernels = {config.words(): bound(kernel, config=config) for config in configs}
        return Case(op=op, variant=variant, moved=moved, eager=bound(eager), kernels=kernels)

    def least(op: str, **sizes: int) -> float:
        return work_of(OpCall(op=op, sizes={"rows": rows, **sizes}), 2).bytes

    def modulated(op: str, quantize: bool) -> Case:
        shift, scale, gate = draw(TABLE_ROWS, 6 * WIDTH).chunk(6, 1)[:3]
        index = torch.arange(rows, device=device) * TABLE_ROWS // rows
        gated = (draw(1, rows, WIDTH), draw(1, rows, WIDTH), gate, index)
        normed = (draw(WIDTH), shift, scale)
        arguments = {
            "norm_modulate": (gated[0], *normed, index, EPS),
            "gate_residual": gated,
            "gate_residual_norm_modulate": (*gated, *normed, EPS),
        }[op]
        # A code is one byte where the value was two.
        moved = least(op, width=WIDTH) - (rows * WIDTH if quantize else 0)
        reference, kernel = getattr(modulation, f"{op}_reference"), getattr(modulation_triton, op)
        more = {"quantize": True} if quantize else {}
        variant, cuts = "to FP8" if quantize else "", row_configs(WIDTH, target)
        return made(op, variant, moved, reference, kernel, cuts, *arguments, **more)

    def turned() -> Case:
        query, key, _ = draw(1, rows, 3 * HEADS, HEAD_DIM).chunk(3, 2)
        angles, gain = torch.randn(rows, ROTARY, device=device), draw(HEAD_DIM)
        kernel, cuts = qk_norm_rope_triton.qk_norm_rope, qk_norm_rope_triton.configs(HEADS, HEAD_DIM, target)
        moved = least("qk_norm_rope", heads=HEADS, head_dim=HEAD_DIM)
        arguments = (query, key, gain, gain, angles.cos(), angles.sin(), EPS)
        return made("qk_norm_rope", "", moved, qk_norm_rope_reference, kernel, cuts, *arguments)

    def gated(quantize: bool) -> Case:
        cuts = swiglu_triton.configs(FFN, target, quantize=quantize)
        moved = least("swiglu", width=FFN) - (rows * FFN if quantize else 0)
        variant, kernel = "to FP8" if quantize else "", swiglu_triton.swiglu
        x = draw(1, rows, 2 * FFN)
        return made("swiglu", variant, moved, swiglu_reference, kernel, cuts, x, quantize=quantize)

    def quantized(block: int | None) -> Case:
        cuts, x = quantize_fp8_triton.configs(WIDTH, target, block), draw(1, rows, WIDTH)
        kernel, variant = quantize_fp8_triton.quantize_fp8, "by row" if block is None else f"by {block}"
        moved = least("quantize_fp8", width=WIDTH)
        return made("quantize_fp8", variant, moved, quantize_fp8_reference, kernel, cuts, x, block=block)

    return (
        lambda: modulated("norm_modulate", False),
        lambda: modulated("norm_modulate", True),
        lambda: modulated("gate_residual", False),
        lambda: modulated("gate_residual_norm_modulate", False),
        lambda: modulated("gate_residual_norm_modulate", True),
        turned,
        lambda: gated(False),
        lambda: gated(True),
        lambda: quantized(None),
        lambda: quantized(128),
    )


def copied(moved: int, repeats: int, flush: torch.Tensor) -> float:
    """Seconds of a copy that reads half of `moved` bytes and writes the other half."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=flush.device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), repeats, flush)


def measure(case: Case, repeats: int, flush: torch.Tensor) -> list[dict[str, Any]]:
    """A row a config, the one that is used first. `copy` is a copy that moves as many bytes."""
    copy = copied(int(case.moved), repeats, flush)
    eager = timed(case.eager, max(repeats // 4, 3), flush)
    rows = []
    for place, (words, kernel) in enumerate(case.kernels.items()):
        seconds = timed(kernel, repeats, flush)
        rows.append(
            {
                "op": case.op,
                "variant": case.variant,
                "config": words,
                "used": place == 0,
                "ms": seconds * 1e3,
                "gb_s": case.moved / seconds / 1e9,
                "copy_gb_s": case.moved / copy / 1e9,
                "share_of_copy": copy / seconds,
                "eager_ms": eager * 1e3,
                "times_eager": eager / seconds,
            }
        )
    return rows


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.kernel_bandwidth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="JSON")
    parser.add_argument("--repeats", type=whole(3), default=50, help="timed calls of each; default: 50")
    parser.add_argument("--rows", type=whole(1), default=ROWS, help=f"of the sequence; default: {ROWS}")
    arguments = parser.parse_args(argv)
    check_writable(arguments.out, suffix=".json")
    if not torch.cuda.is_available():
        raise UserError("no accelerator here; run this command on a machine that has one")
    from videoaccel.kernels.launch import target_of

    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    rows: list[dict[str, Any]] = []
    for make in cases(device, target_of(device), arguments.rows):
        rows += measure(make(), arguments.repeats, flush)
        torch.cuda.empty_cache()
        for row in rows[-1:]:
            print(f"{row['op']} {row['variant']}: {row['ms']:.3f} ms, {row['share_of_copy']:.0%} of a copy")
    used = [row for row in rows if row["used"]]
    metrics = {
        "share_of_copy_min": min(row["share_of_copy"] for row in used),
        "copy_gb_s": statistics.median(row["copy_gb_s"] for row in used),
        "times_eager_min": min(row["times_eager"] for row in used),
        **{f"{row['op']}_{row['variant'] or 'plain'}_ms".replace(" ", "_"): row["ms"] for row in used},
    }
    config = {"rows": arguments.rows, "width": WIDTH, "ffn": FFN, "heads": HEADS, "head_dim": HEAD_DIM}
    write_result(
        arguments.out.stem,
        device=device_name(device),
        config={**config, "dtype": "bfloat16", "repeats": arguments.repeats, "flush_bytes": FLUSH_BYTES},
        metrics=metrics,
        rows=rows,
        path=arguments.out,
    )
    print(f"the least of them: {metrics['share_of_copy_min']:.0%} of a copy; wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
