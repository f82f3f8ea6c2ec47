"""What a call of an op costs at least: its arithmetic and its traffic, from its sizes.

Floors, from the maths of the op and not from a kernel: every tensor is read or written once, and tables that
stay in a cache (AdaLN's, the rotary ones, norm gains) are not counted. A roofline of these is what `doctor`
expects of an op (Williams, Waterman and Patterson, 2009, "Roofline: an insightful visual performance model").
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from videoaccel.kernels.profile import DeviceProfile

Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """Calls of one op at one set of sizes.

    Attributes:
        op: its name, in `OPS`, or `linear`, which torch runs.
        sizes: by name; those that its implementations ask about, and those that `WORK` does.
        count: how often one forward calls it.
    """

    op: str
    sizes: Sizes = field(default_factory=dict)
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call takes.

    Attributes:
        flops: multiplications and additions of the matrix units; 0 where the op has none worth counting.
        bytes: read from and written to the device's memory.
    """

    flops: float = 0.0
    bytes: float = 0.0


def _attention(s: Sizes, element: int) -> Work:
    rows, keys, width = s["rows"], s.get("key_rows", s["rows"]), s["heads"] * s["head_dim"]
    return Work(flops=4.0 * rows * keys * width, bytes=2.0 * (rows + keys) * width * element)


def _linear(s: Sizes, element: int) -> Work:
    rows, inner, outer = s["rows"], s["in_features"], s["out_features"]
    return Work(
        flops=2.0 * rows * inner * outer, bytes=float(rows * inner + inner * outer + rows * outer) * element
    )


def _streams(count: int) -> Callable[[Sizes, int], Work]:
    """An op that moves `count` tensors of (rows, width)."""
    return lambda s, element: Work(bytes=float(count) * s["rows"] * s["width"] * element)


def _qk_norm_rope(s: Sizes, element: int) -> Work:
    return Work(bytes=4.0 * s["rows"] * s["heads"] * s["head_dim"] * element)


def _linear_fp8(s: Sizes, element: int) -> Work:
    """A byte a value of either factor; the result is of the activations' type. Scales are left out."""
    rows, inner, outer = s["rows"], s["in_features"], s["out_features"]
    return Work(
        flops=2.0 * rows * inner * outer, bytes=float(rows * inner + inner * outer + rows * outer * element)
    )


def _quantize_fp8(s: Sizes, element: int) -> Work:
    """Scales are left out: four bytes a row, or a block."""
    return Work(bytes=float(s["rows"] * s["width"]) * (element + 1))


WORK: Mapping[str, Callable[[Sizes, int], Work]] = types.MappingProxyType(
    {
        "attention": _attention,
        "linear": _linear,
        "linear_fp8": _linear_fp8,
        "linear_fp8_block": _linear_fp8,
        "norm_modulate": _streams(2),  # x; the result
        "gate_residual": _streams(3),  # the branch, the residual; the new residual
        "gate_residual_norm_modulate": _streams(4),  # as above, and the normed one
        "qk_norm_rope": _qk_norm_rope,  # queries and keys; both again
        "swiglu": _streams(3),  # both halves; the result
        "quantize_fp8": _quantize_fp8,  # the rows; a byte a value
    }
)
"""Op to what one call costs, from its sizes and the bytes of an element."""


def work_of(call: OpCall, element: int) -> Work:
    """What one call costs, for elements of that many bytes.

    Raises:
        ValueError: nobody has said what the op costs.
    """
    if call.op not in WORK:
        raise ValueError(f"what {call.op} costs is not known: add it to WORK in videoaccel/kernels/work.py")
    return WORK[call.op](call.sizes, element)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least that some calls take on a device.

    Attributes:
        seconds: None where the device's own figures don't say.
        bound: what most of it waits for: `compute`, `memory`, or None with `seconds`.
        work: of all the calls.
    """

    seconds: float | None
    bound: str | None
    work: Work


def floor_of(calls: Iterable[OpCall], device: DeviceProfile, tflops: float | None, element: int) -> Floor:
    """The roofline of some calls: each takes what its arithmetic or its traffic takes, whichever is longer.

    Args:
        calls: of one op, usually.
        device: whose bandwidth counts.
        tflops: the device's matrix peak in the precision at hand.
        element: bytes of an element.
    """
    seconds = {"compute": 0.0, "memory": 0.0}
    flops = moved = 0.0
    known = True
    for call in calls:
        work = work_of(call, element)
        flops += call.count * work.flops
        moved += call.count * work.bytes
        if device.bandwidth_gb_s is None or (work.flops and tflops is None):
            known = False
            continue
        compute = work.flops / (tflops * 1e12) if tflops else 0.0
        memory = work.bytes / (device.bandwidth_gb_s * 1e9)
        seconds["compute" if compute > memory else "memory"] += call.count * max(compute, memory)
    total = Work(flops=flops, bytes=moved)
    if not known:
        return Floor(seconds=None, bound=None, work=total)
    bound = max(seconds, key=lambda name: seconds[name])
    return Floor(seconds=sum(seconds.values()), bound=bound, work=total)
