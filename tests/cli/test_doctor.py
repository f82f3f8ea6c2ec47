"""`videoaccel doctor` through its real entry, and its report for cards that are not in the machine.

`RENEW_SNAPSHOTS=1 python -m pytest tests/cli/test_doctor.py` writes doctor.txt anew; read its diff.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from videoaccel.cli import doctor_measure, main
from videoaccel.cli.doctor import DTYPES
from videoaccel.cli.doctor_ops import op_reports
from videoaccel.cli.doctor_report import DTYPES as TORCH_DTYPES
from videoaccel.cli.doctor_report import examine
from videoaccel.cli.doctor_table import show
from videoaccel.cli.machine import Machine
from videoaccel.cli.torch_build import TorchBuild
from videoaccel.kernels.catalogue import CATALOGUE
from videoaccel.kernels.devices import device_named
from videoaccel.kernels.work import OpCall
from videoaccel.pipelines.op_calls import ForwardOps
from videoaccel.pipelines.registry import FAMILIES

PAGE = Path(__file__).parents[2] / "docs/doctor.md"
SNAPSHOT = Path(__file__).with_name("doctor.txt")
BUILD = TorchBuild(version="2.11.0", cuda="13.0", threads=8)
PACKAGES = {"torch": "2.11.0", "triton": "3.6.0"}


def report(
    device: str = "RTX PRO 6000", family: str = "minimax_h3", dtype: str = "bf16", **machine: Any
) -> Any:
    """Of a machine that is the same everywhere."""
    fixed = {"packages": PACKAGES, "requires": ("torch>=2.11",), "root": Path("/nowhere"), "cores": 8}
    fixed |= {"checkpoints": Path("/models"), "free_gb": 50.0}
    return examine(family, device, dtype, machine=Machine(torch=BUILD, **(fixed | machine)))


def text(values: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    show(values, Console(file=out, width=width, highlight=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def op(values: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in values["ops"] if row["op"] == name)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a bad command ends with."""
    assert main(["doctor", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err


def test_text_is_as_reviewed() -> None:
    pages = [
        text(report()),
        text(report("H200", packages={"torch": "2.11.0"})),
        text(report("Ascend 910B", "wan")),
    ]
    found = f"\n{'=' * 80}\n".join(pages)
    if os.environ.get("RENEW_SNAPSHOTS") == "1":
        SNAPSHOT.write_text(found, encoding="utf-8")
    assert found == SNAPSHOT.read_text(encoding="utf-8"), "renew doctor.txt as this file's docstring says"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", CATALOGUE)
def test_every_card_and_family_has_a_report(device: str, family: str) -> None:
    values = report(device, family)
    json.dumps(values, allow_nan=False)
    ops = values["ops"]
    assert all(row["impl"] and row["calls"] and row["gb"] > 0 for row in ops)
    assert values["forward"]["gb"] == pytest.approx(sum(row["gb"] for row in ops))
    if values["device"]["bandwidth_gb_s"] and values["device"]["bf16_tflops"]:
        assert sum(row["share"] for row in ops) == pytest.approx(1)
        assert [row["share"] for row in ops] == sorted((row["share"] for row in ops), reverse=True)
        assert values["forward"]["floor_ms"] == pytest.approx(sum(row["floor_ms"] for row in ops))
    else:
        assert values["forward"]["floor_ms"] is None and all(row["share"] is None for row in ops)
        assert any(note.startswith("no share of the forward") for note in values["notes"])
    assert "ops of one forward" in text(values)


def test_floors_follow_from_work_and_the_cards_figures() -> None:
    values = report("H200")
    device = values["device"]
    attention, norm = op(values, "attention"), op(values, "norm_modulate")
    assert (attention["bound"], norm["bound"]) == ("compute", "memory")
    assert attention["floor_ms"] == pytest.approx(attention["tflop"] / device["bf16_tflops"] * 1e3, rel=1e-3)
    assert norm["floor_ms"] == pytest.approx(norm["gb"] / device["bandwidth_gb_s"] * 1e3)


def test_a_fallback_is_said_with_what_to_install() -> None:
    row = op(report("H200", packages={"torch": "2.11.0"}), "norm_modulate")
    assert row["impl"] == "eager" and row["rejected"][0]["impl"] == "triton"
    assert "pip install 'triton>=3.6'" in row["better"] and not row["better"].startswith("norm_modulate")
    assert op(report("H200"), "norm_modulate")["better"] is None


def test_rules_of_domestic_cards_are_shown() -> None:
    values = report("Ascend 910B")
    assert op(values, "swiglu")["why"].startswith("off on Ascend 910B")
    assert "explicit on it: sparse_attention must be" in text(values)


def test_float32_has_no_shares_and_says_why() -> None:
    values = report("H200", dtype="fp32")
    assert values["forward"]["floor_ms"] is None and "--dtype bf16" in " ".join(values["notes"])
    # What torch's half-precision attention can't take, it is not given.
    assert op(values, "attention")["impl"] == "efficient"


def test_a_card_too_small_for_the_weights_is_said() -> None:
    assert any("one card does not hold them" in note for note in report("RTX 5090")["notes"])
    assert not any("hold" in note for note in report("H200")["notes"])


def test_an_op_that_nothing_can_run_is_reported_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = dataclasses.replace(device_named("H200"), explicit={"attention": ("own",)})
    monkeypatch.setattr("videoaccel.cli.doctor_report.device_named", lambda name: device)
    values = report("H200")
    row = op(values, "attention")
    assert row["impl"] is None and "no implementation of attention is left" in row["why"]
    assert "attention: none, no implementation" in text(values)


def test_text_fits_a_terminal_and_fixes_stay_whole() -> None:
    values = report(environ={"TRITON_INTERPRET": "1"})
    wide, narrow = text(values, 300), text(values, 80)
    for finding in values["setup"]:
        assert finding["fix"] in wide and finding["fix"] in narrow, "a fix is copied as one line"
    rows = narrow[narrow.index("ops of one forward") : narrow.index("one forward:")].splitlines()
    assert max(map(len, rows)) <= 80


def test_names_with_markup_are_shown_as_they_are() -> None:
    values = report()
    values["device"]["name"], values["setup"][0]["says"] = "[red]card[/red]", "[/nonsense]"
    shown = text(values)
    assert "[red]card[/red]" in shown and "[/nonsense]" in shown


def test_keys_are_those_that_the_page_lists() -> None:
    values = report()
    parts = {
        "report": set(values),
        "device": set(values["device"]),
        "model": set(values["model"]),
        "ops": set(values["ops"][0]),
        "forward": set(values["forward"]),
        "setup": set(values["setup"][0]),
        "measured": set(doctor_measure.row_of("x", "y", abs, lambda: (), doctor_measure.Work(), None)),
    }
    sections = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
    listed = {s.partition("\n")[0]: set(re.findall(r"^\| `(\w+)`", s, re.MULTILINE)) for s in sections}
    assert listed == parts


def test_json_and_file_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "doctor.json"
    assert main(["doctor", "--device", "L40S", "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert (printed["device"]["name"], printed["device"]["live"], printed["measured"]) == (
        "L40S",
        False,
        None,
    )
    assert printed["versions"]["torch"] == torch.__version__ and printed["dtype"] == "bf16"


def test_this_machine_is_looked_at_where_no_device_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "in this machine" in shown and "give --device NAME" in shown and "set-up of this machine" in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--device", "RTX 5O90"], "did you mean 'RTX 5090'"),
        (["--device", "cuda:99"], "cannot be used here"),
        (["--device", "cpu:x"], "cannot be used here"),
        (["--device", " "], "empty"),
        (["--model", "minimax-h3"], "did you mean 'minimax_h3'"),
        (["--model", "nothing"], "unknown model family"),
        (["--dtype", "bf61"], "did you mean bf16"),
        (["--measure", "--device", "cpu"], "--measure times"),
        (["--measure", "--device", "H200"], "H200 is none"),
        (["--out", "doctor.txt"], "must end in .json"),
        (["--mesure"], "did you mean --measure"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(argv, capsys)


def test_an_unwritable_file_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("videoaccel.cli.doctor_report.examine", lambda *a, **k: pytest.fail("worked"))
    said = refused(["--out", str(tmp_path / "missing/doctor.json")], capsys)
    assert "make its folder first" in said
    assert list(tmp_path.iterdir()) == []


def test_dtypes_of_the_flag_are_those_of_the_report() -> None:
    assert tuple(TORCH_DTYPES) == DTYPES


class TestMeasure:
    """What surrounds the clock of the card, on the CPU with a clock of its own; tests/gpu has the rest."""

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def once(function: Any, arguments: Any) -> float:
            function(*arguments)
            return 2.0

        monkeypatch.setattr(doctor_measure, "timed", once)
        monkeypatch.setattr(doctor_measure, "COPY_BYTES", 1 << 10)

    def rows(self) -> list[dict[str, Any]]:
        sizes = {"rows": 4, "heads": 2, "head_dim": 8, "width": 8, "in_features": 8, "out_features": 8}
        calls = tuple(OpCall(op=name, sizes=sizes) for name in ("attention", "linear", "norm_modulate"))
        profile = device_named("Ascend 910B")
        reports = op_reports(ForwardOps(title="t", size="s", rows=4, calls=calls), profile, torch.float32)
        cpu = torch.device("cpu")
        return list(doctor_measure.measurements(reports, profile, torch.float32, cpu))

    def test_every_op_is_timed_after_a_copy(self) -> None:
        rows = self.rows()
        assert [row["error"] for row in rows] == [None] * len(rows)
        assert rows[0]["op"] == "copy" and {row["op"] for row in rows[1:]} == {
            "attention",
            "linear",
            "norm_modulate",
        }
        copy = rows[0]
        assert copy["achieved"] == pytest.approx(2 * 1024 / 1e9 / 2e-3) and copy["unit"] == "GB/s"
        assert copy["of_ceiling"] == pytest.approx(copy["achieved"] / 1600)
        # No float32 peak is known: a rate, and no share of a ceiling.
        linear = next(row for row in rows if row["op"] == "linear")
        assert linear["unit"] == "TFLOP/s" and linear["of_ceiling"] is None and linear["achieved"] > 0

    def test_one_that_fails_leaves_its_error_and_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*arguments: Any) -> None:
            raise RuntimeError("no such kernel\nand a long story")

        monkeypatch.setattr("videoaccel.kernels.attention.eager", broken)
        failed = [row for row in self.rows() if row["error"]]
        assert [(row["op"], row["error"]) for row in failed] == [
            ("attention", "RuntimeError: no such kernel")
        ]
        assert failed[0]["ms"] is None
        assert "attention eager: RuntimeError" in text(report() | {"measured": self.rows()})
