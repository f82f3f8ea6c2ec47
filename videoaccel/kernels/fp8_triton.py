# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The scale of an FP8 group inside a kernel; `quantize_fp8` states the convention."""

import triton
import triton.language as tl

from videoaccel.kernels.quantize_fp8 import E4M3_MAX, SCALE_MIN

_MAX = tl.constexpr(E4M3_MAX)
_MIN = tl.constexpr(SCALE_MIN)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def group_scale(values, axis: tl.constexpr):
    """Scales of float32 `values` over `axis`, and their reciprocals; NaN for a group that is not finite.

    The maximum is taken over bit patterns: for magnitudes they order as the numbers do, and a NaN lies above
    infinity, where a floating-point maximum would drop it.
    """
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, axis)
    scale = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), _MAX), _MIN)
    scale = tl.where(largest < _INFINITY, scale, float("nan"))
    return scale, tl.div_rn(1.0, scale)


def check_e4m3(target: str) -> None:
    """Raises ValueError where no kernel can write e4m3, which no compiler would say in as many words."""
    if target in ("sm_80", "sm_86", "sm_87"):
        raise ValueError(
            f"{target} has no e4m3: leave the rows in their own type there, or use the reference"
        )
