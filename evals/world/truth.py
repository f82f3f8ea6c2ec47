"""How often is the verifier right about the world's own clips? Rendered, muxed to mp4, read back, judged.

    python -m evals.world.truth --clips 300 --frames 39 --out evals/results/world_truth_39.json

Reported before any score of a model: no model can be measured to better than this. `--blur`, `--noise` and
`--hue` spoil the frames first, as a small model's decoder does.
"""

import argparse
import itertools
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from scipy import ndimage

from evals.command import user_errors
from evals.results_file import write_result
from evals.world.render import SAMPLE_RATE, build_scene, render, soundtrack
from evals.world.spec import FPS, draw_clip
from evals.world.verify import judge, read_mp4
from videoaccel.cli.values import whole
from videoaccel.environment import device_name
from videoaccel.media import check_writable, write_video

FLAGS = ("color", "shape", "motion", "all", "speed", "pan", "sound", "silence")
# Disjoint from the seeds 0-299 that the verifier's thresholds were chosen on.
FIRST_SEED = 100_000


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Done to frames before muxing: blur (sigma, px), noise (sigma, of 255), hue (degrees, either way)."""

    blur: float = 0.0
    noise: float = 0.0
    hue: float = 0.0


def spoil(frames: np.ndarray, damage: Damage, seed: int) -> np.ndarray:
    """Damaged copy of `(T, H, W, 3)` uint8 frames; the seed decides which way the hue turns."""
    rng = np.random.default_rng([seed, 3])
    out: np.ndarray = frames.astype(np.float32)
    if damage.hue:
        # A turn about the grey axis of the colour cube.
        angle = math.radians(damage.hue) * float(rng.choice((-1.0, 1.0)))
        skew = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
        out = out @ (np.eye(3) + math.sin(angle) * skew + (1 - math.cos(angle)) * skew @ skew).T
    if damage.blur:
        out = ndimage.gaussian_filter(out, (0, damage.blur, damage.blur, 0))
    if damage.noise:
        out = out + rng.normal(0.0, damage.noise, out.shape)
    return np.rint(np.clip(out, 0, 255)).astype(np.uint8)


def read_back(seeds: Sequence[int], frames: int, damage: Damage) -> list[dict[str, Any]]:
    """Render, mux, read and judge the clips of some seeds: one row of flags each."""
    torch.set_num_threads(1)
    specs = [draw_clip(seed, frames=frames, held_out=None) for seed in seeds]
    rows: list[dict[str, Any]] = []
    # A few at a time: the renderer's float pictures would crowd out the cache, or the memory.
    groups = [specs[start : start + 4] for start in range(0, len(specs), 4)]
    pictures = itertools.chain.from_iterable(render(build_scene(group)).numpy() for group in groups)
    with tempfile.TemporaryDirectory() as folder:
        for spec, picture in zip(specs, pictures, strict=True):
            path = Path(folder) / f"{spec.seed}.mp4"
            if damage != Damage():
                picture = spoil(picture, damage, spec.seed)
            write_video(path, picture, fps=FPS, audio=soundtrack(spec), rate=SAMPLE_RATE)
            reading = read_mp4(path)
            verdict = judge(reading, spec)
            seen = [f"{item.color} {item.shape} {item.motion} {item.speed}" for item in reading.objects]
            row: dict[str, Any] = {flag: getattr(verdict, flag) for flag in FLAGS}
            rows.append({"seed": spec.seed, "caption": spec.caption(), "seen": "; ".join(seen), **row})
    return rows


def accuracy(rows: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    """Per cent of clips in which each flag holds, over those it applies to, and the number of clips `n`."""
    found: dict[str, float | int] = {}
    for flag in FLAGS:
        values = [bool(row[flag]) for row in rows if row[flag] is not None]
        if values:
            found[flag] = 100.0 * sum(values) / len(values)
            found[f"n_{flag}"] = len(values)
    return {**{key: value for key, value in found.items() if key in (*FLAGS, "n_sound")}, "n": len(rows)}


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=whole(1), default=300)
    parser.add_argument("--frames", type=whole(2), default=39)
    parser.add_argument("--first-seed", type=whole(0), default=FIRST_SEED)
    parser.add_argument("--blur", type=float, default=0.0, help="sigma in pixels")
    parser.add_argument("--noise", type=float, default=0.0, help="sigma in units of 1/255")
    parser.add_argument("--hue", type=float, default=0.0, help="degrees, either way")
    parser.add_argument("--processes", type=whole(1), default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    spoilt = (arguments.blur, arguments.noise, arguments.hue)
    if not all(map(math.isfinite, spoilt)) or min(arguments.blur, arguments.noise) < 0:
        parser.error("--blur, --noise and --hue take numbers, the first two at least 0")
    check_writable(arguments.out, suffix=".json")
    damage = Damage(blur=arguments.blur, noise=arguments.noise, hue=arguments.hue)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.clips)
    size = 8 if arguments.frames <= 60 else 2
    chunks = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    work = partial(read_back, frames=arguments.frames, damage=damage)
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for part in track(pool.imap(work, chunks), total=len(chunks), description="reading clips back"):
            rows.extend(part)
    metrics = accuracy(rows)
    wrong = [row for row in rows if any(row[flag] is False for flag in FLAGS)]
    write_result(
        arguments.out.stem,
        device=device_name(torch.device("cpu")),
        config={
            "clips": arguments.clips,
            "frames": arguments.frames,
            "first_seed": arguments.first_seed,
            **vars(damage),
        },
        metrics=metrics,
        # Only the clips with something wrong: the rest say nothing more.
        rows=wrong,
        path=arguments.out,
    )
    for name, value in metrics.items():
        print(f"{name:8s} {value:g}" if name.startswith("n") else f"{name:8s} {value:.2f} %")
    for row in wrong:
        print(f"{row['seed']}: asked {row['caption']!r}, seen {row['seen']!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
