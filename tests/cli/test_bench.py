"""`videoaccel bench` through its real entry on the bundled model; parts for more hardware on tiny ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evals.h3_dense import TINY
from videoaccel.cli import bench, bench_loop, build_parser, main
from videoaccel.cli.bench_loop import closed_loop
from videoaccel.cli.values import Resolution
from videoaccel.config import TIERS
from videoaccel.errors import UserError
from videoaccel.pipelines.family import family_named, family_of
from videoaccel.pipelines.loading import bundled_folder
from videoaccel.pipelines.request import Request
from videoaccel.receipt import Forwards, Receipt, Timings
from videoaccel.schema import to_plain


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    argv = ["bench", "--model", "tiny-h3", "--res", "64p", "--seconds", "0.92", "--steps", "3"]
    assert (
        main([*argv, "--device", "cpu", "--requests", "2", "--warmup", "0", "--out", str(out), "--quiet"])
        == 0
    )
    return json.loads(out.read_text())


def test_report_says_what_was_measured(report: dict) -> None:
    assert (report["model"], report["task"]) == ("tiny-h3", "t2va")
    # What the weights are, the checkpoint says itself; the report repeats the receipts.
    facts = json.loads((bundled_folder("tiny-h3") / "videoaccel.json").read_text())
    assert report["weights"] == ("pretrained" if facts.get("trained", True) else "untrained")
    assert (report["canvas"], report["frames"], report["fps"]) == ("64x64", 22, 24.0)
    assert report["total_rows"] == sum(report["rows"].values()) > 0
    assert report["versions"]["torch"] == torch.__version__
    assert report["commit"] and report["command"] and "threads" in report["device"]
    row = report["tiers"][0]
    assert (row["tier"], row["config"], row["steps"], row["forwards"]) == ("exact", {"tier": "exact"}, 3, 2)
    assert row["counts"].startswith("finished mp4 files with sound, ")
    assert "encode, denoise, decode and mux" in row["counts"]
    config = {"prompt": bench.PROMPT, "seed": 0, "requests": 2, "inflight": 1, "warmup": 0}
    assert report["config"] == config
    # A CPU doesn't say how much memory torch holds: no number is made up.
    assert row["peak_allocated_gb"] is None and row["peak_reserved_gb"] is None


def test_figures_follow_from_the_receipts(report: dict) -> None:
    row = report["tiers"][0]
    receipts = [Receipt.from_dict(values) for values in row["receipts"]]
    assert [receipt.seed for receipt in receipts] == [0, 1]
    for stage in ("encode", "denoise", "decode", "mux"):
        assert row["stage_s"][stage] == np.median([getattr(r.timings, f"{stage}_s") for r in receipts])
    assert row["step_s_median"] == np.median([s for r in receipts for s in r.timings.step_s])
    latencies = row["latency_s"]["all"]
    assert row["latency_s"]["p50"] == pytest.approx(np.median(latencies))
    assert row["latency_s"]["p95"] is None, "of two requests it would be the slower one"
    for receipt, latency in zip(receipts, latencies, strict=True):
        assert receipt.timings.total_s <= latency
    # One in flight: the loop takes as long as its requests, the bare runs between them left out.
    assert sum(latencies) <= row["wall_s"] < sum(latencies) + sum(row["bare_diffusers"]["bare_s"])
    assert row["clips_per_hour"] == pytest.approx(3600 * 2 / row["wall_s"])


def test_dense_row_carries_its_ratio_to_bare_diffusers(report: dict) -> None:
    bare = report["tiers"][0]["bare_diffusers"]
    assert len(bare["ours_s"]) == len(bare["bare_s"]) == 2
    assert bare["ratio"] == pytest.approx(np.median(bare["ours_s"]) / np.median(bare["bare_s"]))
    assert min(bare["bare_s"]) > 0
    said = any("bare diffusers" in note for note in report["notes"])
    assert said == (bare["ratio"] > bench.DENSE_MARGIN)


def test_without_an_accelerator_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model at its own canvas, whatever canvas was asked for, and the table says so."""
    argv = ["bench", "--res", "768p", "--seconds", "0.92", "--steps", "2", "--device", "cpu", "--no-bare"]
    assert (
        main(
            [*argv, "--requests", "2", "--inflight", "2", "--warmup", "0", "--out", str(tmp_path / "b.json")]
        )
        == 0
    )
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "b.json").read_text())
    (note,) = report["notes"]
    said = "no accelerator: this measures the bundled tiny-h3 at its own canvas, not 768p"
    assert note == f"{said}, not the full-size model"
    assert report["canvas"] == "128x128" and report["tiers"][0]["inflight"] == 2
    assert report["tiers"][0]["bare_diffusers"] is None
    assert note in captured.out and "128x128" in captured.out and "2 in flight" in captured.out
    head, line = (text.split() for text in captured.out.splitlines()[1:3])
    assert head[:3] == ["tier", "steps", "forwards"] and line[:3] == ["exact", "2", "1"]
    assert line[-1] == "-"


def test_random_weights_report_only_what_ran() -> None:
    """The real random-weights builder at a tiny size, transformer only: only denoising ran."""
    from videoaccel.pipelines.h3_random import build_random_h3

    pipe = build_random_h3(device="cpu", config=TINY, vaes=False)
    args = parsed("--steps", "3", "--requests", "2", "--warmup", "0", "--res", "64x64")
    target = bench.Target(model="tiny", weights="random", res=args.res, seconds=5.0)
    report = bench.bench(
        pipe, target, bench.synthetic_request(family_of(pipe), args, target), args, lambda *words: None
    )
    row = report["tiers"][0]
    assert {name: value is None for name, value in row["stage_s"].items()} == {
        "encode": True,
        "denoise": False,
        "decode": True,
        "mux": True,
    }
    assert row["clips_per_hour"] is None and "no clips are counted" in row["counts"]
    assert row["bare_diffusers"]["compares"] == "denoise loop"
    assert report["rows"]["text"] == bench.TEXT_ROWS
    assert any("random weights" in note and "not built" in note for note in report["notes"])
    assert " - " in bench.table(report)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No request runs: each tier's are made up, with a note and a warning of that tier in the second one."""
    measured_tiers: list[str] = []

    def measure(handle: Any, work: Any, **settings: Any) -> bench_loop.Measured:
        tier = handle.config.tier
        measured_tiers.append(tier)
        first = dataclasses.replace(made_receipt(tier), notes=("shared",))
        second = dataclasses.replace(first, notes=("shared", f"note of {tier}"), warnings=(f"of {tier}",))
        ended = [bench_loop.Ended(receipt, 0.6) for receipt in (first, second)]
        return bench_loop.Measured(ended=ended, wall_s=1.2)

    monkeypatch.setattr(bench_loop, "measure", measure)
    return measured_tiers


def made_receipt(tier: str) -> Receipt:
    return Receipt(
        tier_asked=tier,
        tier_served=tier,
        model="tiny",
        weights="random",
        family="minimax_h3",
        task="t2va",
        device="cpu",
        width=64,
        height=64,
        frames=22,
        fps=24.0,
        seed=0,
        rows={"video": 64},
        steps=3,
        forwards=Forwards(dense=2),
        timings=Timings(encode_s=0.1, denoise_s=0.2, decode_s=0.1, mux_s=0.1, step_s=(0.1, 0.1)),
    )


def made_up_report(pipe: Any, tiers: str) -> dict[str, Any]:
    args = parsed("--tiers", tiers, "--requests", "2", "--no-bare")
    target = bench.Target(model="tiny", weights="pretrained", res=None, seconds=None)
    return bench.bench(pipe, target, Request(prompt="a"), args, lambda *words: None)


def tiny_h3() -> Any:
    from videoaccel.pipelines.h3_random import build_random_h3

    return build_random_h3(device="cpu", config=TINY, vaes=False)


def test_notes_and_warnings_of_every_tier_and_request_are_reported_once(made_up: list[str]) -> None:
    report = made_up_report(tiny_h3(), "exact,lossless")
    assert report["notes"] == [
        f"{tier}: {said}"
        for tier in ("exact", "lossless")
        for said in ("shared", f"note of {tier}", f"of {tier}")
    ]
    assert "note: lossless: of lossless" in bench.table(report).splitlines()


def test_a_tier_that_cannot_be_installed_is_refused_before_any_is_measured(
    made_up: list[str], build_wan: Callable[..., Any]
) -> None:
    pipe = build_wan()
    with pytest.raises(UserError, match="takes no kernels yet"):
        made_up_report(pipe, "exact,lossless")
    assert made_up == []
    assert made_up_report(pipe, "exact")["tiers"], "nothing is left installed"


def test_a_clip_without_sound_is_not_called_one_with_sound(
    made_up: list[str], build_wan: Callable[..., Any]
) -> None:
    (row,) = made_up_report(build_wan(), "exact")["tiers"]
    assert row["counts"].startswith("finished mp4 files, ")


def test_a_row_holds_the_sections_in_force_beside_the_config_as_written(made_up: list[str]) -> None:
    exact, lossless = made_up_report(tiny_h3(), "exact,lossless")["tiers"]
    assert exact["config"] == {"tier": "exact"} and exact["sections"] == {}
    assert lossless["config"] == {"tier": "lossless"}
    (section,) = TIERS["lossless"].sections.values()
    assert lossless["sections"] == json.loads(json.dumps({"kernels": to_plain(section)}))


@pytest.mark.parametrize("more", [["--requests", "2"], ["--requests", "1", "--warmup", "3"]])
def test_seeds_that_run_out_are_refused_before_loading(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from videoaccel.pipelines import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    argv = ["bench", "--device", "cpu", "--model", "tiny-h3", "--out", str(tmp_path / "b.json"), *more]
    assert main([*argv, "--seed", str(2**63 - 1)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    most = 2**63 - 2 if more[-1] == "2" else 2**63 - 3
    assert error.startswith("error: --seed 9223372036854775807 ") and f"give {most} at most" in error
    assert list(tmp_path.iterdir()) == []


def test_closed_loop_keeps_as_many_in_flight_as_asked() -> None:
    """Each request waits for a second one beside it: with fewer than two in flight this would never end."""
    pair = threading.Barrier(2)

    def one(index: int) -> argparse.Namespace:
        pair.wait(timeout=60)
        return argparse.Namespace(latency_s=float(index))

    ended = closed_loop(one, requests=6, inflight=2, say=lambda text: None, stop=threading.Event())  # type: ignore[arg-type]
    assert sorted(outcome.latency_s for outcome in ended) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_closed_loop_ends_with_the_first_error() -> None:
    def one(index: int) -> argparse.Namespace:
        if index == 1:
            raise UserError("request 1 failed")
        return argparse.Namespace(latency_s=0.0)

    with pytest.raises(UserError, match="request 1"):
        closed_loop(one, requests=5, inflight=1, say=lambda text: None, stop=threading.Event())  # type: ignore[arg-type]


def test_ctrl_c_ends_requests_in_flight_and_the_command() -> None:
    """Two requests in torch, in threads of their own, when the interrupt comes: code 130, not an abort."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from videoaccel.cli import main\n"
        "raise SystemExit(main('bench --device cpu --model tiny-h3 --res 64p --seconds 0.92 --steps 20'\n"
        "    ' --no-bare --requests 50 --inflight 2 --warmup 0'.split()))"
    )
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert ran.stderr is not None
        said = next((line for line in ran.stderr if line.startswith("exact: request 1/50")), None)
        ran.send_signal(signal.SIGINT)
        rest = ran.communicate(timeout=120)[1]
        assert said is not None
        assert (ran.returncode, rest.splitlines()[-1]) == (130, "stopped; nothing was written")
        assert list(Path(folder).iterdir()) == []


def test_table_explains_itself(report: dict) -> None:
    text = bench.table(report)
    head, line = text.splitlines()[1:3]
    assert "p50 (s)" in head and "denoise (s)" in head and line.split()[:4] == ["exact", "3", "2", "2"]
    assert "vs bare: time over bare diffusers, below 1 is faster" in text
    assert "2 timed requests a tier" in text and "p95: not given below 5 requests" in text
    assert f"{report['total_rows']} rows (tokens): " in text and f"video {report['rows']['video']}" in text
    assert [bench.counted(n, "frame") for n in (1, 2)] == ["1 frame", "2 frames"]


def parsed(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *argv])


def test_what_is_measured_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(bench, "free_gb", lambda device: 140.0)
    target = bench.choose(parsed("--seconds", "5"), gpu)
    assert (target.weights, str(target.res), target.seconds, target.notes) == ("random", "768p", 5.0, ())
    assert bench.choose(parsed("--model", "a/b"), gpu).weights == "pretrained"
    monkeypatch.setattr(bench, "free_gb", lambda device: 85.0)
    assert bench.choose(parsed("--res", "768p"), gpu).weights == "random"
    assert bench.choose(parsed("--res", "1080p"), gpu).model == "tiny-h3"
    monkeypatch.setattr(bench, "free_gb", lambda device: 24.0)
    target = bench.choose(parsed("--res", "768p"), gpu)
    assert target.model == "tiny-h3" and target.res is None and "24 GB free of the 80 GB" in target.notes[0]
    with pytest.raises(UserError, match="24 GB free"):
        bench.choose(parsed("--weights", "random"), gpu)


def test_the_default_of_the_bundled_model_gives_a_p95(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "--device", "cpu", "--res", "64p", "--seconds", "0.92", "--steps", "2", "--no-bare"]
    argv += ["--model", "tiny-h3", "--warmup", "0", "--quiet", "--json", "--out", str(tmp_path / "b.json")]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    row = report["tiers"][0]
    assert row["requests"] == report["config"]["requests"] == 5
    assert row["latency_s"]["p95"] == pytest.approx(np.percentile(row["latency_s"]["all"], 95))


def test_memory_estimate_goes_through_the_measured_points() -> None:
    """72.9 and 85.0 GB for the transformer at 5 and 15 s, with 5.5 GB of VAEs and 2 to spare."""
    stock = Resolution(768, None, None)
    full = family_named("minimax_h3").full_size()
    assert bench.gigabytes(full, 5, stock) == pytest.approx(80.4)
    assert bench.gigabytes(full, 15, stock) == pytest.approx(92.5)
    # Activations go with the rows: three times the pixels are three times the seconds.
    assert bench.gigabytes(full, 5, Resolution(None, 1344, 3 * 768)) == pytest.approx(92.5)
    assert bench.gigabytes(full, 5, Resolution(1536, None, None)) == pytest.approx(80.4 + 3 * 6.05)


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--weights", "random"], "GB free"),
        (["--weights", "random", "--model", "tiny-h3"], "drop one"),
        (["--model", "tiny-h3", "--res", "65x64"], "multiple of"),
        (["--seconds", "60"], "0.9 to 5.2"),
        (["--tiers", "exact,balanced"], "exact"),
        (["--out", "absent/bench.json"], "mkdir"),
        (["--task", "t3va"], "t2va"),
    ],
)
def test_bad_input_is_refused_before_loading(
    argv: list[str],
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--device", "cpu", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and list(tmp_path.iterdir()) == []
    error = captured.err.splitlines()[-1]
    assert error.startswith("error: ") and fix in error
