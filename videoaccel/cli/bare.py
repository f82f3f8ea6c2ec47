"""The same request through diffusers alone, timed: what the dense row of a benchmark is compared with."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import torch

from videoaccel.pipelines.family import Run


def bare_call(run: Run) -> float | None:
    """Seconds of diffusers' own pipeline call for the request of `run`: encode, denoise and decode.

    Returns:
        The seconds, device synchronised at both ends; None for a family whose stock call isn't wired up here.
    """
    inputs = getattr(run, "_inputs", None)
    if inputs is None or not hasattr(run, "_view"):
        return None
    run._synchronise()
    start = time.perf_counter()
    # The stock loop draws a bar on stderr; the run's view of the pipeline has schedulers of its own.
    with contextlib.redirect_stderr(io.StringIO()):
        run._view(**inputs())
    run._synchronise()
    return time.perf_counter() - start


def bare_loop(run: Run) -> float | None:
    """Seconds of diffusers' own denoise loop over an encoded request, all its steps; None as `bare_call`."""
    blocks: dict[str, Any] = getattr(run, "_blocks", {})
    loop = next((block for block in blocks.values() if hasattr(block, "loop_step")), None)
    if loop is None or not hasattr(run, "_view") or not hasattr(run, "_state"):
        return None
    loop.set_progress_bar_config(disable=True)
    run._synchronise()
    start = time.perf_counter()
    with torch.no_grad():
        loop(run._view, run._state)
    run._synchronise()
    return time.perf_counter() - start
