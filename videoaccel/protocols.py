"""What a technique is, as install.py sees it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from videoaccel.config import AccelConfig, Section
from videoaccel.forward import Controller
from videoaccel.receipt import Recorder

if TYPE_CHECKING:
    from videoaccel.pipelines.family import Family, Run


@runtime_checkable
class Technique(Protocol):
    """One way to make a pipeline faster. Found through `Section.technique`, so that nobody lists it.

    It has two halves: `install` changes the pipeline once, for every request; `begin` is called at the start
    of each request that runs through `Handle.run`, and what it returns decides about that request's forwards.
    `pipe(...)` called directly has the first half only.

    Attributes:
        per_request: whether all it does goes through `begin`, so that a request may leave it out or set it
            otherwise, and a forward outside a run is stock. False: `install` counts for every request.
    """

    per_request: bool

    def spends(self, section: Section) -> bool:
        """Whether these settings may trade quality for time. A budget with nobody to spend it is refused."""
        ...

    def install(
        self, pipe: Any, family: Family, config: AccelConfig, section: Section, undo: ExitStack
    ) -> None:
        """Change `pipe` for this technique.

        Each change pushes its inverse on `undo` as soon as it is made: if this call, or a later technique's,
        raises, what was pushed runs in reverse and nothing stays installed. State of a request does not
        belong here; it lives in the request's own object.

        Args:
            pipe: the diffusers pipeline.
            family: answers every question about the model; a technique never looks at the pipeline's class.
            config: the whole config, for the tier and the budget in force.
            section: this technique's own settings.
            undo: receives the inverse of every change.

        Raises:
            UserError: the pipeline, the device or another section rules this technique out.
        """
        ...

    def begin(self, run: Run, recorder: Recorder, section: Section) -> Controller | None:
        """Its part in one request, made before anything of the request has run.

        The controller is dropped when the request ends, cancel and exception included; what else must be let
        go is registered with `recorder.on_end`. Several controllers compose as `Controller` says.

        Args:
            run: the request: `plan` and `steps` are known, `layout` comes with each forward.
            recorder: its record; `recorder.config` has the tier and the budget in force for it.
            section: the settings in force for it.

        Returns:
            None where there is nothing to decide.

        Raises:
            UserError: this request can't be served with this technique; nothing of it has run.
        """
        ...
