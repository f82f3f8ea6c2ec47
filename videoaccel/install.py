"""Installs a config on a pipeline, and takes it off again."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from videoaccel.config import AccelConfig, Section, check_tier
from videoaccel.errors import UserError
from videoaccel.pipelines.family import Family, family_of
from videoaccel.protocols import Technique

_MARK = (
    "videoaccel_handle"  # the attribute under which a pipeline keeps its handle, should the caller lose it
)


class Handle:
    """What `accelerate` returns: says what is installed, and removes it.

    Usable as a context manager, which removes on exit.

    Attributes:
        pipe: the pipeline it is installed on.
        family: the pipeline's family adapter.
        config: what was asked for.
        techniques: keys of the config sections installed, in order; empty at tier `exact`.
    """

    def __init__(self, *, pipe: Any, family: Family, config: AccelConfig, undo: ExitStack) -> None:
        self.pipe = pipe
        self.family = family
        self.config = config
        self.techniques = tuple(config.sections())
        self._undo = undo

    def remove(self) -> None:
        """Leave the pipeline bit-identical to one that was never touched. A second call does nothing.

        Every undo step runs, also after one of them raised; the error is raised at the end.
        """
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def accelerate(pipe: Any, config: AccelConfig | None = None) -> Handle:
    """Install `config` on a diffusers pipeline.

    All or nothing: if any part fails, the pipeline is left as it was. Pipelines are independent of each
    other; two that share a transformer can't both carry techniques, because those sit on the transformer.

    Args:
        pipe: a pipeline of a supported family, with its transformer loaded.
        config: default `AccelConfig()`, tier `exact`, which changes nothing.

    Returns:
        The handle that takes it off again; the pipeline keeps it too, as `pipe.videoaccel_handle`.

    Raises:
        UserError: the tier is not in this version, nothing would spend the risk budget, no family serves the
            pipeline, or something is installed on it already.
    """
    config = AccelConfig() if config is None else config
    check_tier(config.tier)
    family = family_of(pipe)
    sections = config.sections()
    techniques = {key: _technique(key, section) for key, section in sections.items()}
    spenders = [key for key, technique in techniques.items() if technique.spends_risk]
    budget = config.budget()
    if max(budget.video, budget.audio) > 0 and not spenders:
        raise UserError("nothing in this config spends risk_budget: leave it out, or add a section that does")
    transformers = _transformers(pipe, family)
    # At `exact` too: a transformer that carries another pipeline's techniques is not diffusers' own.
    for owner in (pipe, *transformers):
        if _MARK in vars(owner):
            raise UserError(_taken(pipe, owner))
    owners: list[Any] = [pipe, *transformers] if sections else [pipe]
    with ExitStack() as undo:
        handle = Handle(pipe=pipe, family=family, config=config, undo=undo)
        for owner in owners:
            # Straight into __dict__: a pipeline's own __setattr__ may register what it is given.
            vars(owner)[_MARK] = handle
            undo.callback(vars(owner).pop, _MARK, None)
        for key, technique in techniques.items():
            technique.install(pipe, family, config, sections[key], undo)
        # Reached the end: what was pushed so far now belongs to the handle instead of this block.
        handle._undo = undo.pop_all()
    return handle


def _technique(key: str, section: Section) -> Technique:
    module, _, attribute = type(section).technique.partition(":")
    try:
        technique = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"config section {key!r} can't be installed here: {error}; leave it out") from error
    if not isinstance(technique, Technique):
        raise TypeError(f"{type(section).technique} is not a Technique: it needs spends_risk and install()")
    return technique


def _transformers(pipe: Any, family: Family) -> list[torch.nn.Module]:
    """The transformers that are loaded on `pipe`, each once."""
    found: dict[int, torch.nn.Module] = {}
    for task in family.tasks:
        try:
            stacks = [family.stack(pipe, component) for component in family.components(pipe, task)]
        except UserError:  # the pipeline was built or loaded for other tasks only
            continue
        found.update((id(stack.model), stack.model) for stack in stacks)
    return list(found.values())


def _taken(pipe: Any, owner: Any) -> str:
    if owner is pipe:
        return f"this pipeline is accelerated already: call pipe.{_MARK}.remove() first"
    return (
        f"its {type(owner).__name__} is shared with a pipeline that is accelerated already: call remove() on "
        f"its {_MARK} first, or load this pipeline with a transformer of its own"
    )
