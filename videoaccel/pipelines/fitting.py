"""How the kernels go into one transformer of a pipeline: what a family answers to `Family.fittings`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch

from videoaccel.kernels.registry import Choice
from videoaccel.receipt import KernelChoice

if TYPE_CHECKING:
    from videoaccel.pipelines.run import Run

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
MakeTables = Callable[["Run"], tuple[Callable[[int], AbstractContextManager[None]], int]]
"""Of an encoded run: a step's index to a context within which this thread's forwards read its tables, and the
bytes of all of them in host memory."""


class Fitting(ABC):
    """One transformer that kernels can go into.

    Attributes:
        components: its names on the pipeline; one transformer may serve several tasks.
        sizes: the ops it takes, and the sizes that selection asks about.
        fp8_sizes: the same of what FP8 linears take besides.
        transformer: that one.
        dtype: of its packed sequence.
    """

    components: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, int]]
    fp8_sizes: Mapping[str, Mapping[str, int]]
    transformer: torch.nn.Module
    dtype: torch.dtype

    @abstractmethod
    def check(self, *, fused: bool, folded: bool) -> None:
        """Raises `UserError` where hooks on the transformer would be passed by; asked at each request too."""

    @abstractmethod
    def running(self, choices: Mapping[str, Choice]) -> tuple[KernelChoice, ...]:
        """What runs for each op now, for the receipt: others may have changed it since `fuse`."""

    @abstractmethod
    def fuse(
        self, choices: Mapping[str, Choice], undo: ExitStack, *, fp8: bool, compiled: Compiler | None
    ) -> tuple[str, ...]:
        """Puts the chosen implementations in; returns what stays as it was, in words.

        One that was pinned is put in or refused.

        Args:
            choices: one for each op of `sizes`, and of `fp8_sizes` with `fp8`.
            undo: receives the inverse of every change.
            fp8: make the large linears FP8.
            compiled: compiles what the blocks run; for eager ops.

        Raises:
            UserError: something on the transformer is in the way.
        """

    @abstractmethod
    def fold(self, undo: ExitStack) -> MakeTables | None:
        """Takes what depends on the noise level alone out of the forward; None where nothing does.

        Raises:
            UserError: it can't be made ahead.
        """
