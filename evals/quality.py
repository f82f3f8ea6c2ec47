"""How far one clip is from another: `python -m evals.quality A.mp4 B.mp4 [--json] [--sheet sheet.png]`.

A is the reference (the dense clip), B the clip under test. Figures from two mp4 files carry the loss of
muxing; a claim uses decoded uint8 frames before muxing, through `compare`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from evals.command import user_errors
from evals.stlpips import stlpips
from evals.vmaf import vmaf
from videoaccel.cli.inputs import check_outputs_spare_inputs
from videoaccel.errors import UserError
from videoaccel.media import Video, check_writable, read_video

Frames = npt.NDArray[np.uint8]
Metrics = dict[str, float | None]

SSIM_WINDOW = 11
SSIM_SIGMA = 1.5
STFT_WINDOW = 1024
STFT_HOP = 256
FLOOR_DBFS = -80.0


def squared_error(a_THWC: Frames, b_THWC: Frames) -> npt.NDArray[np.float64]:
    """Mean squared error of each frame, `(T,)`, in squared levels of 255."""
    pairs = zip(a_THWC, b_THWC, strict=True)
    return np.array([np.mean(np.square(b.astype(np.float64) - a.astype(np.float64))) for a, b in pairs])


def psnr_of(mse: float) -> float:
    """Peak signal-to-noise ratio, dB, of a squared error in levels of 255; infinite for none."""
    return math.inf if mse == 0 else 10.0 * math.log10(255.0**2 / mse)


def psnr(a_THWC: Frames, b_THWC: Frames) -> float:
    """PSNR of a clip, dB: one squared error over all its frames, not a mean of the frames' own dB."""
    return psnr_of(float(squared_error(a_THWC, b_THWC).mean()))


def ssim(a_THWC: Frames, b_THWC: Frames) -> float:
    """Mean SSIM over frames and RGB channels (Wang et al. 2004): Gaussian window, sigma 1.5, 11 px.

    Raises:
        UserError: frames smaller than the window.
    """
    if min(a_THWC.shape[1:3]) < SSIM_WINDOW:
        raise UserError(f"SSIM needs frames of {SSIM_WINDOW} px at least; give larger clips")
    offsets = torch.arange(SSIM_WINDOW, dtype=torch.float64) - SSIM_WINDOW // 2
    weights = torch.exp(-offsets.square() / (2 * SSIM_SIGMA**2))
    weights /= weights.sum()

    def blur(x_BHW: torch.Tensor) -> torch.Tensor:
        rows = F.conv2d(x_BHW[:, None], weights.view(1, 1, -1, 1))
        return F.conv2d(rows, weights.view(1, 1, 1, -1))[:, 0]

    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    total = 0.0
    for a_HWC, b_HWC in zip(a_THWC, b_THWC, strict=True):
        a, b = (torch.from_numpy(x.astype(np.float64)).permute(2, 0, 1) for x in (a_HWC, b_HWC))
        mean_a, mean_b = blur(a), blur(b)
        var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
        cov = blur(a * b) - mean_a * mean_b
        top = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
        total += (top / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean().item()
    return total / len(a_THWC)


def temporal(a_THWC: Frames, b_THWC: Frames) -> tuple[float | None, float | None]:
    """Flicker and motion-energy ratio of clip b against clip a; None for what the clips can't say.

    Flicker is the RMS error of the differences between neighbouring frames, in levels of 255: what comes and
    goes in b and not in a. The ratio is b's energy of those differences over a's: below 1, b moves less.
    """
    if len(a_THWC) < 2:
        return None, None
    errors, energy_a, energy_b = [], [], []
    for t in range(len(a_THWC) - 1):
        step_a = a_THWC[t + 1].astype(np.float64) - a_THWC[t]
        step_b = b_THWC[t + 1].astype(np.float64) - b_THWC[t]
        errors.append(np.mean(np.square(step_b - step_a)))
        energy_a.append(np.mean(np.square(step_a)))
        energy_b.append(np.mean(np.square(step_b)))
    moved = float(np.mean(energy_a))
    return float(np.sqrt(np.mean(errors))), float(np.mean(energy_b)) / moved if moved > 0 else None


def audio_snr(a_CN: npt.NDArray[Any], b_CN: npt.NDArray[Any]) -> float | None:
    """Power of a over power of the difference, dB; infinite for equal sounds, None for a silent a."""
    a, b = a_CN.astype(np.float64), b_CN.astype(np.float64)
    power, noise = float(np.mean(a**2)), float(np.mean((b - a) ** 2))
    if noise == 0:
        return math.inf
    return 10.0 * math.log10(power / noise) if power > 0 else None


def log_spectral_distance(a_CN: npt.NDArray[Any], b_CN: npt.NDArray[Any]) -> float:
    """Log-spectral distance, dB: per block the RMS over frequency of the level difference, then the mean.

    Blocks of 1024 samples under a Hann window, every 256. Levels below -80 dB of full scale count as -80, or
    silence against inaudible noise would outweigh everything.
    """
    window = torch.hann_window(STFT_WINDOW, dtype=torch.float64)

    def levels(x_CN: npt.NDArray[Any]) -> torch.Tensor:
        x = torch.from_numpy(x_CN.astype(np.float64))
        if x.shape[1] < STFT_WINDOW:
            x = F.pad(x, (0, STFT_WINDOW - x.shape[1]))
        blocks = x.unfold(1, STFT_WINDOW, STFT_HOP) * window
        # A full-scale sine has a peak of half the window's sum.
        size = torch.fft.rfft(blocks).abs() / (window.sum() / 2)
        return 20 * torch.log10(size.clamp_min(10 ** (FLOOR_DBFS / 20)))

    return float((levels(b_CN) - levels(a_CN)).square().mean(-1).sqrt().mean())


def latent_metrics(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 error of each stream's latent: `rel_l2_video`, `rel_l2_audio`. a is the reference.

    Raises:
        ValueError: other streams or shapes, a reference of zeros, or a value that is not finite.
    """
    if a.keys() != b.keys():
        raise ValueError(f"streams differ: {sorted(a)} and {sorted(b)}")
    out = {}
    for stream, reference in a.items():
        x, y = reference.detach().cpu().double(), b[stream].detach().cpu().double()
        if x.shape != y.shape:
            raise ValueError(f"{stream} latents differ in shape: {tuple(x.shape)} and {tuple(y.shape)}")
        distance = float((y - x).norm() / x.norm())
        if not math.isfinite(distance):
            raise ValueError(f"{stream} latents hold zeros only, or values that are not finite")
        out[f"rel_l2_{stream}"] = distance
    return out


def compare(a: Video, b: Video, *, skip: Sequence[str] = ()) -> tuple[Metrics, list[str]]:
    """Every metric of clip b against reference a, and a note for each that could not be had.

    An infinite PSNR or SNR (equal clips) stays `math.inf`; None means not measured.

    Raises:
        UserError: the clips differ in canvas, frames, fps or sample rate.
    """
    if a.frames.shape != b.frames.shape:
        shapes = [f"{x.frames.shape[0]} frames of {x.frames.shape[2]}x{x.frames.shape[1]}" for x in (a, b)]
        raise UserError(
            f"the clips differ: {shapes[0]} and {shapes[1]}; compare clips of one canvas and length"
        )
    if abs(a.fps - b.fps) > 1e-3:
        raise UserError(f"the clips differ: {a.fps:g} and {b.fps:g} fps; compare clips of one frame rate")
    notes: list[str] = []
    frame_mse = squared_error(a.frames, b.frames)
    flicker, motion = temporal(a.frames, b.frames)
    worst = int(frame_mse.argmax())
    metrics: Metrics = {
        "psnr_db": psnr_of(float(frame_mse.mean())),
        "psnr_worst_frame_db": psnr_of(float(frame_mse[worst])),
        "worst_frame": worst,
        "psnr_last_frame_db": psnr_of(float(frame_mse[-1])),
        "ssim": ssim(a.frames, b.frames),
        "st_lpips": None,
        "vmaf": None,
        "flicker": flicker,
        "motion_energy_ratio": motion,
        "audio_snr_db": None,
        "audio_lsd_db": None,
    }
    for key, measure in (
        ("st_lpips", lambda: stlpips(a.frames, b.frames)),
        ("vmaf", lambda: vmaf(a.frames, b.frames, a.fps)),
    ):
        if key in skip:
            continue
        try:
            metrics[key] = measure()
        except UserError as error:
            notes.append(str(error))
    if a.audio is None or b.audio is None:
        if a.audio is not None or b.audio is not None:
            notes.append("only one of the clips has sound: the sounds were not compared")
    else:
        if a.rate != b.rate:
            raise UserError(f"the sounds differ: {a.rate} and {b.rate} Hz; resample one of them")
        shared = min(a.audio.shape[1], b.audio.shape[1])
        if a.audio.shape[1] != b.audio.shape[1]:
            notes.append(f"the sounds differ in length: {shared} samples compared")
        sound_a, sound_b = a.audio[:, :shared], b.audio[:, :shared]
        metrics["audio_snr_db"] = audio_snr(sound_a, sound_b)
        metrics["audio_lsd_db"] = log_spectral_distance(sound_a, sound_b)
    return metrics, notes


def for_json(metrics: Metrics) -> dict[str, float | str | None]:
    """The metrics as JSON can hold them: an infinite ratio (equal clips) becomes the word "inf"."""
    return {key: "inf" if value == math.inf else value for key, value in metrics.items()}


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m evals.quality", description="Compare two clips.")
    parser.add_argument("a", metavar="A.mp4", help="the reference, such as the dense clip")
    parser.add_argument("b", metavar="B.mp4", help="the clip under test")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--sheet", metavar="PNG", help="also write a contact sheet of both and their difference"
    )
    parser.add_argument(
        "--skip", action="append", default=[], choices=["st_lpips", "vmaf"], help="leave one out"
    )
    args = parser.parse_args(argv)
    if args.sheet:
        check_writable(args.sheet, suffix=".png")
        check_outputs_spare_inputs(
            {"--sheet": args.sheet}, [("the first clip", args.a), ("the second", args.b)]
        )
    a, b = read_video(args.a), read_video(args.b)
    metrics, notes = compare(a, b, skip=args.skip)
    if args.sheet:
        from evals.contact_sheet import difference_sheet, save

        save(difference_sheet(a.frames, b.frames), args.sheet)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if args.json:
        print(json.dumps({"a": args.a, "b": args.b, **for_json(metrics), "notes": notes}, allow_nan=False))
    else:
        for key, value in metrics.items():
            shown = "not measured" if value is None else f"{value:.4f}" if isinstance(value, float) else value
            print(f"{key:22} {shown}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
