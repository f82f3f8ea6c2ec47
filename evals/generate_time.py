"""How long the default `videoaccel generate` takes on this machine, start to finish, as a user would time it.

    python -m evals.generate_time --runs 3 --out evals/results/generate_time.json

The first run warms the disk and is not counted. Torch gets two threads, whatever the machine has.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from evals.command import user_errors
from evals.results_file import write_result
from videoaccel.cli.values import whole
from videoaccel.errors import UserError
from videoaccel.media import check_writable

PROMPT = "a red star bounces quickly"
THREADS = 2


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring. Returns the exit code."""
    from videoaccel.environment import device_name

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=whole(1), default=3, help="counted runs; default: 3")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    check_writable(arguments.out, suffix=".json")
    rows = []
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "videoaccel.cli", "generate", PROMPT, "--device", "cpu", "--quiet"]
        for index in track(range(arguments.runs + 1), "generating"):
            load, start = os.getloadavg()[0], time.perf_counter()
            ran = subprocess.run(
                [*command, "-o", f"{folder}/clip.mp4"],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            if ran.returncode:
                said = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
                raise UserError(
                    f"videoaccel generate ended with code {ran.returncode} ({said}); make it run first"
                )
            rows.append({"run": index, "seconds": time.perf_counter() - start, "load_before": load})
    counted = [row["seconds"] for row in rows[1:]]
    metrics = {
        "generate_s_2cores": statistics.median(counted),
        "worst_s": max(counted),
        "load_before_max": max(row["load_before"] for row in rows),
    }
    config = {"prompt": PROMPT, "threads": THREADS, "runs": arguments.runs, "cores": os.cpu_count()}
    write_result(
        arguments.out.stem,
        device=device_name("cpu"),
        config=config,
        metrics=metrics,
        rows=rows,
        path=arguments.out,
    )
    print(f"median {metrics['generate_s_2cores']:.1f} s of {arguments.runs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
