"""`videoaccel doctor` on the card in the machine."""

from __future__ import annotations

import json
from pathlib import Path

from videoaccel.cli import main


def test_measures_every_implementation_that_can_run(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    assert main(["doctor", "--measure", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["device"]["live"] and report["device"]["memory_gb"]
    rows = {(row["op"], row["impl"]): row for row in report["measured"]}
    assert [row for row in rows.values() if row["error"]] == []
    # Faster than the card can be is a wrong count of the work, or a clock that did not wait.
    assert all(row["of_ceiling"] is None or 0 < row["of_ceiling"] < 1.05 for row in rows.values())
    chosen = {(op["op"], op["impl"]) for op in report["ops"]}
    assert chosen <= set(rows) and ("copy", "torch") in rows
