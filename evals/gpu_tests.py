"""Runs tests/gpu on an accelerator: `python -m evals.gpu_tests --out evals/results/gpu_tests.json`.

CI has no accelerator and skips these tests; this is how they leave a record. pytest runs in this process,
without the machine's own plugins, and each test becomes a row: name, outcome, seconds, and what it measured.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evals.command import user_errors
from evals.results_file import write_result
from videoaccel.environment import device_name
from videoaccel.errors import UserError
from videoaccel.media import check_writable

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "gpu"
OVERRIDE = "VIDEOACCEL_TEST_DEVICE"
OUTCOMES = ("passed", "failed", "skipped")


class Collector:
    """A pytest plugin that keeps one row a test."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Set-up, call and tear-down each report; the worst of them is the test's outcome."""
        row = self._row(report.nodeid)
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if report.failed or (report.skipped and row["outcome"] == "passed"):
            row["outcome"] = report.outcome
            row["why"] = why(report)
        row.update({name: storable(value) for name, value in report.user_properties})

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported would otherwise run no test and fail none."""
        if report.failed:
            self._row(report.nodeid or str(FOLDER.name)).update(outcome="failed", why=why(report))

    def _row(self, name: str) -> dict[str, Any]:
        return self.rows.setdefault(name, {"name": name, "outcome": "passed", "seconds": 0.0})


def storable(value: Any) -> Any:
    """A measurement as a result file takes it: a NaN is a finding of its test, and must not cost the file."""
    plain = isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def why(report: Any) -> str:
    """The last line of a failure or the reason of a skip; paths of the checkout left out."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = (lines[0] if crash is not None else lines[-1]) if lines else "unknown"
    return line.replace(f"{ROOT}/", "")[:300]


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 if every test that ran passed, 1 if not, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m evals.gpu_tests", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="JSON")
    parser.add_argument("-k", dest="only", metavar="EXPR", help="run only tests that match, as pytest's -k")
    args = parser.parse_args(argv)
    check_writable(args.out, suffix=".json")
    # The override is for trying the tests themselves; its file says so in name and config.
    dry_run = OVERRIDE in os.environ
    device = torch.device(os.environ.get(OVERRIDE, "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no accelerator here; run this command on a machine that has one")
    try:
        # The one part of evals that needs the test extra and not the eval extra: loaded here, by name.
        pytest: Any = importlib.import_module("pytest")
    except ImportError as error:
        raise UserError('pytest is not installed; install "videoaccel[test]"') from error
    # Plugins that happen to be installed are no part of what is recorded.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    collector = Collector()
    options = ["-q", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    # tests/conftest.py wants packages that an accelerator machine may lack.
    options += [f"--confcutdir={FOLDER}", "-p", "no:cacheprovider", str(FOLDER)]
    options += ["-k", args.only] if args.only else []
    code = int(pytest.main(options, plugins=[collector]))
    rows = list(collector.rows.values())
    if not rows:
        raise UserError(f"pytest ran no test (its exit code was {code}); give another -k")
    counts = {name: sum(row["outcome"] == name for row in rows) for name in OUTCOMES}
    write_result(
        "gpu_tests_dry_run" if dry_run else "gpu_tests",
        device=device_name(device),
        config={"folder": "tests/gpu", "only": args.only, "dry_run": dry_run, "pytest_exit_code": code},
        metrics={**counts, "seconds": round(sum(row["seconds"] for row in rows), 3)},
        rows=rows,
        path=args.out,
    )
    print(", ".join(f"{count} {name}" for name, count in counts.items()) + f"; wrote {args.out}")
    return 0 if counts["passed"] and not counts["failed"] and code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
