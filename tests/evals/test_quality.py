"""Metrics against closed forms and against scikit-image, scipy and the weights' own package."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import torch
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from evals import contact_sheet, quality
from evals.results_file import write_result
from evals.stlpips import load_weights, stlpips
from evals.vmaf import vmaf
from videoaccel.errors import UserError
from videoaccel.media import Video, write_video


def textured(frames: int = 6, height: int = 64, width: int = 96, seed: int = 0) -> np.ndarray:
    """A smooth random texture that drifts one pixel a frame."""
    noise = np.random.default_rng(seed).normal(128, 60, (height, width + frames, 3))
    smooth = sum(np.roll(noise, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)) / 9
    wide = np.clip(smooth, 20, 230).astype(np.uint8)
    return np.stack([wide[:, t : t + width] for t in range(frames)])


def noisy(clip: np.ndarray, sigma: float, seed: int = 1) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, sigma, clip.shape)
    return np.clip(np.rint(clip + noise), 0, 255).astype(np.uint8)


def test_psnr_of_a_known_offset() -> None:
    clip = textured()
    assert quality.psnr(clip, clip + 10) == pytest.approx(20 * math.log10(255 / 10))
    assert quality.psnr(clip, clip) == math.inf


def test_psnr_pools_the_error_over_frames() -> None:
    """Errors of 0 and 10 levels: the pooled error is 50, while a mean of per-frame dB would be infinite."""
    clip = textured(2)
    other = clip.copy()
    other[1] += 10
    assert quality.psnr(clip, other) == pytest.approx(10 * math.log10(255**2 / 50))
    worse = noisy(clip, 12)
    assert quality.psnr(clip, worse) == pytest.approx(peak_signal_noise_ratio(clip, worse, data_range=255))


def test_worst_and_last_frame() -> None:
    clip = textured(5)
    other = clip.copy()
    other[2] += 20
    other[4] += 5
    metrics, _ = quality.compare(Video(clip, None, 24.0, None), Video(other, None, 24.0, None), skip=["vmaf"])
    assert metrics["worst_frame"] == 2
    assert metrics["psnr_worst_frame_db"] == pytest.approx(20 * math.log10(255 / 20))
    assert metrics["psnr_last_frame_db"] == pytest.approx(20 * math.log10(255 / 5))


@pytest.mark.parametrize("sigma", [3, 30])
def test_ssim_is_scikit_images(sigma: float) -> None:
    clip = textured(3)
    other = noisy(clip, sigma)
    expected = [
        structural_similarity(
            a,
            b,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=255,
            channel_axis=2,
        )
        for a, b in zip(clip, other, strict=True)
    ]
    assert quality.ssim(clip, other) == pytest.approx(np.mean(expected), abs=1e-9)
    assert quality.ssim(clip, clip) == pytest.approx(1.0, abs=1e-12)


def test_flicker_of_a_brightness_flip() -> None:
    """A flip of +-3 levels each frame makes every temporal difference wrong by 6."""
    clip = textured()
    sign = np.where(np.arange(len(clip)) % 2, -3, 3)[:, None, None, None]
    flicker, _ = quality.temporal(clip, (clip + sign).astype(np.uint8))
    assert flicker == pytest.approx(6.0)
    # A brightness that is wrong throughout does not flicker.
    assert quality.temporal(clip, clip + 5)[0] == 0.0


def test_motion_energy_ratio() -> None:
    clip = textured(8)
    assert quality.temporal(clip, clip)[1] == 1.0
    assert quality.temporal(clip, np.repeat(clip[:1], 8, axis=0))[1] == 0.0
    # Half the contrast around 100 has a quarter of the energy (even levels, so that halving is exact).
    even = clip // 2 * 2
    assert quality.temporal(even, even // 2 + 50)[1] == pytest.approx(0.25)
    assert quality.temporal(np.repeat(clip[:1], 8, axis=0), clip)[1] is None


def test_audio_snr_of_known_noise() -> None:
    rng = np.random.default_rng(0)
    sound, noise = rng.normal(0, 0.1, (2, 8000)), rng.normal(0, 1, (2, 8000))
    noise *= np.sqrt(np.mean(sound**2) / np.mean(noise**2)) * 10 ** (-23 / 20)
    assert quality.audio_snr(sound, sound + noise) == pytest.approx(23.0)
    assert quality.audio_snr(sound, sound) == math.inf
    assert quality.audio_snr(np.zeros((2, 8)), np.ones((2, 8))) is None


def test_log_spectral_distance() -> None:
    rng = np.random.default_rng(0)
    sound = rng.normal(0, 0.2, (2, 32_000))
    # A gain moves every level alike (white noise this loud stays above the floor at any frequency).
    assert quality.log_spectral_distance(sound, 2 * sound) == pytest.approx(20 * math.log10(2), abs=2e-3)
    assert quality.log_spectral_distance(sound, sound) == 0.0
    assert quality.log_spectral_distance(np.zeros((2, 4000)), np.full((2, 4000), 1e-6)) == 0.0
    other = 0.5 * sound + 0.1 * rng.normal(0, 0.2, sound.shape)
    levels = []
    for x in (sound, other):
        # scipy scales by the window's sum; twice that is a full-scale sine at 0 dB.
        *_, z = scipy.signal.stft(
            x,
            window=scipy.signal.get_window("hann", 1024),
            nperseg=1024,
            noverlap=768,
            boundary=None,
            padded=False,
        )
        levels.append(20 * np.log10(np.maximum(2 * np.abs(z), 1e-4)))
    expected = np.sqrt(np.mean((levels[1] - levels[0]) ** 2, axis=1)).mean()
    assert quality.log_spectral_distance(sound, other) == pytest.approx(expected, abs=1e-6)


def test_latent_metrics() -> None:
    video = torch.randn(1, 4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    audio = torch.ones(2, 6, 10)
    got = quality.latent_metrics({"video": video, "audio": audio}, {"video": 1.1 * video, "audio": audio})
    assert got["rel_l2_video"] == pytest.approx(0.1, rel=1e-5)
    assert got["rel_l2_audio"] == 0.0
    with pytest.raises(ValueError, match="streams"):
        quality.latent_metrics({"video": video}, {"audio": audio})
    with pytest.raises(ValueError, match="shape"):
        quality.latent_metrics({"video": video}, {"video": video[..., :1]})
    with pytest.raises(ValueError, match="finite"):
        quality.latent_metrics({"video": video}, {"video": video * math.nan})


def test_stlpips_is_its_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authors' own module, whose unused imports (torchvision and two more) are given empty stand-ins."""
    for name, attribute in (("torchvision", "models"), ("IPython", "embed"), ("torchsummary", "summary")):
        module = types.ModuleType(name)
        setattr(module, attribute, None)
        monkeypatch.setitem(sys.modules, name, module)
    from stlpips_pytorch import stlpips as authors

    model = authors.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
    clip = textured(2)
    other = noisy(clip, 25)
    tensors = [torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1 for x in (clip, other)]
    with torch.no_grad():
        expected = model(*tensors).mean().item()
    assert expected > 0.01
    assert stlpips(clip, other) == pytest.approx(expected, rel=1e-4)
    assert stlpips(clip, clip) == 0.0


def test_vmaf_orders_clips() -> None:
    clip = textured(6, 128, 128)
    scores = [vmaf(clip, noisy(clip, sigma), 24.0) for sigma in (0.01, 8, 40)]
    assert scores[0] > 95 and scores[0] > scores[1] + 3 and scores[1] > scores[2] + 3


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    load_weights.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    clip = Video(textured(2), None, 24.0, None)
    metrics, notes = quality.compare(clip, clip, skip=["vmaf"])
    assert metrics["st_lpips"] is None
    assert notes == ['ST-LPIPS needs its weights: pip install "videoaccel[eval]"']


def test_clips_that_differ_in_kind_are_refused() -> None:
    clip = textured(3)
    a = Video(clip, np.zeros((2, 100), np.float32), 24.0, 32_000)
    for other in (
        Video(clip[:2], None, 24.0, None),
        Video(clip, None, 25.0, None),
        Video(clip, np.zeros((2, 100), np.float32), 24.0, 48_000),
    ):
        with pytest.raises(UserError, match="differ"):
            quality.compare(a, other, skip=["st_lpips", "vmaf"])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    clip = textured(8)
    sound = np.tile(0.3 * np.sin(np.arange(10_667) * 0.1), (2, 1))
    for name, frames, audio in (("a", clip, sound), ("b", noisy(clip, 10), 0.5 * sound)):
        write_video(tmp_path / f"{name}.mp4", frames, audio=audio, rate=32_000)
    return str(tmp_path / "a.mp4"), str(tmp_path / "b.mp4")


def test_command_line(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = tmp_path / "sheet.png"
    assert quality.main([*pair, "--json", "--sheet", str(sheet)]) == 0
    out = json.loads(capsys.readouterr().out)
    assert {"psnr_db", "ssim", "st_lpips", "vmaf", "flicker", "motion_energy_ratio"} < out.keys()
    assert 20 < out["psnr_db"] < 32
    # Half the level: the difference is half the sound, 6 dB below it, and AAC adds a little.
    assert out["audio_snr_db"] == pytest.approx(6.0, abs=1.0)
    with Image.open(sheet) as image:
        assert image.width == 8 * (96 + contact_sheet.GAP) - contact_sheet.GAP + 2 * contact_sheet.GAP
    assert quality.main([pair[0], pair[0], "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["psnr_db"], out["audio_snr_db"], out["ssim"]) == ("inf", "inf", 1.0)


def test_bad_input_exits_2_with_one_line(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.mp4").write_text("no video")
    for argv in ([pair[0], str(tmp_path / "absent.mp4")], [pair[0], str(tmp_path / "broken.mp4")]):
        assert quality.main(argv) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_a_sheet_never_takes_the_place_of_a_clip(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The container is told by what is in it, so a clip may be called anything.
    clip = tmp_path / "clip.png"
    clip.write_bytes(Path(pair[0]).read_bytes())
    before = clip.read_bytes()
    skip = ["--skip", "vmaf", "--skip", "st_lpips"]
    assert quality.main([str(clip), pair[1], *skip, "--sheet", str(clip)]) == 2
    assert "--sheet" in capsys.readouterr().err
    assert clip.read_bytes() == before


def test_sheets_show_the_frames_they_should(tmp_path: Path) -> None:
    assert contact_sheet.pick(39, 5) == [0, 10, 19, 28, 38]
    assert contact_sheet.pick(3, 8) == [0, 1, 2]
    a = np.stack([np.full((32, 48, 3), 10 * t, np.uint8) for t in range(10)])
    sheet = np.asarray(contact_sheet.difference_sheet(a, a + 5, columns=2))
    rows = [contact_sheet.GAP + contact_sheet.LABEL_HEIGHT + 16 + r * (32 + 18 + 4) for r in range(3)]
    left, right = contact_sheet.GAP + 24, contact_sheet.GAP + 48 + contact_sheet.GAP + 24
    assert [[int(sheet[y, x, 0]) for x in (left, right)] for y in rows] == [[0, 90], [5, 95], [20, 20]]
    several = contact_sheet.clips_sheet([a, a[:3, :16]], ["one", "two " * 100], columns=4, height=16)
    contact_sheet.save(several, tmp_path / "several.png")
    with Image.open(tmp_path / "several.png") as image:
        assert image.size == several.size


def test_contact_sheet_command(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sheet.png"
    heights = []
    for argv in ([*pair], [*pair, "--rows"], [pair[0]]):
        assert contact_sheet.main([*argv, "--columns", "4", "-o", str(out)]) == 0
        with Image.open(out) as image:
            heights.append((image.height - contact_sheet.GAP) // (64 + 18 + 4))
    # Two clips and their difference; two clips; one clip.
    assert heights == [3, 2, 1]
    assert contact_sheet.main([*pair, "--label", "one", "-o", str(out)]) == 2
    assert "--label once a clip" in capsys.readouterr().err
    assert contact_sheet.main([pair[0], "--label", "two\nlines", "-o", str(out)]) == 0
    for columns in ("0", "-3"):
        with pytest.raises(SystemExit) as stopped:
            contact_sheet.main([*pair, "--columns", columns, "-o", str(out)])
        assert stopped.value.code == 2 and "whole number of 1 or more" in capsys.readouterr().err


def test_clips_of_two_lengths_are_told_how_to_be_shown(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_video(tmp_path / "short.mp4", np.zeros((3, 64, 96, 3), np.uint8))
    argv = [pair[0], str(tmp_path / "short.mp4"), "-o", str(tmp_path / "sheet.png")]
    assert contact_sheet.main(argv) == 2
    assert "give --rows" in capsys.readouterr().err
    assert contact_sheet.main([*argv, "--rows"]) == 0


def test_result_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_result(
        "r", device="cpu", config={"steps": 2}, metrics={"x": np.float32(1.5)}, rows=[{"y": [1]}], path=path
    )
    held = json.loads(path.read_text())
    assert list(held) == [
        "name",
        "command",
        "commit",
        "date",
        "device",
        "versions",
        "config",
        "metrics",
        "rows",
    ]
    assert held["metrics"] == {"x": 1.5} and held["rows"] == [{"y": [1]}]
    assert held["versions"]["torch"] == torch.__version__
    before = path.read_bytes()
    for metrics, rows in (({"x": math.nan}, []), ({"x": {"y": 1}}, []), ({}, [{"y": math.inf}])):
        with pytest.raises(ValueError):
            write_result("r", device="cpu", config={}, metrics=metrics, rows=rows, path=path)
    assert path.read_bytes() == before
