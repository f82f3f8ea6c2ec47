"""The table of families, and that one entry and one class are all that a further family takes."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import pytest
import torch

from videoaccel.cli import main
from videoaccel.errors import UserError
from videoaccel.pipelines.family import FAMILIES, Checkpoint, Plan, Request, family_named, family_of
from videoaccel.pipelines.loading import family_for, load, load_shell
from videoaccel.pipelines.registry import BUNDLED, FamilyEntry, every_task
from videoaccel.pipelines.wan import WanFamily
from videoaccel.receipt import Receipt

from .conftest import make_wan, picture


class ToyPipeline(diffusers.WanPipeline):  # type: ignore[misc]
    """Of a class of its own, whose base another family serves."""


class ToyFamily(WanFamily):
    """What somebody who adds a family writes, if it ran like Wan."""

    name: ClassVar[str] = "toy"

    def load(
        self, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, task: str | None
    ) -> Any:
        return ToyPipeline(**make_wan().components).to(device, dtype)

    def resolve(self, pipe: Any, request: Request) -> Plan:
        return replace(super().resolve(pipe, request), notes=("resolved by the toy.",))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a family that was added at run time."""
    entry = FamilyEntry(
        adapter=f"{__name__}:ToyFamily",
        title="Toy",
        pipeline_classes=("ToyPipeline",),
        tasks=("t2v", "toy2v"),
        forwards="3N",
    )
    monkeypatch.setitem(FAMILIES, "toy", entry)
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "ToyPipeline"}')
    (folder / "videoaccel.json").write_text('{"family": "toy"}')
    return folder


def test_a_family_is_added_by_its_entry_alone(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = load(toy, device="cpu")
    # The nearest class counts: Wan serves its base.
    assert family_of(pipe).name == family_for(toy).name == "toy" and load_shell(toy) is None
    with pytest.raises(UserError, match="known: t2v, toy2v"):
        load(toy, device="cpu", task="t2va")
    assert every_task()[-1] == "toy2v"
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    # As wide as the terminal is said to be, so without the line breaks.
    said = " ".join(capsys.readouterr().out.split())
    assert "t2v, i2v, toy2v" in said and "N-1 forwards with MiniMax-H3, N with Wan, 3N with Toy" in said


def test_the_commands_serve_a_family_that_they_have_not_heard_of(toy: Path, tmp_path: Path) -> None:
    common = ["--model", str(toy), "--task", "t2v", "--device", "cpu", "--steps", "1", "--res", "32x32"]
    common += ["--seconds", "0.3", "--quiet"]
    clip, record, report = (tmp_path / name for name in ("a.mp4", "r.json", "b.json"))
    assert main(["generate", "x", *common, "-o", str(clip), "--receipt", str(record)]) == 0
    receipt = Receipt.from_json(record.read_text())
    assert (receipt.family, receipt.notes[0]) == ("toy", "resolved by the toy.") and clip.stat().st_size
    assert main(["bench", *common, "--requests", "1", "--warmup", "0", "--out", str(report)]) == 0
    (row,) = json.loads(report.read_text())["tiers"]
    assert row["receipts"][0]["family"] == "toy" and row["clips_per_hour"] > 0


def test_the_table_is_what_the_adapters_are() -> None:
    for name, entry in FAMILIES.items():
        assert family_named(name).name == name
        assert all(hasattr(diffusers, pipeline) for pipeline in entry.pipeline_classes)
        assert len(set(entry.tasks)) == len(entry.tasks)
    for model, family in BUNDLED.items():
        assert family_for(model).name == family


def test_a_benchmarks_request_has_what_its_task_takes(tiny: Any) -> None:
    cases = [(tiny, task) for task in ("t2va", "ref2va", "fl2va")]
    cases += [(make_wan(), "t2v"), (make_wan(image=True), "i2v")]
    assert {task for _, task in cases} == set(every_task())
    for pipe, task in cases:
        family = family_of(pipe)
        assert family.resolve(pipe, family.sample_request("a red ball", picture(0), task)).task == task
        assert family.decodes(pipe)
    assert not family_named("minimax_h3").decodes(load_shell())
    with pytest.raises(UserError, match="Wan is not built with random weights; give a checkpoint"):
        family_named("wan").full_size()


def test_no_other_module_knows_a_family_by_name() -> None:
    package = Path(__file__).resolve().parents[2] / "videoaccel"
    names = set(FAMILIES) | {c for e in FAMILIES.values() for c in e.pipeline_classes}
    # What a facts file without a family means is part of that file's format.
    own = ("minimax_h3", "h3_", "wan")
    may = ("registry.py", "facts.py", *own)
    modules = [path for path in package.rglob("*.py") if not path.name.startswith(may)]
    assert {"loading.py", "bench.py", "inputs.py", "family.py"} <= {path.name for path in modules}
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                assert node.value not in names, f"{path.name}:{node.lineno} names {node.value}"
            imported = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            leaf = imported.rpartition(".")[2]
            assert not leaf.startswith(own), f"{path.name} imports {imported}"
