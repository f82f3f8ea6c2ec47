"""The full-size timing command, proven on a tiny transformer before it goes to an accelerator."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from evals import h3_dense


def test_dry_run_writes_the_result_file(tmp_path: Path) -> None:
    out = tmp_path / "dense.json"
    assert h3_dense.main(["--dry-run", "--device", "cpu", "--forwards", "4", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    five, fifteen = result["rows"]
    # 124 and 345 frames are 37 and 102 latent frames of 2 x 3 patches; 40 audio latents a second, stereo.
    assert five["rows"] == 256 + 37 * 6 + 2 * 207
    assert fifteen["rows"] == 256 + 102 * 6 + 2 * 575
    assert len(five["forward_s"]) == len(fifteen["forward_s"]) == 4
    metrics = result["metrics"]
    assert metrics["forward_s_15s"] == statistics.median(fifteen["forward_s"])
    assert metrics["clip_s_5s_extrapolated"] == pytest.approx(49 * statistics.median(five["forward_s"]))
    ours, bare = five["loop_s_per_forward"], five["bare_diffusers_loop_s_per_forward"]
    # Two blocks of two forwards.
    assert len(ours) == len(bare) == 2
    expected = statistics.median(ours) / statistics.median(bare)
    assert metrics["ratio_to_bare_diffusers"] == pytest.approx(expected)
    # A CPU has no allocator figure: the key is left out, not filled.
    assert "peak_gb_5s" not in metrics
    assert (
        result["config"]["dry_run"] is True
        and result["config"]["complete"] is True
        and result["name"] == "dense"
    )


def test_a_cpu_is_refused_without_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert h3_dense.main(["--device", "cpu", "--out", str(tmp_path / "a.json")]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    assert h3_dense.main(["--out", str(out), "--device", "cuda:99", "--dry-run"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: device 'cuda:99' cannot be used here")
    assert not out.exists()
