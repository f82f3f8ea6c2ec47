"""Installs a config on a pipeline, and takes it off again."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch

from videoaccel.config import TIERS, AccelConfig, Section, check_tier
from videoaccel.errors import UserError
from videoaccel.pipelines.family import Family, family_of
from videoaccel.pipelines.request import CancelFlag, Clip, OnProgress, Request
from videoaccel.protocols import Technique
from videoaccel.receipt import Receipt, receipt_of
from videoaccel.session import serve

_MARK = (
    "videoaccel_handle"  # the attribute under which a pipeline keeps its handle, should the caller lose it
)
_MEMBERS = ("per_request", "spends()", "install()", "begin()")


class Handle:
    """What `accelerate` returns: runs requests, says what is installed, and removes it.

    Usable as a context manager, which removes on exit. Requests may run from several threads at once.

    Attributes:
        pipe: the pipeline it is installed on.
        family: the pipeline's family adapter.
        config: what was asked for.
        techniques: keys of the config sections installed, in order; empty at tier `exact`.
        model, weights: for receipts.
    """

    def __init__(
        self,
        *,
        pipe: Any,
        family: Family,
        config: AccelConfig,
        techniques: Mapping[str, Technique],
        model: str,
        weights: str,
        undo: ExitStack,
    ) -> None:
        self.pipe = pipe
        self.family = family
        self.config = config
        self.techniques = tuple(techniques)
        self.model = model
        self.weights = weights
        self._techniques = dict(techniques)
        self._undo = undo
        self._lock = threading.Lock()
        self._running = 0
        self._removed = False
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt | None:
        """The record of the request that ended last, failed and cancelled ones too; None before the first."""
        return self._receipt

    def run(
        self,
        request: Request,
        *,
        config: AccelConfig | None = None,
        prompt_embeds: torch.Tensor | None = None,
        decode: bool = True,
        on_progress: OnProgress | None = None,
        cancel: CancelFlag | None = None,
        notes: tuple[str, ...] = (),
    ) -> tuple[Clip, Receipt]:
        """Runs a request with everything that is installed: the way to run one.

        Args:
            request: what to make.
            config: another tier, budget or settings for this request alone; default: what was installed. It
                may leave out, or set otherwise, only techniques that are `per_request`.
            prompt_embeds: as for `Family.start`; encoding is then not booked.
            decode: False stops after denoising; the clip then has its latents and no frames.
            on_progress: see `OnProgress`.
            cancel: asked before each stage and each step; True stops the request.
            notes: further notes for the receipt.

        Returns:
            The clip and its receipt.

        Raises:
            UserError: the request, its config or another argument can't be served here, or this handle was
                removed.
            RequestError: the latents, or what they decode to, are not finite.
            Cancelled: `cancel` returned True.

            What ends a request that had started carries its receipt: `videoaccel.receipt.receipt_of(error)`.
        """
        config = self.config if config is None else _checked(config)
        if not isinstance(request, Request):
            raise UserError(
                f"a request must be a Request, not {type(request).__name__}; give "
                'Request(prompt="a red square"), say'
            )
        if config is not self.config:
            self._check(config)
        for what, asked, fix in (
            ("cancel", cancel, "give an Event's is_set, say"),
            ("on_progress", on_progress, "give one that takes a Progress"),
        ):
            if asked is not None and not callable(asked):
                raise UserError(f"{what} must be a function, not {type(asked).__name__}; {fix}")
        with self._counted():
            try:
                clip, receipt = serve(
                    self.pipe,
                    self.family,
                    request,
                    config=config,
                    techniques=self._techniques,
                    model=self.model,
                    weights=self.weights,
                    prompt_embeds=prompt_embeds,
                    decode=decode,
                    on_progress=on_progress,
                    cancel=cancel,
                    notes=notes,
                )
            except BaseException as error:
                self._receipt = receipt_of(error) or self._receipt
                raise
            self._receipt = receipt
        return clip, receipt

    def summary(self) -> str:
        """The last request in a few lines: what ran, what it cost, which limit bound."""
        receipt = self._receipt
        return "no request has ended yet" if receipt is None else receipt.summary()

    def remove(self) -> None:
        """Leave the pipeline bit-identical to one that was never touched. A second call does nothing.

        Every undo step runs, also after one of them raised; the error is raised at the end.

        Raises:
            UserError: a request is running on it; nothing was removed.
        """
        with self._lock:
            if self._running:
                raise UserError(f"{self._running} request(s) still run on it: cancel or await them")
            self._removed = True
        self._undo.close()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            if self._removed:
                raise UserError("this handle was removed: call accelerate() again")
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def _check(self, config: AccelConfig) -> None:
        """Raise `UserError` where a request's own config asks for what is not installed."""
        check_tier(config.tier)
        given, installed = config.sections(), self.config.sections()
        for key in given:
            if key not in installed:
                raise UserError(f"{key} is not installed on this pipeline: leave it out, or install it first")
        for key, section in installed.items():
            if given.get(key) != section and not self._techniques[key].per_request:
                raise UserError(f"{key} is installed for every request: give its section as it was installed")
        _check_spender(config, {key: self._techniques[key] for key in given})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def accelerate(
    pipe: Any, config: AccelConfig | None = None, *, model: str | None = None, weights: str = "unstated"
) -> Handle:
    """Install `config` on a diffusers pipeline; `Handle.run` then runs requests.

    `pipe(...)` called directly is not a request to this package: it makes no receipt, no controller is asked,
    and it has only what `Technique.install` changed for every forward. At tier `exact`, and with techniques
    that are `per_request`, it is the stock call, bit for bit.

    All or nothing: if any part fails, the pipeline is left as it was. Pipelines are independent of each
    other; two that share a transformer can't both carry techniques, because those sit on the transformer.

    Args:
        pipe: a pipeline of a supported family, with its transformer loaded.
        config: default `AccelConfig()`, tier `exact`, which changes nothing.
        model: the checkpoint's name, for receipts; default: the pipeline's class.
        weights: "pretrained" or "random", for receipts; a checkpoint that says of itself that it was never
            trained is "untrained" whatever is given here.

    Returns:
        The handle that takes it off again; the pipeline keeps it too, as `pipe.videoaccel_handle`.

    Raises:
        UserError: the tier is not in this version, nothing would spend the risk budget, no family serves the
            pipeline, or something is installed on it already.
    """
    config = AccelConfig() if config is None else _checked(config)
    check_tier(config.tier)
    family = family_of(pipe)
    sections = config.sections()
    techniques = {key: _technique(key, section) for key, section in sections.items()}
    _check_spender(config, techniques)
    transformers = _transformers(pipe, family)
    # At `exact` too: a transformer that carries another pipeline's techniques is not diffusers' own.
    for owner in (pipe, *transformers):
        if _MARK in vars(owner):
            raise UserError(_taken(pipe, owner))
    owners: list[Any] = [pipe, *transformers] if sections else [pipe]
    with ExitStack() as undo:
        handle = Handle(
            pipe=pipe,
            family=family,
            config=config,
            techniques=techniques,
            model=type(pipe).__name__ if model is None else model,
            weights=weights if weights == "random" or family.trained(pipe) else "untrained",
            undo=undo,
        )
        for owner in owners:
            # Straight into __dict__: a pipeline's own __setattr__ may register what it is given.
            vars(owner)[_MARK] = handle
            undo.callback(vars(owner).pop, _MARK, None)
        for key, technique in techniques.items():
            technique.install(pipe, family, config, sections[key], undo)
        # Reached the end: what was pushed so far now belongs to the handle instead of this block.
        handle._undo = undo.pop_all()
    return handle


def _checked(config: object) -> AccelConfig:
    if isinstance(config, AccelConfig):
        return config
    tier = config if isinstance(config, str) and config in TIERS else "exact"
    made = f"AccelConfig(tier={tier!r})" + (
        ", or AccelConfig.from_dict" if isinstance(config, Mapping) else ""
    )
    raise UserError(f"config must be an AccelConfig, not {type(config).__name__}; give {made}")


def _check_spender(config: AccelConfig, techniques: Mapping[str, Technique]) -> None:
    budget = config.budget()
    sections = config.sections()
    spenders = [key for key, technique in techniques.items() if technique.spends(sections[key])]
    if max(budget.video, budget.audio) > 0 and not spenders:
        raise UserError("nothing in this config spends risk_budget: leave it out, or add a section that does")


def _technique(key: str, section: Section) -> Technique:
    module, _, attribute = type(section).technique.partition(":")
    try:
        technique = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"config section {key!r} can't be installed here: {error}; leave it out") from error
    if not isinstance(technique, Technique):
        raise TypeError(f"{type(section).technique} is not a Technique: it needs {', '.join(_MEMBERS)}")
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
