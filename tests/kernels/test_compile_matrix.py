"""The compile matrix: a few kernels for real, in a process that is no interpreter. `.ci/run` compiles all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evals import compile_matrix
from videoaccel.kernels.ahead_of_time import amd_resources, compile_launch
from videoaccel.kernels.compile_specs import TARGETS, specs
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.profile import SHARED_MEMORY
from videoaccel.kernels.registry import EAGER

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "evals.compile_matrix", *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_some_kernels_compile_for_targets_that_are_not_here(tmp_path: Path) -> None:
    out = tmp_path / "few.json"
    targets = [word for target in ("sm_80", "sm_120", "gfx942") for word in ("--target", target)]
    ran = run("--op", "quantize_fp8", *targets, "--out", str(out))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["metrics"]["targets"] == 3 and result["metrics"]["failed"] == 0
    by_target = {name: [row for row in result["rows"] if row["target"] == name] for name in TARGETS}
    assert {row["outcome"] for row in by_target["sm_80"]} == {"refused"}
    assert {row["outcome"] for row in by_target["sm_120"] + by_target["gfx942"]} == {"fits"}
    assert all(row["registers"] > 0 and row["spill_bytes"] == 0 for row in by_target["sm_120"])
    assert all(row["registers"] > 0 for row in by_target["gfx942"])


def test_an_interpreter_is_refused() -> None:
    ran = run(TRITON_INTERPRET="1")
    assert ran.returncode == 2 and "an interpreter compiles nothing: unset it" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
def test_interpreted_kernels_have_nothing_to_compile() -> None:
    spec = specs()[0]
    launch = spec.plan("sm_90", spec.configs("sm_90")[0])
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        compile_launch(launch, "sm_90")


def test_a_name_that_is_not_known_is_one_line() -> None:
    ran = run("--target", "sm_91")
    assert ran.returncode == 2 and "unknown target 'sm_91'" in ran.stderr and "Traceback" not in ran.stderr


def test_every_kernel_of_the_table_is_compiled_for_every_kind_of_device() -> None:
    """An op with a kernel of ours that is not in the specs would be compiled first in production."""
    ours = {
        name
        for name, op in OPS.items()
        if any("_triton:" in impl.where for impl in op.implementations if impl.name != EAGER)
    }
    assert ours == {spec.op for spec in specs()}
    assert set(TARGETS) <= set(SHARED_MEMORY)


def row(outcome: str, **more: Any) -> dict[str, Any]:
    base = {"op": "o", "variant": "", "dtype": "d", "target": "sm_90", "config": "c", "outcome": outcome}
    return {**base, **more}


def test_metrics_by_hand() -> None:
    fits = {"shared": 10, "registers": 40, "spill_bytes": 0}
    rows = [
        row("fits", **fits),
        row("over_limit", **fits | {"shared": 300_000}, target="sm_120"),
        row("spills", **fits | {"spill_bytes": 8, "registers": 255}, config="other"),
        row("refused", why="no"),
        row("failed", why="no"),
    ]
    metrics = compile_matrix.metrics_of(rows)
    assert metrics == {
        "kernels": 1,
        "configs": 2,
        "targets": 2,
        "compiled": 3,
        "over_limit": 1,
        "spilling": 1,
        "failed": 1,
        "refused": 1,
        "shared_max": 300_000,
        "registers_max": 255,
    }


def test_amd_resources_are_read_off_the_assembly() -> None:
    assert amd_resources("  .private_segment_fixed_size: 16\n .vgpr_count:  44\n") == (44, 16)
    assert amd_resources("") == (None, None)
