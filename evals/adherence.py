"""Does the bundled model do what it is told? Prompts never trained on, read back from finished mp4 files.

    python -m evals.adherence --model tiny-h3 --clips 500 --out evals/results/tiny_h3_adherence.json

Samples held-out captions (every colour-shape-motion combination in them was kept out of training) densely, in
the three workflows, with fewer plain steps, and at 124 frames; writes each clip as an mp4; and lets the
verifier of evals/world, which has no learned weights and no view of the caption, read it.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.command import open_run, user_errors
from evals.results_file import write_result
from evals.sampling import Sampled, Sampler
from evals.world.render import build_scene, render, soundtrack
from evals.world.spec import ClipSpec, draw_clip
from evals.world.verify import judge, judge_reference, read_mp4
from videoaccel.cli.values import whole
from videoaccel.errors import UserError
from videoaccel.media import write_video

RATE = 32000
FIRST_SEED = 900_000_000
DENSE = 49
PLAIN = (25, 12, 8, 4)
COUNTED = (
    "N forwards are N + 1 steps as diffusers counts them. "
    f"Dense clips take {DENSE} forwards ({DENSE + 1} steps). "
    "The N of plainN_psnr_db and all_N_plain_steps are forwards: "
    + ", ".join(f"{n} are {n + 1} steps" for n in PLAIN)
)
"""Said in the result: a metric's name alone could be read either way."""


def held_out_clips(count: int, frames: int) -> list[ClipSpec]:
    """The evaluation's clips: fixed seeds, held-out combinations only."""
    return [draw_clip(FIRST_SEED + index, frames=frames, held_out=True) for index in range(count)]


def _judge_file(job: tuple[str, ClipSpec], reference: bool) -> dict[str, Any]:
    path, spec = job
    reading = read_mp4(path)
    verdict = (judge_reference if reference else judge)(reading, spec)
    row = {
        name: getattr(verdict, name)
        for name in ("color", "shape", "motion", "all", "speed", "pan", "sound", "silence")
    }
    seen = [f"{item.color} {item.shape} {item.motion} {item.speed}" for item in reading.objects]
    return {
        **row,
        "objects": len(spec.objects),
        "caption": spec.caption(),
        "seen": "; ".join(seen),
        "sharpness": reading.sharpness,
    }


def judge_clips(
    clips: Sequence[tuple[np.ndarray, np.ndarray]], specs: Sequence[ClipSpec], *, reference: bool = False
) -> list[dict[str, Any]]:
    """Mux decoded clips and read them back, in parallel where there are cores."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for index, ((frames, wave), spec) in enumerate(zip(clips, specs, strict=True)):
            path = os.path.join(folder, f"{index:04d}.mp4")
            write_video(path, frames, fps=24, audio=wave, rate=RATE)
            jobs.append((path, spec))
        work = partial(_judge_file, reference=reference)
        cores = os.cpu_count() or 1
        if cores < 3:
            return [work(job) for job in jobs]
        with multiprocessing.get_context("spawn").Pool(cores) as pool:
            return pool.map(work, jobs, chunksize=4)


def shares(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Share of clips, in per cent, in which each flag holds, of those to which it applies."""
    found = {}
    for name in names:
        values = [bool(row[name]) for row in rows if row[name] is not None]
        if values:
            found[name] = 100.0 * sum(values) / len(values)
    return found


def clip_psnr(first: np.ndarray, second: np.ndarray) -> float:
    """dB over all frames of a clip, uint8."""
    error = np.mean((first.astype(np.float64) - second.astype(np.float64)) ** 2)
    return float(10 * math.log10(255.0**2 / max(error, 1e-9)))


def truth(spec: ClipSpec) -> tuple[np.ndarray, np.ndarray]:
    """The world's own clip of a spec: frames and sound."""
    return render(build_scene([spec]))[0].numpy(), soundtrack(spec)


def truths(
    specs: Sequence[ClipSpec], device: torch.device, batch: int = 64
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`truth` of many clips, rendered on the device."""
    frames = []
    for start in range(0, len(specs), batch):
        frames += list(render(build_scene(specs[start : start + batch]).to(device)).cpu().numpy())
    return [(clip, soundtrack(spec)) for clip, spec in zip(frames, specs, strict=True)]


class Evaluation:
    """Samples, judges and keeps the rows; one method a question."""

    def __init__(self, sampler: Sampler, count: int) -> None:
        self.sampler, self.count = sampler, count
        self.metrics: dict[str, Any] = {"n": count}
        self.rows: list[dict[str, Any]] = []
        self.dense: list[np.ndarray] = []

    def _keep(self, name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.rows += [{"run": name, **row} for row in rows]
        print(name, {key: round(value, 1) for key, value in shares(rows, FLAGS).items()}, flush=True)
        return rows

    def _decoded(self, clips: list[Sampled]) -> list[tuple[np.ndarray, np.ndarray]]:
        return list(self.sampler.decode(clips))

    def verifier(self, frames: int, suffix: str = "") -> None:
        specs = held_out_clips(self.count, frames)
        rows = self._keep(f"truth{suffix}", judge_clips(truths(specs, self.sampler.device), specs))
        self.metrics[f"verifier_accuracy{suffix}"] = shares(rows, ["all"])["all"]
        # Not part of `all`, and no model can be measured to better than these either.
        for name, share in shares(rows, ["speed", "sound"]).items():
            self.metrics[f"verifier_{name}{suffix}"] = share
        self.metrics[f"sharpness_truth{suffix}"] = float(np.mean([row["sharpness"] for row in rows]))

    def dense_clips(self, frames: int, batch: int, suffix: str = "", count: int | None = None) -> None:
        specs = held_out_clips(count or self.count, frames)
        clips = self._decoded(self.sampler.sample(specs, forwards=DENSE, batch=batch))
        rows = self._keep(f"dense{suffix}", judge_clips(clips, specs))
        self.metrics.update({f"{key}{suffix}": value for key, value in shares(rows, FLAGS).items()})
        two = [row for row in rows if row["objects"] == 2]
        self.metrics[f"all_two_objects{suffix}"] = shares(two, ["all"]).get("all")
        self.metrics[f"sharpness{suffix}"] = float(np.mean([row["sharpness"] for row in rows]))
        if not suffix:
            self.dense = [frames for frames, _ in clips]

    def fewer_steps(self, forwards: int, judged: bool, batch: int) -> None:
        specs = held_out_clips(self.count, 39)
        clips = self._decoded(self.sampler.sample(specs, forwards=forwards, batch=batch))
        psnr = [clip_psnr(clip, dense) for (clip, _), dense in zip(clips, self.dense, strict=True)]
        self.metrics[f"plain{forwards}_psnr_db"] = float(np.median(psnr))
        print(f"plain {forwards}: {np.median(psnr):.2f} dB", flush=True)
        if judged:
            rows = self._keep(f"plain{forwards}", judge_clips(clips, specs))
            self.metrics[f"all_{forwards}_plain_steps"] = shares(rows, ["all"])["all"]

    def references(self, frames: int, batch: int, suffix: str = "", count: int | None = None) -> None:
        specs = [
            draw_clip(FIRST_SEED + i, frames=frames, held_out=True, objects=1)
            for i in range(count or self.count)
        ]
        clips = self._decoded(self.sampler.sample(specs, task="ref2va", batch=batch))
        rows = self._keep(f"ref2va{suffix}", judge_clips(clips, specs, reference=True))
        self.metrics.update(
            {f"ref_{key}{suffix}": value for key, value in shares(rows, ["color", "shape", "motion"]).items()}
        )

    def keyframes(self, batch: int, count: int = 100) -> None:
        """How near the ends of an `fl2va` clip come to its keyframes, and whether it still obeys."""
        specs = held_out_clips(min(count, self.count), 39)
        clips = self._decoded(
            self.sampler.sample(specs, task="fl2va", anchors=("first", "last"), batch=batch)
        )
        rows = self._keep("fl2va", judge_clips(clips, specs))
        self.metrics["fl_all"] = shares(rows, ["all"])["all"]
        true = truths(specs, self.sampler.device)
        for name, index in (("first", 0), ("last", -1)):
            psnr = [
                clip_psnr(c[index][None], t[index][None]) for (c, _), (t, _) in zip(clips, true, strict=True)
            ]
            self.metrics[f"fl_{name}_psnr_db"] = float(np.median(psnr))


def generate_time(path: Path) -> float:
    """What `evals.generate_time` measured, out of its result file.

    Raises:
        UserError: no such file, or not one of that command's.
    """
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["metrics"]["generate_s_2cores"])
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError):
        reason = "it has no metrics.generate_s_2cores"
    raise UserError(f"--generate-time {path}: {reason}; give a result file of evals.generate_time")


FLAGS = ("color", "shape", "motion", "all", "speed", "pan", "sound", "silence")


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring. Returns the exit code."""
    from videoaccel.environment import device_name

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-h3")
    parser.add_argument("--clips", type=whole(1), default=500)
    parser.add_argument("--long-clips", type=whole(1), default=500, help="clips of 124 frames")
    parser.add_argument("--batch", type=whole(1), default=64)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--guidance", type=float, nargs=2, help="video and audio, for a model without it in its weights"
    )
    parser.add_argument(
        "--amp", action="store_true", help="bfloat16 autocast: faster, for looks during training"
    )
    parser.add_argument(
        "--quick", action="store_true", help="dense, 12 and 25 plain steps, and references only"
    )
    parser.add_argument("--generate-time", type=Path, help="result file of evals.generate_time to take over")
    arguments = parser.parse_args(argv)
    timed = None if arguments.generate_time is None else generate_time(arguments.generate_time)
    pipe, device = open_run(arguments.model, arguments.out)
    guidance = tuple(arguments.guidance) if arguments.guidance else None
    sampler = Sampler(pipe, device, amp=arguments.amp, guidance=guidance)
    evaluation = Evaluation(sampler, arguments.clips)
    if timed is not None:
        evaluation.metrics["generate_s_2cores"] = timed
    plain = PLAIN[:2] if arguments.quick else PLAIN
    settings = {
        "model": arguments.model,
        "clips": arguments.clips,
        "long_clips": arguments.long_clips,
        "forwards": DENSE,
        "plain_forwards": list(plain),
        "counted": COUNTED,
        "guidance": guidance,
        "amp": arguments.amp,
    }
    batch = arguments.batch
    long_batch = max(1, batch // 3)  # about as many rows
    questions: list[Callable[[], None]] = [
        lambda: evaluation.dense_clips(39, batch),
        lambda: evaluation.references(39, batch),
    ]
    for forwards in plain:
        questions.append(partial(evaluation.fewer_steps, forwards, not arguments.quick, batch))
    if not arguments.quick:
        questions += [
            lambda: evaluation.verifier(39),
            lambda: evaluation.verifier(124, "_124"),
            lambda: evaluation.dense_clips(124, long_batch, "_124", arguments.long_clips),
            lambda: evaluation.references(124, long_batch, "_124", arguments.long_clips),
            lambda: evaluation.keyframes(batch),
        ]
    # Saved after each question: a run that is cut off keeps what it has, and says that it is not complete.
    for number, question in enumerate(questions, 1):
        question()
        write_result(
            arguments.out.stem,
            device=device_name(device),
            config={**settings, "complete": number == len(questions)},
            metrics=evaluation.metrics,
            rows=evaluation.rows,
            path=arguments.out,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
