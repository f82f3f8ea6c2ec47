"""What a denoise loop calls in the transformer's place: every forward of a run passes through the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

Forward = Callable[[Any, str, dict[str, Any]], tuple[Any, ...]]
"""Answers a call: the transformer, the guidance branch, the keyword arguments; returns what it would."""


class StandIn:
    """A transformer on a run's own view of the pipeline. Its call goes to the run, all else to the model."""

    def __init__(self, model: Any, forward: Forward) -> None:
        self._model, self._forward = model, forward
        self._branch = "cond"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Pipelines ask `isinstance(component, Module)` for the device they run on.
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def cache_context(self, name: str, **kwargs: Any) -> AbstractContextManager[Any]:
        """The model's own; Wan's loop says here which guidance branch comes next."""
        self._branch = name
        context: AbstractContextManager[Any] = self._model.cache_context(name, **kwargs)
        return context

    def __call__(self, **kwargs: Any) -> tuple[Any, ...]:
        return self._forward(self._model, self._branch, kwargs)


def put(view: Any, name: str, value: Any) -> None:
    """Sets an attribute past a pipeline's `__setattr__`, which would rewrite its config for a component."""
    object.__setattr__(view, name, value)


def looped(view: Any, components: Iterable[str], forward: Forward) -> Any:
    """A shallow copy of `view` whose transformers among `components` are stand-ins that call `forward`."""
    copied = copy.copy(view)
    for name in components:
        model = getattr(view, name, None)
        if model is not None:
            put(copied, name, StandIn(model, forward))
    return copied
