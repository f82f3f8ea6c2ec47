"""What one forward of a family's transformer asks of the ops, for estimates that need no weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from videoaccel.kernels.work import OpCall


@dataclass(frozen=True, kw_only=True)
class ForwardOps:
    """The ops of one forward.

    Attributes:
        title: the model, and how large it is.
        size: the clip, in words.
        rows: of the sequence.
        calls: every call of an op that the package knows, and every matrix multiplication (`linear`).
    """

    title: str
    size: str
    rows: int
    calls: tuple[OpCall, ...]

    @property
    def weights(self) -> int:
        """Parameters in its matrices."""
        return sum(
            call.count * call.sizes["in_features"] * call.sizes["out_features"]
            for call in self.calls
            if call.op == "linear"
        )


def linear(rows: int, inner: int, outer: int, count: int = 1) -> OpCall:
    """`count` multiplications of (rows, inner) by a weight of (outer, inner)."""
    return OpCall(op="linear", sizes={"rows": rows, "in_features": inner, "out_features": outer}, count=count)


def attention(rows: int, key_rows: int, heads: int, head_dim: int, count: int = 1) -> OpCall:
    """`count` attentions of `rows` queries over `key_rows` keys."""
    sizes = {"rows": rows, "key_rows": key_rows, "heads": heads, "head_dim": head_dim}
    return OpCall(op="attention", sizes=sizes, count=count)


def pointwise(op: str, rows: int, width: int, count: int = 1) -> OpCall:
    """`count` calls of an op over (rows, width)."""
    return OpCall(op=op, sizes={"rows": rows, "width": width}, count=count)


def attention_block(
    rows: int, key_rows: int, hidden: int, heads: int, head_dim: int, count: int
) -> Iterator[OpCall]:
    """Projections to queries, keys and values, the attention, and the projection back, `count` times."""
    inner = heads * head_dim
    yield linear(rows, hidden, inner, count)
    yield linear(key_rows, hidden, inner, 2 * count)
    yield attention(rows, key_rows, heads, head_dim, count)
    yield linear(rows, inner, hidden, count)


def released_config(model_class: type) -> dict[str, Any]:
    """A diffusers model's config as released: the defaults of its class."""
    parameters = inspect.signature(model_class.__init__).parameters  # type: ignore[misc]
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
