"""What an op costs at least, by hand for one call of each, and the roofline of several."""

from __future__ import annotations

import pytest

from videoaccel.kernels.catalogue import CATALOGUE
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.profile import DeviceProfile
from videoaccel.kernels.work import WORK, OpCall, floor_of, work_of

DEVICE = DeviceProfile(name="d", vendor="nvidia", arch="sm_90", memory_gb=1.0, bandwidth_gb_s=1000.0)
SIZES = {"rows": 10, "key_rows": 6, "heads": 2, "head_dim": 4, "width": 8}
SIZES |= {"in_features": 3, "out_features": 5}


@pytest.mark.parametrize(
    ("op", "flops", "elements"),
    [
        ("attention", 4 * 10 * 6 * 8, 2 * (10 + 6) * 8),
        ("linear", 2 * 10 * 3 * 5, 10 * 3 + 3 * 5 + 10 * 5),
        ("norm_modulate", 0, 2 * 10 * 8),
        ("gate_residual", 0, 3 * 10 * 8),
        ("gate_residual_norm_modulate", 0, 4 * 10 * 8),
        ("qk_norm_rope", 0, 4 * 10 * 2 * 4),
        ("swiglu", 0, 3 * 10 * 8),
    ],
)
def test_work_of_one_call(op: str, flops: int, elements: int) -> None:
    for element in (1, 2, 4):
        work = work_of(OpCall(op=op, sizes=SIZES), element)
        assert (work.flops, work.bytes) == (flops, elements * element)
    own = {name: size for name, size in SIZES.items() if name != "key_rows"}
    assert work_of(OpCall(op="attention", sizes=own), 2).flops == 4 * 10 * 10 * 8


def test_work_in_fp8() -> None:
    """A code is a byte, whatever the model's own type."""
    assert work_of(OpCall(op="quantize_fp8", sizes=SIZES), 2).bytes == 10 * 8 * (2 + 1)
    for op in ("linear_fp8", "linear_fp8_block"):
        work = work_of(OpCall(op=op, sizes=SIZES), 2)
        assert (work.flops, work.bytes) == (2 * 10 * 3 * 5, 10 * 3 + 3 * 5 + 10 * 5 * 2)


def test_an_op_without_a_cost_is_named() -> None:
    with pytest.raises(ValueError, match="what conv costs is not known: add it to WORK"):
        work_of(OpCall(op="conv"), 2)


def test_each_call_takes_its_longer_side() -> None:
    big = OpCall(op="linear", sizes={"rows": 4096, "in_features": 4096, "out_features": 4096}, count=3)
    thin = OpCall(op="linear", sizes={"rows": 1, "in_features": 4096, "out_features": 4096}, count=2)
    compute = floor_of([big], DEVICE, 100.0, 2)
    assert compute.bound == "compute" and compute.seconds == pytest.approx(3 * 2 * 4096**3 / 100e12)
    memory = floor_of([thin], DEVICE, 100.0, 2)
    assert memory.bound == "memory" and memory.seconds == pytest.approx(2 * work_of(thin, 2).bytes / 1e12)
    both = floor_of([big, thin], DEVICE, 100.0, 2)
    assert both.seconds == pytest.approx((compute.seconds or 0) + (memory.seconds or 0))
    assert both.bound == "compute" and both.work.flops == compute.work.flops + memory.work.flops


def test_without_a_devices_figures_there_is_no_floor() -> None:
    call = OpCall(op="linear", sizes=SIZES)
    assert floor_of([call], DEVICE, None, 2).seconds is None
    assert floor_of([OpCall(op="swiglu", sizes=SIZES)], DEVICE, None, 2).bound == "memory"
    nothing = floor_of([call], CATALOGUE["Hygon K100-AI"], None, 2)
    assert (nothing.seconds, nothing.bound) == (None, None) and nothing.work.flops > 0


def test_every_op_of_the_table_can_be_estimated() -> None:
    assert set(WORK) == {"linear", *OPS}
