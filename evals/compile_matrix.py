"""Compiles every kernel with every config for devices that need not be here, and says what it takes of them.

    python -m evals.compile_matrix --out evals/results/compile_matrix.json

Nothing runs. A config over a device's shared memory, or one that spills registers, is found here rather than
in production: Triton compiles both without a word. Exit code 1 where there is one, or a kernel that doesn't
compile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.command import user_errors
from evals.results_file import write_result
from videoaccel.errors import UserError, unknown
from videoaccel.kernels.profile import SHARED_MEMORY
from videoaccel.media import check_writable

SPILLS = {
    ("swiglu", "sm_89"): "float32 to FP8 by Triton 3.6 alone: 16 bytes, in a type that no model here runs in",
    (
        "linear_fp8",
        "sm_120",
    ): "the second config by Triton 3.6 alone: 8 bytes, with tails that no model here has",
}
"""Spills that are accepted: op and target to the reason."""


def compile_one(number: int, target: str, choice: int) -> dict[str, Any]:
    """Compiles one spec with one of its configs, in a process of its own; the row of the result."""
    from videoaccel.kernels.ahead_of_time import compile_launch
    from videoaccel.kernels.compile_specs import specs

    spec = specs()[number]
    config = spec.configs(target)[choice]
    row: dict[str, Any] = {
        "op": spec.op,
        "variant": spec.variant,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "target": target,
        "config": config.words(),
        "shared_limit": SHARED_MEMORY[target],
    }
    start = time.perf_counter()
    try:
        compiled = compile_launch(spec.plan(target, config), target)
    except ValueError as error:
        return {**row, "outcome": "refused", "why": str(error)}
    except Exception as error:
        # Whatever a compiler throws is this row's finding; the others are still of use.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {**row, "outcome": "failed", "why": f"{type(error).__name__}: {' '.join(lines)[:300]}"}
    row |= {
        "shared": compiled.shared,
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "seconds": round(time.perf_counter() - start, 2),
    }
    why = ""
    if compiled.shared > SHARED_MEMORY[target]:
        outcome, why = "over_limit", f"{compiled.shared} bytes of shared memory, and {target} has less"
    elif compiled.spill_bytes:
        why = SPILLS.get((spec.op, target), "")
        outcome = "spills" if not why else "accepted"
    else:
        outcome = "fits"
    return {**row, "outcome": outcome, **({"why": why} if why else {})}


def metrics_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The flat figures of the result."""
    compiled = [row for row in rows if "shared" in row]

    def count(outcome: str) -> int:
        return sum(row["outcome"] == outcome for row in rows)

    return {
        "kernels": len({(row["op"], row["variant"], row["dtype"]) for row in rows}),
        "configs": len({(row["op"], row["variant"], row["dtype"], row["config"]) for row in rows}),
        "targets": len({row["target"] for row in rows}),
        "compiled": len(compiled),
        "over_limit": count("over_limit"),
        "spilling": sum(bool(row["spill_bytes"]) for row in compiled),
        "failed": count("failed"),
        "refused": count("refused"),
        "shared_max": max((row["shared"] for row in compiled), default=0),
        "registers_max": max((row["registers"] or 0 for row in compiled), default=0),
    }


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.compile_matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="JSON", help="write the table there; default: print what is amiss")
    parser.add_argument("--target", action="append", metavar="ARCH", help="only this one; may be repeated")
    parser.add_argument("--op", action="append", metavar="NAME", help="only this op; may be repeated")
    parser.add_argument(
        "--triton-cache", type=Path, metavar="DIR", help="keep compiled kernels there; default: a new folder"
    )
    arguments = parser.parse_args(argv)
    if arguments.out:
        check_writable(arguments.out, suffix=".json")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise UserError("TRITON_INTERPRET is set, and an interpreter compiles nothing: unset it")
    try:
        import triton

        from videoaccel.kernels.compile_specs import TARGETS, specs
    except ImportError as error:
        raise UserError(f"the kernels can't be imported ({error}): pip install 'triton>=3.6'") from error
    every = specs()
    for name in arguments.target or ():
        if name not in TARGETS:
            raise unknown("target", name, TARGETS)
    for name in arguments.op or ():
        if name not in {spec.op for spec in every}:
            raise unknown("op", name, sorted({spec.op for spec in every}))
    targets = tuple(arguments.target or TARGETS)
    jobs = [
        (number, target, choice)
        for number, spec in enumerate(every)
        if not arguments.op or spec.op in arguments.op
        for target in targets
        for choice in range(len(spec.configs(target)))
    ]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(arguments.triton_cache or folder)
        # New processes: Triton reads the folder when it is imported, and threads would share its compiler.
        context = multiprocessing.get_context("spawn")
        workers = min(os.cpu_count() or 1, 8)
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            rows = list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=4))
    metrics = {**metrics_of(rows), "seconds": round(time.perf_counter() - start, 1)}
    bad = [row for row in rows if row["outcome"] in ("failed", "over_limit", "spills")]
    for row in bad:
        what = " ".join(str(row[key]) for key in ("op", "variant", "dtype", "target", "config") if row[key])
        print(f"{what}: {row['outcome']}: {row.get('why') or str(row['spill_bytes']) + ' bytes a thread'}")
    if arguments.out:
        write_result(
            Path(arguments.out).stem,
            device="none: compiled ahead of time",
            config={"targets": list(targets), "ops": arguments.op or "all", "triton": triton.__version__},
            metrics=metrics,
            rows=rows,
            path=arguments.out,
        )
    told = ("compiled", "targets", "over_limit", "spilling", "failed", "refused", "seconds")
    print(", ".join(f"{name} {metrics[name]}" for name in told))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
