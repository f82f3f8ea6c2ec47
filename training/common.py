"""What the training scripts share: clips from seeds in parallel, a time budget, schedules, a log."""

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.world.render import render, scene_arrays, scene_of, soundtracks
from evals.world.spec import SIZE, ClipSpec, draw_clip
from training.muon import StackedMuon
from training.parallel import Ranks
from videoaccel.files import replacing


def workers() -> int:
    """Processes to prepare data with."""
    return max(1, (os.cpu_count() or 2) - 1)


def _specs_job(job: tuple[int, int, int]) -> list[ClipSpec]:
    start, stop, frames = job
    return [draw_clip(seed, frames=frames) for seed in range(start, stop)]


def pooled(function: Callable[[Any], Any], jobs: list[Any]) -> list[Any]:
    """Map over processes when there are cores for it.

    Forked, so that a worker does not import everything again; the jobs only use numpy and never touch the
    device.
    """
    if workers() < 3 or len(jobs) < 2:
        return [function(job) for job in jobs]
    with multiprocessing.get_context("fork").Pool(min(workers(), len(jobs))) as pool:
        return pool.map(function, jobs, chunksize=1)


def draw_specs(start: int, count: int, frames: int) -> list[ClipSpec]:
    """Training clips (no held-out combination) from consecutive seeds."""
    step = max(1, -(-count // (4 * workers())))
    jobs = [(s, min(s + step, start + count), frames) for s in range(start, start + count, step)]
    return [spec for part in pooled(_specs_job, jobs) for spec in part]


def sounds(
    specs: list[ClipSpec], device: torch.device, samples: int | None = None, batch: int = 128
) -> torch.Tensor:
    """`(N, 2, samples)` float32 soundtracks on the device."""
    return torch.cat(
        [soundtracks(specs[i : i + batch], samples, device) for i in range(0, len(specs), batch)]
    )


def scenes(specs: list[ClipSpec], batch: int = 192) -> list[dict[str, np.ndarray]]:
    """What `render` needs of every `batch` clips, made in parallel."""
    return pooled(scene_arrays, [specs[i : i + batch] for i in range(0, len(specs), batch)])


def draw(arrays: dict[str, np.ndarray], device: torch.device, size: int = SIZE) -> torch.Tensor:
    """`(B, T, H, W, 3)` uint8 on the device."""
    return render(scene_of(arrays, size).to(device))


def pictures(specs: list[ClipSpec], device: torch.device, batch: int = 192, size: int = SIZE) -> torch.Tensor:
    """`(N, T, H, W, 3)` uint8 on the device."""
    return torch.cat([draw(arrays, device, size) for arrays in scenes(specs, batch)])


class Budget:
    """A wall-clock budget in seconds, as a progress share in [0, 1]."""

    def __init__(self, seconds: float, ranks: Ranks | None = None) -> None:
        self.seconds, self.start = seconds, time.monotonic()
        self.ranks = ranks or Ranks()
        self.share = 0.0

    def tick(self) -> float:
        """The share of the time that is gone by now, the same in all processes."""
        self.share = self.ranks.agree(min(1.0, (time.monotonic() - self.start) / self.seconds))
        return self.share

    def steps(self) -> Iterator[int]:
        """Count steps until the time is up; `share` is as of the step's begin.

        Raises:
            SystemExit: the time was up before the first step, so there is nothing to save.
        """
        step = 0
        while self.tick() < 1.0:
            yield step
            step += 1
        if step == 0:
            raise SystemExit("no step ran: the data took all of --seconds; give more, or fewer clips")


def scale_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set each learning rate to `factor` times the one that its optimiser was made with."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def cosine(step: int, share: float, warm: int = 150) -> float:
    """Rate factor: linear warm-up, then a cosine over the run's `share` down to 2 %."""
    return min(1.0, (step + 1) / warm) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


class Log:
    """Prints a line and keeps it in a JSON-lines file."""

    def __init__(self, path: Path | None, quiet: bool = False) -> None:
        self.quiet = quiet
        self.path, self.start = path, time.monotonic()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, **numbers: Any) -> None:
        if self.quiet:
            return
        row = {"s": round(time.monotonic() - self.start, 1), **numbers}
        text = json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()})
        print(text, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(text + "\n")


def mixed_optimizers(
    module: torch.nn.Module, matrices: list[torch.nn.Parameter], lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices of transformer blocks (if any), AdamW for all else."""
    chosen = {id(p) for p in matrices}
    rest = [p for p in module.parameters() if p.requires_grad and id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=rest[0].is_cuda)
    ]
    if matrices:
        optimizers.append(StackedMuon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def descend(
    loss: torch.Tensor,
    parameters: list[torch.nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
    ranks: Ranks | None = None,
) -> torch.Tensor:
    """One clipped step; a non-finite gradient is dropped. Returns the gradient's norm."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    if ranks is not None:
        ranks.average(gradients)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    # Zeroed without asking whether it must be: asking would make the host wait for the device at every step.
    for gradient in gradients:
        gradient.nan_to_num_(0.0, 0.0, 0.0)
    for optimizer in optimizers:
        optimizer.step()
    return norm


PART_BYTES = 14_000_000


def save_half(module: torch.nn.Module, folder: Path, name: str) -> None:
    """Weights as float16 safetensors, as they ship, in parts small enough to carry: `NAME.0.safetensors` on.

    No part takes its place before all are written, so that a run that is cut off leaves the last whole set.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = PART_BYTES
    for key, value in module.state_dict().items():
        half = value.detach().to(torch.float16).cpu().contiguous()
        if half.nbytes > room and parts[-1]:
            parts.append({})
            room = PART_BYTES
        parts[-1][key] = half
        room -= half.nbytes
    facts = {"format": "pt", "parts": str(len(parts)), "set": str(time.time_ns())}
    with ExitStack() as whole_set:
        for index, part in enumerate(parts):
            path = whole_set.enter_context(replacing(folder / f"{name}.{index}.safetensors"))
            save_file(part, path, metadata=facts)


def load_half(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The float32 state that `save_half` wrote, or that of a component of an exported model's folder.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: the parts are of different sets, as after an interruption between two of them.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    if (folder / name).is_dir():
        (whole,) = (folder / name).glob("*.safetensors")
        return {key: value.float() for key, value in load_file(whole).items()}

    def facts(index: int) -> dict[str, str]:
        with safe_open(folder / f"{name}.{index}.safetensors", "pt") as file:
            return file.metadata()

    first = facts(0)
    state: dict[str, torch.Tensor] = {}
    for index in range(int(first["parts"])):
        if facts(index)["set"] != first["set"]:
            raise ValueError(f"{name}.{index} in {folder} is of another save than {name}.0: copy them again")
        state.update(load_file(folder / f"{name}.{index}.safetensors"))
    return {key: value.float() for key, value in state.items()}


def load_into(module: torch.nn.Module, folder: Path, name: str) -> None:
    """Put such a state in place. An exported folder leaves out weights that are tied to others.

    Raises:
        RuntimeError: the state is of another module.
    """
    state = load_half(folder, name)
    tied = dict.fromkeys(getattr(module, "_tied_weights_keys", None) or ())
    own = module.state_dict()
    module.load_state_dict({**{key: own[key] for key in tied if key not in state}, **state})


def latent_statistics(folder: Path, name: str) -> dict[str, list[float]]:
    """Mean and standard deviation of each latent channel of a VAE: of a training folder, or a model's."""
    exported = folder / name / "config.json"
    facts = json.loads((exported if exported.exists() else folder / f"{name}.json").read_text())
    return {key: list(facts[key]) for key in ("latents_mean", "latents_std")}
