"""Arguments to time an op with: random tensors of its sizes, in the order its implementations take."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from videoaccel.kernels.work import Sizes

EPS = 1e-5
TABLE_ROWS = 6
"""Rows of AdaLN's tables: a few noise levels and modalities."""


class Draw:
    """Random tensors of one type on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def tensor(self, *shape: int) -> torch.Tensor:
        """Normal, of deviation 1."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def index(self, rows: int) -> torch.Tensor:
        """The table row of each row: stretches of one, as in a packed sequence."""
        return torch.arange(rows, device=self.device) * TABLE_ROWS // max(rows, 1)


def _attention(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    keys = s.get("key_rows", s["rows"])
    return tuple(draw.tensor(1, rows, s["heads"], s["head_dim"]) for rows in (s["rows"], keys, keys))


def _linear(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.tensor(1, s["rows"], s["in_features"]), draw.tensor(s["out_features"], s["in_features"])


def _norm(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    tables = draw.tensor(TABLE_ROWS, s["width"]), draw.tensor(TABLE_ROWS, s["width"])
    return draw.tensor(s["width"]), *tables


def _norm_modulate(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.tensor(1, s["rows"], s["width"]), *_norm(s, draw), draw.index(s["rows"]), EPS


def _gate_residual(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    x = (1, s["rows"], s["width"])
    return draw.tensor(*x), draw.tensor(*x), draw.tensor(TABLE_ROWS, s["width"]), draw.index(s["rows"])


def _gate_residual_norm_modulate(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_gate_residual(s, draw), *_norm(s, draw), EPS


def _qk_norm_rope(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    rows, head_dim = s["rows"], s["head_dim"]
    heads = [draw.tensor(1, rows, s["heads"], head_dim) for _ in range(2)]
    angles = [draw.tensor(rows, s.get("rotary_dim", head_dim)) for _ in range(2)]
    return *heads, draw.tensor(head_dim), draw.tensor(head_dim), *angles, EPS


def _swiglu(s: Sizes, draw: Draw) -> tuple[Any, ...]:
    return (draw.tensor(1, s["rows"], 2 * s["width"]),)


SAMPLES: Mapping[str, Callable[[Sizes, Draw], tuple[Any, ...]]] = types.MappingProxyType(
    {
        "attention": _attention,
        "linear": _linear,
        "norm_modulate": _norm_modulate,
        "gate_residual": _gate_residual,
        "gate_residual_norm_modulate": _gate_residual_norm_modulate,
        "qk_norm_rope": _qk_norm_rope,
        "swiglu": _swiglu,
    }
)
"""Op to its positional arguments, from its sizes. An op that is not here is not timed."""
