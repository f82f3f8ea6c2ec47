"""Functions that stop in the middle to ask for something: each on a thread of its own, one running at a time.

A controller calls `dense()` in the middle of its own code and wants the answer there. To batch the forwards
of many clips, each clip's loop must be able to stand still inside that call. Threads can, and here they take
turns: a worker runs only while the caller waits in `resume`, so there is nothing to lock and the order is
always the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class _Stopped(BaseException):
    """Raised in a worker's `ask` once nobody will answer; no `Exception`, so that no handler stops it."""


@dataclass(frozen=True)
class Asked:
    """A worker stands in `ask` with this question."""

    question: Any


@dataclass(frozen=True)
class Done:
    """A worker's function returned this."""

    value: Any


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class Worker:
    """Runs `work(ask)` on a thread, up to its next `ask`, whenever it is resumed.

    Args:
        work: called with `ask`, which takes a question and returns the answer given to `resume`.
        name: of the thread.
    """

    def __init__(self, work: Callable[[Callable[[Any], Any]], Any], name: str) -> None:
        self._work = work
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Asked | Done | _Raised] = queue.SimpleQueue()
        self._stopped = False
        # A daemon, so that an interrupt that comes while the thread is in a long call can end the process.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def resume(self, answer: Any = None) -> Asked | Done:
        """Let it run to its next question or its end; the first time, from the start (`answer` is unused).

        Raises:
            BaseException: what the function raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        said = self._said.get()
        if isinstance(said, _Raised):
            raise said.error
        return said

    def close(self) -> None:
        """End it, wherever it stands; nothing is left of it when this returns. Also where it has ended."""
        self._stopped = True
        self._answers.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _ask(self, question: Any) -> Any:
        if not self._stopped:
            self._said.put(Asked(question))
            answer = self._answers.get()
        if self._stopped:
            raise _Stopped
        return answer

    def _main(self) -> None:
        try:
            said: Done | _Raised = Done(self._work(self._ask))
        except _Stopped:
            return
        except BaseException as error:
            said = _Raised(error)
        self._said.put(said)
