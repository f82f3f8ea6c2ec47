"""What the training scripts share: clips from seeds in parallel, a time budget, schedules, a log."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.world.render import build_scene, render, soundtrack
from evals.world.spec import SIZE, ClipSpec, draw_clip

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


def workers() -> int:
    """Processes to prepare data with."""
    return max(1, (os.cpu_count() or 2) - 1)


def _specs_job(job: tuple[int, int, int]) -> list[ClipSpec]:
    start, stop, frames = job
    return [draw_clip(seed, frames=frames) for seed in range(start, stop)]


def _sound_job(specs: list[ClipSpec]) -> np.ndarray:
    return np.stack([soundtrack(spec) for spec in specs])


def pooled(function: Callable[[Any], Any], jobs: list[Any]) -> list[Any]:
    """Map over processes when there are cores for it. Fork would break once CUDA is up, so spawn."""
    if workers() < 3 or len(jobs) < 2:
        return [function(job) for job in jobs]
    with multiprocessing.get_context("spawn").Pool(min(workers(), len(jobs))) as pool:
        return pool.map(function, jobs, chunksize=1)


def draw_specs(start: int, count: int, frames: int) -> list[ClipSpec]:
    """Training clips (no held-out combination) from consecutive seeds."""
    step = max(1, -(-count // (4 * workers())))
    jobs = [(s, min(s + step, start + count), frames) for s in range(start, start + count, step)]
    return [spec for part in pooled(_specs_job, jobs) for spec in part]


def sounds(specs: list[ClipSpec]) -> np.ndarray:
    """`(N, 2, samples)` float32 soundtracks."""
    step = max(1, -(-len(specs) // (2 * workers())))
    return np.concatenate(pooled(_sound_job, [specs[i : i + step] for i in range(0, len(specs), step)]))


def pictures(specs: list[ClipSpec], device: torch.device, batch: int = 64, size: int = SIZE) -> torch.Tensor:
    """`(N, T, H, W, 3)` uint8 on the device."""
    parts = [render(build_scene(specs[i : i + batch], size).to(device)) for i in range(0, len(specs), batch)]
    return torch.cat(parts)


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """uint8 `(B, T, H, W, 3)` to the video VAE's pixel space `(B, 3, T, H, W)` float32."""
    mean = torch.tensor(PIXEL_MEAN, device=frames.device).view(1, 3, 1, 1, 1)
    std = torch.tensor(PIXEL_STD, device=frames.device).view(1, 3, 1, 1, 1)
    return (frames.permute(0, 4, 1, 2, 3).float() / 255.0 - mean) / std


def denormalise(pixels: torch.Tensor) -> torch.Tensor:
    """The inverse of `normalise`, rounded and clamped."""
    mean = torch.tensor(PIXEL_MEAN, device=pixels.device).view(1, 3, 1, 1, 1)
    std = torch.tensor(PIXEL_STD, device=pixels.device).view(1, 3, 1, 1, 1)
    return ((pixels.float() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)


class Budget:
    """A wall-clock budget in seconds, as a progress share in [0, 1]."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, time.monotonic()

    @property
    def share(self) -> float:
        return min(1.0, (time.monotonic() - self.start) / self.seconds)

    def steps(self) -> Iterator[int]:
        """Count steps until the time is up."""
        step = 0
        while self.share < 1.0:
            yield step
            step += 1


class Log:
    """Prints a line and keeps it in a JSON-lines file."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.start = path, time.monotonic()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, **numbers: Any) -> None:
        row = {"s": round(time.monotonic() - self.start, 1), **numbers}
        text = json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()})
        print(text, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(text + "\n")


def save_half(module: torch.nn.Module, path: Path) -> None:
    """Weights as float16 safetensors, the form that ships."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().to(torch.float16).cpu().contiguous() for key, value in module.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})
