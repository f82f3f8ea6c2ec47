"""Progress on stderr: a bar with step, stage and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from videoaccel.pipelines.request import Progress


def clock(seconds: float) -> str:
    """`1:05` for 65 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def time_left(done: int, total: int, step_seconds: list[float]) -> str:
    """Time left in the denoise loop, from the median of the steps so far; the first one may carry set-up."""
    if not step_seconds or done >= total:
        return ""
    return f"{clock(statistics.median(step_seconds[-9:]) * (total - done))} left"


class ProgressReport:
    """Shows where a request is. Use as a context manager; `enabled=False` shows nothing."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled
        self._steps: list[float] = []
        self._said = 0.0
        self._end = ExitStack()
        self._bar = None
        if enabled and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description:8}"),
                BarColumn(),
                TextColumn("{task.fields[step]}"),
                TextColumn("{task.fields[left]}"),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task("load", total=None, step="", left="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._end.enter_context(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()

    def stage(self, name: str) -> None:
        """A stage without steps begins (`load`, `mux`)."""
        if self._bar is not None:
            self._bar.update(self._task, description=name, total=None, completed=0, step="", left="")
        elif self._enabled:
            print(f"{name} ...", file=self._stream, flush=True)

    def __call__(self, progress: Progress) -> None:
        """What `Run.denoise` and `Family.generate` call."""
        if progress.stage != "denoise":
            if progress.done == 0:
                self.stage(progress.stage)
            return
        if progress.done:
            self._steps.append(progress.step_s)
        left = time_left(progress.done, progress.total, self._steps)
        step = f"step {progress.done}/{progress.total}"
        if self._bar is not None:
            total, done = progress.total, progress.done
            self._bar.update(
                self._task, description="denoise", total=total, completed=done, step=step, left=left
            )
        elif self._enabled:
            # A log wants the first and the last step, and about one line each ten seconds between.
            now = time.monotonic()
            if progress.done in (0, progress.total) or now - self._said > 10:
                self._said = now
                print(f"denoise {step}{', ' + left if left else ''}", file=self._stream, flush=True)
