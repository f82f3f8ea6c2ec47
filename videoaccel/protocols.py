"""What a technique is, as install.py sees it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from videoaccel.config import AccelConfig, Section

if TYPE_CHECKING:
    from videoaccel.pipelines.family import Family


@runtime_checkable
class Technique(Protocol):
    """One way to make a pipeline faster. Found through `Section.technique`, so that nobody lists it.

    Attributes:
        spends_risk: whether it may trade quality for time. A risk budget with nobody to spend it is refused.
    """

    spends_risk: bool

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
