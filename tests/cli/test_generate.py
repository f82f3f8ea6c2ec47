"""`videoaccel generate` through its real entry, on the bundled model at a small canvas and few steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

import videoaccel.runner
from videoaccel.cli import main
from videoaccel.media import read_video, to_uint8, write_video
from videoaccel.receipt import Receipt

SMALL = ["--steps", "3", "--seconds", "0.92", "--res", "64p", "--device", "cpu"]


Muxed = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def muxed() -> Iterator[Muxed]:
    """Frames and sound of every clip as they went into the muxer, by file: what two clips are compared by.

    The codec is no part of what `generate` promises about a seed.
    """
    seen: Muxed = {}

    def watched(path: Any, frames: np.ndarray, **more: Any) -> None:
        seen[str(path)] = (frames.copy(), more["audio"].copy())
        write_video(path, frames, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(videoaccel.runner, "write_video", watched)
        yield seen


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, muxed: Muxed) -> Path:
    folder = tmp_path_factory.mktemp("made")
    argv = ["generate", "a red circle bounces", *SMALL, "--seed", "7", "--quiet"]
    assert main([*argv, "-o", str(folder / "clip.mp4"), "--receipt", str(folder / "receipt.json")]) == 0
    return folder


def drawn(path: Path) -> str:
    pixels = np.full((96, 96, 3), 90, np.uint8)
    pixels[30:60, 30:60] = (210, 40, 40)
    Image.fromarray(pixels).save(path)
    return str(path)


def test_clip_is_the_asked_one(made: Path) -> None:
    assert sorted(path.name for path in made.iterdir()) == ["clip.mp4", "receipt.json"]
    video = read_video(made / "clip.mp4")
    assert video.frames.shape == (22, 64, 64, 3)
    assert video.fps == 24.0 and video.audio is not None
    assert abs(video.audio.shape[1] / video.rate - 22 / 24) < 0.002
    with av.open(str(made / "clip.mp4")) as container:
        assert [s.codec_context.name for s in container.streams] == ["h264", "aac"]
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"


def test_receipt_adds_up(made: Path) -> None:
    receipt = Receipt.from_json((made / "receipt.json").read_text())
    assert (receipt.task, receipt.tier_served, receipt.model) == ("t2va", "exact", "tiny-h3")
    assert (receipt.width, receipt.height, receipt.frames, receipt.seed) == (64, 64, 22, 7)
    # N steps are N-1 forwards in diffusers, all of them dense at tier exact.
    assert (receipt.steps, receipt.forwards.dense, receipt.forwards.run) == (3, 2, 2)
    assert len(receipt.timings.step_s) == 2
    assert sum(receipt.timings.step_s) <= receipt.timings.denoise_s
    assert min(receipt.timings.encode_s, receipt.timings.decode_s, receipt.timings.mux_s) > 0
    assert receipt.rows["video"] > receipt.rows["audio"] > 0


def test_seed_decides_the_clip(
    made: Path, muxed: Muxed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = []
    for seed in ("7", "8"):
        argv = ["generate", "a red circle bounces", *SMALL, "--seed", seed, "--json"]
        assert main([*argv, "-o", str(tmp_path / f"{seed}.mp4")]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        said = json.loads(captured.out)
        assert said["output"] == str(tmp_path / f"{seed}.mp4")
        assert said["receipt"]["seed"] == int(seed)
        noise.append(said["initial_noise_sha256"])
    assert noise[0] != noise[1]
    paths = made / "clip.mp4", tmp_path / "7.mp4", tmp_path / "8.mp4"
    first, same, other = (muxed[str(path)] for path in paths)
    np.testing.assert_array_equal(first[0], same[0])
    np.testing.assert_array_equal(first[1], same[1])
    assert np.abs(first[0].astype(int) - other[0]).mean() > 0.5


def test_clip_is_diffusers_own(made: Path, muxed: Muxed) -> None:
    """Tier exact: what goes into the file is what the stock pipeline call makes."""
    import torch

    from videoaccel.pipelines.loading import load

    out = load("tiny-h3", device="cpu")(
        prompt="a red circle bounces",
        height=64,
        width=64,
        num_frames=22,
        num_inference_steps=3,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type="np",
    )
    frames, audio = muxed[str(made / "clip.mp4")]
    np.testing.assert_array_equal(frames, to_uint8(out.get("videos")[0]))
    np.testing.assert_array_equal(audio, out.get("audio")[0].float().numpy())


@pytest.mark.parametrize(
    ("flags", "task"),
    [
        (["--reference", "{image}"], "ref2va"),
        (["--reference", "{video}", "--reference", "{image}"], "ref2va"),
        (["--first-frame", "{image}"], "fl2va"),
        (["--first-frame", "{image}", "--last-frame", "{image}"], "fl2va"),
    ],
)
def test_task_is_read_off_the_files(made: Path, tmp_path: Path, flags: list[str], task: str) -> None:
    places = {"image": drawn(tmp_path / "i.png"), "video": str(made / "clip.mp4")}
    filled = [flag.format(**places) for flag in flags]
    out = [*SMALL, "--quiet", "-o", str(tmp_path / "clip.mp4"), "--receipt", str(tmp_path / "r.json")]
    assert main(["generate", "the object slides to the left", *filled, *out]) == 0
    receipt = Receipt.from_json((tmp_path / "r.json").read_text())
    assert receipt.task == task
    assert receipt.rows["condition"] > 0
    assert read_video(tmp_path / "clip.mp4").frames.shape == (22, 64, 64, 3)


def test_summary_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", *SMALL, "-o", str(tmp_path / "clip.mp4")]) == 0
    captured = capsys.readouterr()
    assert (
        "22 frames of 64x64, 0.92 s at 24 fps, with sound; t2va, tier exact, 2 forwards, seed 0"
        in captured.out
    )
    stages = [line.split()[0] for line in captured.err.splitlines()]
    assert list(dict.fromkeys(stages)) == ["load", "encode", "denoise", "decode", "mux"]


def test_a_short_edge_off_the_grid_is_said(tmp_path: Path) -> None:
    argv = ["generate", "x", *SMALL[:4], "--res", "70p", "--device", "cpu", "--quiet"]
    assert main([*argv, "-o", str(tmp_path / "a.mp4"), "--receipt", str(tmp_path / "r.json")]) == 0
    receipt = Receipt.from_json((tmp_path / "r.json").read_text())
    assert any(note.startswith(f"70p became {receipt.width}x{receipt.height}") for note in receipt.notes)


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["x", "--tier", "ultra"], "known: exact"),
        (["x", "--tier", "balanced"], "exact"),
        (["x", "--res", "768x"], "1344x768"),
        (["x", "--res", "65x64"], "multiple of"),
        (["x", "--res", "2p"], "too small"),
        (["x", "--steps", "0"], "whole number of 1 or more"),
        (["x", "--steps", "1"], "N-1 forwards"),
        (["x", "--seconds", "60"], "0.9 to 5.2"),
        (["x", "--seconds", "0.1"], "0.9 to 5.2"),
        (["x", "--task", "t2v4"], "t2va"),
        (["x", "--task", "ref2va"], "--reference"),
        (["x", "--task", "t2va", "--reference", "{image}"], "ref2va"),
        (["x", "--reference", "{image}", "--first-frame", "{image}"], "drop one"),
        (["x", "--reference", "absent.png"], "no such file"),
        (["x", "--reference", "{broken}"], "broken"),
        (["x", "--reference", "{text}"], "png"),
        (["x", "--first-frame", "{broken}"], "broken"),
        (["", "--seed", "1"], "describe the clip"),
        (["word " * 2000], "shorten it"),
        (["x", "--model", "no-such-model"], "tiny-h3"),
        (["x", "--device", "gpu0"], "--device"),
        (["x", "--config", "{config}"], "tier"),
        (["x", "-o", "clip.avi"], ".mp4"),
        (["x", "-o", "/proc/clip.mp4"], "cannot write"),
        (["x", "-o", "absent/clip.mp4"], "mkdir"),
        (["x", "--receipt", "absent/r.json"], "mkdir"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    argv: list[str],
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"image": drawn(tmp_path / "i.png"), "broken": str(tmp_path / "broken.png")}
    places |= {"text": str(tmp_path / "notes.txt"), "config": str(tmp_path / "config.yaml")}
    (tmp_path / "broken.png").write_bytes((tmp_path / "i.png").read_bytes()[:80])
    (tmp_path / "notes.txt").write_text("not a reference")
    (tmp_path / "config.yaml").write_text("teir: exact\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["generate", *(word.format(**places) for word in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert fix in captured.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_run_keeps_the_old_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents that are not finite end the request with code 1 and leave the file that was there."""
    import torch

    from videoaccel.pipelines.h3_run import MiniMaxH3Run

    latents = MiniMaxH3Run.latents.fget
    assert latents is not None
    spoiled = property(lambda run: {name: x + torch.nan for name, x in latents(run).items()})
    monkeypatch.setattr(MiniMaxH3Run, "latents", spoiled)
    (tmp_path / "clip.mp4").write_bytes(b"old")
    out = ["-o", str(tmp_path / "clip.mp4"), "--receipt", str(tmp_path / "r.json")]
    assert main(["generate", "x", *SMALL, "--quiet", *out]) == 1
    assert (tmp_path / "clip.mp4").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "r.json"]
    receipt = Receipt.from_json((tmp_path / "r.json").read_text())
    assert receipt.status == "failed" and "latent is not finite" in (receipt.error or "")
    assert receipt.forwards.run == 2


@pytest.mark.parametrize("where", ["denoise", "receipt", "report"])
def test_ctrl_c_says_what_was_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from videoaccel.cli import generate
    from videoaccel.pipelines.h3_run import MiniMaxH3Run

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    place = {
        "denoise": (MiniMaxH3Run, "denoise"),
        "receipt": (Receipt, "save"),
        "report": (generate, "report"),
    }
    monkeypatch.setattr(*place[where], stop)
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "x", *SMALL, "--quiet", "-o", "clip.mp4", "--receipt", "r.json"]) == 130
    clip, receipt = "the clip is written: ", "the receipt is written: r.json"
    said = capsys.readouterr().err
    assert said.startswith("stopped; ") and said.count("\n") == 1
    assert (clip in said) == Path("clip.mp4").exists() == (where != "denoise")
    assert (receipt in said) == Path("r.json").exists() == (where != "receipt")
    if where != "receipt":
        status = "cancelled" if where == "denoise" else "completed"
        assert Receipt.from_json(Path("r.json").read_text()).status == status


@pytest.mark.parametrize(
    "argv",
    [
        ["-o", "clip.mp4", "--reference", "clip.mp4"],
        ["-o", "sub/../clip.mp4", "--reference", "{here}/clip.mp4"],
        ["-o", "link.mp4", "--reference", "clip.mp4"],
        ["-o", "hard.mp4", "--reference", "clip.mp4"],
        ["-o", "i.mp4", "--first-frame", "i.mp4"],
        ["-o", "i.mp4", "--last-frame", "i.mp4"],
        ["--receipt", "config.json", "--config", "config.json"],
        ["-o", "config.mp4", "--config", "config.mp4"],
        ["-o", "a.mp4", "--receipt", "a.json"],
        ["--receipt", "model/model_index.json", "--model", "model"],
    ],
)
def test_an_output_never_replaces_an_input(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("sub", "model"):
        Path(folder).mkdir()
    write_video("clip.mp4", np.zeros((4, 32, 32, 3), np.uint8))
    Path("link.mp4").symlink_to("clip.mp4")
    Path("hard.mp4").hardlink_to("clip.mp4")
    Path(drawn(tmp_path / "i.png")).rename("i.mp4")
    for name in ("config.json", "config.mp4", "model/model_index.json"):
        Path(name).write_text("{}")
    Path("a.json").symlink_to("a.mp4")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.exists()}
    assert main(["generate", "x", *SMALL, *(word.format(here=tmp_path) for word in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "give" in captured.err and captured.out == ""
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.exists()} == before


def test_any_name_takes_a_clip_and_any_terminal_its_report(tmp_path: Path) -> None:
    """A path with a colon and letters that an ASCII terminal lacks; a prompt that is no text, refused."""
    import os
    import subprocess
    import sys

    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": root}
    command = [sys.executable, "-m", "videoaccel.cli", "generate"]
    (tmp_path / "12:30").mkdir()
    ran = subprocess.run(
        [*command, "x", *SMALL, "-o", "12:30/clip-é.mp4"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr
    assert rb"12:30/clip-\xe9.mp4: 22 frames" in ran.stdout
    assert read_video(tmp_path / "12:30" / "clip-é.mp4").frames.shape == (22, 64, 64, 3)
    ran = subprocess.run([*command, b"\xff\xfe"], cwd=tmp_path, env=environment, capture_output=True)
    assert ran.returncode == 2 and b"UTF-8" in ran.stderr and ran.stderr.count(b"\n") == 1


@pytest.mark.parametrize("length", [300, 5_000])
@pytest.mark.parametrize("flag", ["-o", "--receipt", "--model", "--reference", "--config"])
def test_long_names_are_refused_in_one_line(
    flag: str,
    length: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    ending = {"-o": ".mp4", "--receipt": ".json", "--reference": ".png"}.get(flag, "")
    assert main(["generate", "x", flag, "n" * length + ending, "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ") and captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- exact", "holds no settings"),
        ("exact", "holds no settings"),
        ("tier: [", "--config c.yaml"),
        ("[" * 3000, "nested too deeply"),
        (None, "no such"),
    ],
)
def test_config_faults_are_in_the_users_words(
    text: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("c.yaml").write_text(text)
    assert main(["generate", "x", "--config", "c.yaml"]) == 2
    said = capsys.readouterr().err
    assert words in said and "Path" not in said and "Errno" not in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "tier", "sections"),
    [
        ("kernels: {fold: false}", "lossless", {"fold": False}),
        ("tier: exact\nkernels: {fold: false}", "lossless", {"fold": False}),
        ("tier: ultra\n", "exact", None),
        ("tier: lossless\nkernels: {fuse: false}", None, {"fuse": False}),
        ("# nothing", "lossless", {}),
    ],
)
def test_the_flags_tier_beats_the_files_before_one_is_judged_by_the_other(
    text: str, tier: str | None, sections: dict[str, bool] | None, tmp_path: Path
) -> None:
    from videoaccel.cli.generate import asked_config
    from videoaccel.config import AccelConfig, KernelsConfig

    (tmp_path / "c.yaml").write_text(text)
    config = asked_config(str(tmp_path / "c.yaml"), tier)
    kernels = {} if sections is None else {"kernels": KernelsConfig(**sections)}
    assert config.tier == (tier or "lossless") and config.sections() == kernels
    assert asked_config(None, tier) == AccelConfig(tier=tier or "exact")


@pytest.mark.parametrize(
    ("text", "tier", "words"),
    [
        ("tier: lossless\nkernels: {}", "exact", "give tier 'lossless' with kernels"),
        ("kernels: {}\nrisk_budget: 5", "lossless", "relative error"),
        ("kernels: {}\nkernels: {}", "lossless", "given twice"),
        ("exact", "lossless", "holds no settings"),
        ("kernels: {fuze: true}", "lossless", "fuse"),
    ],
)
def test_faults_of_a_file_beside_a_tier_are_one_line(
    text: str, tier: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    argv = ["--config", str(tmp_path / "c.yaml"), "--tier", tier, "-o", str(tmp_path / "a.mp4")]
    assert main(["generate", "x", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --config {tmp_path / 'c.yaml'}: ") or "holds no settings" in said
    assert words in said and said.count("\n") == 1


def test_kernels_are_refused_before_loading_for_a_family_that_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from videoaccel.cli.generate import check_kernels
    from videoaccel.config import AccelConfig
    from videoaccel.pipelines import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    argv = ["generate", "x", "--model", str(tmp_path), "--tier", "lossless", "--device", "cpu", "--quiet"]
    assert main([*argv, "-o", str(tmp_path / "clip.mp4")]) == 2
    said = capsys.readouterr().err
    assert "Wan takes no kernels yet" in said and said.count("\n") == 1
    check_kernels(AccelConfig(tier="lossless"), "tiny-h3")
    check_kernels(AccelConfig(), str(tmp_path))
