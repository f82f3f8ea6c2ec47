"""What the bundled model's codecs alone cost: the world's own clips through both VAEs, read by the verifier.

    python -m evals.reconstruction --model tiny-h3 --clips 100 --out evals/results/tiny_h3_reconstruction.json

No transformer can be judged better than this, so it is the first thing to look at after training a codec.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.adherence import FLAGS, clip_psnr, held_out_clips, judge_clips, shares, truths
from evals.command import open_run, user_errors
from evals.pixels import denormalise, normalise
from evals.quality import audio_snr
from evals.results_file import write_result
from videoaccel.cli.values import whole
from videoaccel.errors import UserError


@torch.no_grad()
def reconstruct(
    pipe: Any, clips: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device, batch: int = 8
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Frames `(T, H, W, 3)` and sound `(2, N)` of each clip after encoding (posterior mean) and decoding."""
    vae, audio_vae = pipe.vae.to(device).eval(), pipe.audio_vae.to(device).eval()
    for start in range(0, len(clips), batch):
        part = clips[start : start + batch]
        frames = torch.from_numpy(np.stack([frames for frames, _ in part])).to(device)
        decoded = denormalise(vae.decode(vae.encode(normalise(frames)).latent_dist.mode()).sample)
        waves = torch.from_numpy(np.concatenate([wave for _, wave in part])).to(device)[:, None]
        sound = audio_vae.decode(audio_vae.encode(waves).latent_dist.mode()).sample[:, 0, : waves.shape[-1]]
        yield from zip(decoded.cpu().numpy(), sound.view(len(part), 2, -1).cpu().numpy(), strict=True)


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring. Returns the exit code."""
    from videoaccel.environment import device_name

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-h3")
    parser.add_argument("--clips", type=whole(1), default=100)
    parser.add_argument("--frames", type=whole(1), default=39)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    chunks = max(1, round((arguments.frames - 5) / 17))
    if arguments.frames != 17 * chunks + 5:
        raise UserError(
            f"--frames {arguments.frames} is not 17n+5 from 22 up, which the video VAE takes: "
            f"give {17 * chunks + 5}"
        )
    pipe, device = open_run(arguments.model, arguments.out)
    specs = held_out_clips(arguments.clips, arguments.frames)
    clips = truths(specs, device)
    coded = list(reconstruct(pipe, clips, device))
    rows = judge_clips(coded, specs)
    for row, (frames, wave), (true_frames, true_wave) in zip(rows, coded, clips, strict=True):
        row["psnr_db"] = clip_psnr(frames, true_frames)
        row["audio_snr_db"] = audio_snr(true_wave, wave)
    metrics = {
        **shares(rows, FLAGS),
        "psnr_db": float(np.median([row["psnr_db"] for row in rows])),
        "audio_snr_db": float(np.median([row["audio_snr_db"] for row in rows])),
        "sharpness": float(np.mean([row["sharpness"] for row in rows])),
        "n": len(rows),
    }
    bouncing = [row["audio_snr_db"] for row in rows if row["sound"] is not None]
    if bouncing:
        metrics["audio_snr_bounce_db"] = float(np.median(bouncing))
    print({key: round(value, 2) for key, value in metrics.items()})
    write_result(
        arguments.out.stem,
        device=device_name(device),
        config={"model": arguments.model, "clips": arguments.clips, "frames": arguments.frames},
        metrics=metrics,
        rows=rows,
        path=arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
