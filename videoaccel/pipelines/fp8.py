"""Linear layers whose weights are FP8 on the device, the originals waiting in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.host_memory import send_home
from videoaccel.pipelines.swap import swap_forward

OPS = ("quantize_fp8", "linear_fp8")


class Quantized(NamedTuple):
    """Rows as FP8: e4m3 codes `(B, L, D)` and float32 scales `(B, L)`."""

    codes: torch.Tensor
    scales: torch.Tensor


class Fp8Weight(NamedTuple):
    """The weight of one linear, or of several on one input, as FP8.

    Attributes:
        codes: e4m3 `(out, in)`.
        scales: float32 `(out,)`.
        sizes: output channels of each linear.
        dtype: of the original, and so of the result.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sizes: tuple[int, ...]
    dtype: torch.dtype


class Fp8:
    """The two ops, and what they make of linears.

    Args:
        ops: implementations of `OPS`.
    """

    def __init__(self, ops: Mapping[str, Callable[..., Any]]) -> None:
        self._quantize, self._linear = ops["quantize_fp8"], ops["linear_fp8"]

    def rows(self, x: torch.Tensor | Quantized) -> Quantized:
        """`(B, L, D)` as FP8; what is so already stays."""
        return x if isinstance(x, Quantized) else Quantized(*self._quantize(x))

    def convert(self, linears: Sequence[Any], undo: ExitStack) -> Fp8Weight:
        """The joint weight of plain, bias-free linears; theirs go to host memory, and come back with `undo`.

        Raises:
            UserError: one of them is not a plain `torch.nn.Linear` without bias.
        """
        for linear in linears:
            if type(linear) is not torch.nn.Linear or linear.bias is not None:
                raise UserError(
                    f"a {type(linear).__name__} can't be made FP8, only a plain linear without bias: leave "
                    "precision at 'model', or merge the LoRA before accelerate()"
                )
        # A linear at a time: a joint copy in the model's type would be one more of the largest tensors.
        parts = [self._quantize(linear.weight.detach()[None]) for linear in linears]
        weight = Fp8Weight(
            codes=torch.cat([codes[0] for codes, _ in parts]),
            scales=torch.cat([scales[0] for _, scales in parts]),
            sizes=tuple(linear.out_features for linear in linears),
            dtype=linears[0].weight.dtype,
        )
        for linear in linears:
            send_home(linear, undo)
            swap_forward(linear, _guard(linear), undo)
        return weight

    def product(self, x: torch.Tensor | Quantized, weight: Fp8Weight) -> torch.Tensor:
        """`(B, L, in)` to `(B, L, out)` in the type of the original weight."""
        rows = self.rows(x)
        made: torch.Tensor = self._linear(
            rows.codes, rows.scales, weight.codes, weight.scales, dtype=weight.dtype
        )
        return made


def _guard(linear: Any) -> Callable[..., Any]:
    """What a converted linear answers to whoever calls it by itself."""

    def forward(*_: Any, **__: Any) -> Any:
        raise UserError(
            "this linear's weight is FP8 and part of a fused product: remove() the acceleration to call it"
        )

    return forward
