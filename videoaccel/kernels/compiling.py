"""torch.compile of a block stack: once for all blocks, and counted, so that a receipt can say it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

BACKEND = "inductor"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for the sizes that it meets; another canvas or length compiles it anew.

    Static sizes: a clip has the same ones in all its forwards, and kernels for them are faster.
    """
    made: Callable[..., Any] = torch.compile(function, backend=BACKEND, dynamic=False)
    return made


class CompileCount:
    """Counts what torch compiles from `start` to `stop`, in this process.

    Attributes:
        count: compilations so far: one is the warm-up of a new shape; more at one shape are recompilations.
        seconds: that they took.
    """

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._since = 0.0

    def start(self) -> None:
        """Begin to count."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._begun)
        callback_handler.register_end_callback(self._ended)

    def stop(self) -> None:
        """Count no more."""
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._begun)
        callback_handler.remove_end_callback(self._ended)

    def _begun(self, _: Any) -> None:
        self._since = time.perf_counter()

    def _ended(self, _: Any) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._since
