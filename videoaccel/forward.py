"""One transformer forward of a request: what controllers are asked, and what an attention processor finds.

Below every technique, so that all of them may import it; the types of `pipelines` are named, not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from videoaccel.pipelines.layout import Layout
    from videoaccel.pipelines.request import Plan, StepInfo, Streams

Kind = Literal["dense", "sparse"]


class RunForward(Protocol):
    """Runs the transformer, or asks the next controller in; `kind` is what the receipt counts it as.

    A forward is counted sparse where any of the controllers it came through calls it so.
    """

    def __call__(self, kind: Kind = "dense") -> Streams: ...


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """One transformer forward the denoise loop is about to make.

    Attributes:
        request_id: the request it belongs to; `Run.id`.
        plan: what the request is served.
        layout: its packed sequence.
        step: the step it belongs to.
        branch: the guidance branch (`cond`, `uncond`).
        latents: the current sample of each generated stream, conditions left out: rows `(L, C)` where the
            family packs rows, `(1, C, T, H, W)` otherwise. The loop writes in place; clone what must last.
        controllers: the request's controllers by the key of their config section: how code deep in the
            transformer finds its own state of this request.
        dense: runs the forward and returns the velocity of each generated stream, in the shapes of `latents`.
    """

    request_id: str
    plan: Plan
    layout: Layout
    step: StepInfo
    branch: str
    latents: Streams
    controllers: Mapping[str, Controller]
    dense: RunForward


class Controller(Protocol):
    """One technique's part in one request: made at its start, dropped at its end.

    Several compose in the order of the config's fields: the last one is asked first, and its `call.dense()`
    asks the one before it; the first one's runs the transformer. A controller that answers without calling
    `dense` therefore spares all of those before it. After a step they are asked in the order of the fields,
    each seeing the sample as corrected so far.
    """

    def velocity(self, call: ForwardCall) -> Streams:
        """The velocity to use: `call.dense()`, or one made without the transformer, of the same shapes."""
        ...

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """Sees the sample after the scheduler's step; returns the streams it corrects, or None to leave all.

        `step.carry` of a correction reaches the final latent: all of it under Euler, little under UniPC.
        """
        ...


_current: ContextVar[ForwardCall | None] = ContextVar("videoaccel_forward", default=None)


def current_forward() -> ForwardCall | None:
    """The forward that this thread is in the middle of, its controllers' own work included.

    None where the transformer is called outside a run, as by `pipe(...)`. Each thread sees its own, and a run
    inside another one's callback does not disturb the outer one.
    """
    return _current.get()


def answer(call: ForwardCall) -> Streams:
    """The velocity of a forward: its controllers' answer, `current_forward` set meanwhile."""
    with _serving(call):
        outer = call
        for controller in call.controllers.values():
            outer = replace(call, dense=_Ask(controller, outer))
        return outer.dense()


class _Ask:
    """`dense` of a forward that a controller stands in front of."""

    def __init__(self, controller: Controller, call: ForwardCall) -> None:
        self._controller, self._call = controller, call

    def __call__(self, kind: Kind = "dense") -> Streams:
        call = self._call
        return self._controller.velocity(
            call if kind == "dense" else replace(call, dense=_As(kind, call.dense))
        )


class _As:
    """`dense` of a forward that a controller further out has named a kind of already."""

    def __init__(self, kind: Kind, dense: RunForward) -> None:
        self._kind, self._dense = kind, dense

    def __call__(self, kind: Kind = "dense") -> Streams:
        return self._dense(self._kind if kind == "dense" else kind)


@contextmanager
def _serving(call: ForwardCall) -> Iterator[None]:
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)
