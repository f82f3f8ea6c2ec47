"""What a measurement was made with: versions, commit, device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("videoaccel", "torch", "triton", "diffusers", "transformers", "numpy", "av")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a result, where they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The commit this code is at, with `-dirty` where tracked files differ.

    A copy of the tree without its history says what the variable `VIDEOACCEL_COMMIT` says, or `unknown`.
    """
    folder = Path(__file__).resolve().parent
    try:
        run = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        answer = subprocess.run(run, capture_output=True, text=True, timeout=30, check=True)
        # An installed copy may lie inside somebody else's repository: this file must be one that git tracks.
        tracked = ["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(tracked, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("VIDEOACCEL_COMMIT", "unknown")
    return answer.stdout.strip()


def command_line() -> str:
    """The command that is running, as one would type it (`python -m evals.quality a.mp4 b.mp4`)."""
    words = list(sys.orig_argv)
    words[0] = "python"
    if len(words) > 1 and words[1].endswith(("/videoaccel", "\\videoaccel")):
        words = ["videoaccel", *words[2:]]
    return shlex.join(words)


def device_name(device: Any) -> str:
    """A device in words: the card's own name, or the CPU's with the threads torch uses."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {torch.get_num_threads()} threads"
