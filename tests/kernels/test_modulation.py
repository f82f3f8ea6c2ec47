"""AdaLN's ops against float64: both implementations, any length and stride, rows that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from videoaccel.kernels import modulation, modulation_triton, rows_triton
from videoaccel.kernels.ops import OPS

from . import references
from .references import BATCHES, FLOATS, ROWS, STRIDES, assert_close, assert_quantized, draw, laid_out, spoil

pytestmark = pytest.mark.usefixtures("interpreted")

EPS = 1e-5
PAIRS = {
    name: (getattr(modulation, f"{name}_reference"), getattr(modulation_triton, name))
    for name in ("norm_modulate", "gate_residual", "gate_residual_norm_modulate")
}
BOTH = pytest.mark.parametrize("which", [0, 1], ids=["eager", "triton"])


@st.composite
def calls(draws: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of all three ops: x, residual, tables that are chunks of one, the index."""
    batch, rows = draws(st.sampled_from(BATCHES)), draws(st.sampled_from(ROWS))
    channels = draws(st.sampled_from([1, 2, 3, 8, 24, 63, 64, 65, 200, 257]))
    seed, table_rows = draws(st.integers(0, 2**16)), draws(st.integers(1, 5))
    dtype, table_dtype = draws(st.sampled_from(FLOATS)), draws(st.sampled_from(FLOATS))
    spread = draws(st.sampled_from([1e-3, 1.0, 100.0]))
    x = spoil(draw(seed, batch, rows, channels, dtype=dtype, scale=spread), draws(SPECIAL))
    residual = spoil(draw(seed + 1, batch, rows, channels, dtype=dtype), draws(SPECIAL))
    if draws(st.booleans()):
        tables = draw(seed + 2, table_rows, 6 * channels, dtype=table_dtype)
    else:
        # A timestep's tables alone: rows a constant apart that is no multiple of the width.
        tables = draw(seed + 2, table_rows + 1, 6 * channels + 7, dtype=table_dtype)[1:, 7:]
    shift, scale, gate, *_ = tables.split(channels, -1)
    index = torch.randint(table_rows, (rows,), generator=torch.Generator().manual_seed(seed))
    if draws(st.booleans()):
        index = index.sort().values
    return {
        "x": laid_out(x, draws(st.sampled_from(STRIDES))),
        "residual": laid_out(residual, draws(st.sampled_from(STRIDES))),
        "weight": draw(seed + 3, channels, dtype=table_dtype) if draws(st.booleans()) else None,
        "shift": shift,
        "scale": scale,
        "gate": gate,
        "index": index.to(draws(st.sampled_from([torch.int32, torch.int64]))),
    }


SPECIAL = st.sampled_from(["plain", "plain", "plain", "zero", "nan", "inf", "tiny"])


def picked(call: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: call[name] for name in names}


@BOTH
@settings(max_examples=60)
@given(call=calls(), quantize=st.booleans())
def test_norm_modulate(which: int, call: dict[str, Any], quantize: bool) -> None:
    arguments = picked(call, "x", "weight", "shift", "scale", "index")
    want, size = references.norm_modulate(**arguments, eps=EPS)
    got = PAIRS["norm_modulate"][which](**arguments, eps=EPS, quantize=quantize)
    if quantize:
        assert_quantized(*got, want, size)
    else:
        assert got.dtype == call["x"].dtype and (got.is_contiguous() or which == 0)
        assert_close(got, want, size)


@BOTH
@settings(max_examples=60)
@given(call=calls())
def test_gate_residual(which: int, call: dict[str, Any]) -> None:
    arguments = picked(call, "residual", "x", "gate", "index")
    got = PAIRS["gate_residual"][which](**arguments)
    assert got.dtype == call["x"].dtype and (got.is_contiguous() or which == 0)
    assert_close(got, *references.gate_residual(**arguments))


@BOTH
@settings(max_examples=60)
@given(call=calls(), quantize=st.booleans())
def test_the_fused_op_is_its_parts_in_turn(which: int, call: dict[str, Any], quantize: bool) -> None:
    """To the bit: so a tier may take either."""
    added = PAIRS["gate_residual"][which](**picked(call, "residual", "x", "gate", "index"))
    norm = picked(call, "weight", "shift", "scale", "index")
    normed = PAIRS["norm_modulate"][which](x=added, **norm, eps=EPS, quantize=quantize)
    both = picked(call, "residual", "x", "gate", "index", "weight", "shift", "scale")
    got = PAIRS["gate_residual_norm_modulate"][which](**both, eps=EPS, quantize=quantize)
    for one, other in zip(got, (added, *(normed if quantize else (normed,))), strict=True):
        assert one.dtype == other.dtype and torch.equal(bits(one), bits(other))


@BOTH
@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("other", STRIDES)
def test_any_layout(which: int, how: str, other: str) -> None:
    call = plain(rows=5, channels=33, batch=2)
    call["x"], call["residual"] = laid_out(call["x"], how), laid_out(call["residual"], other)
    both = picked(call, *argument_names("gate_residual_norm_modulate"))
    added, normed = PAIRS["gate_residual_norm_modulate"][which](**both, eps=EPS)
    want, size = references.gate_residual(**picked(call, *argument_names("gate_residual")))
    assert_close(added, want, size)
    norm = {**picked(call, *argument_names("norm_modulate")), "x": added}
    assert_close(normed, *references.norm_modulate(**norm, eps=EPS))
    alone = picked(call, *argument_names("norm_modulate"))
    assert_close(PAIRS["norm_modulate"][which](**alone, eps=EPS), *references.norm_modulate(**alone, eps=EPS))


def bits(x: Tensor) -> Tensor:
    """For a comparison in which NaN equals NaN."""
    return torch.nan_to_num(x.double(), nan=1e300)


def plain(rows: int = 4, channels: int = 8, batch: int = 1) -> dict[str, Any]:
    return {
        "x": draw(0, batch, rows, channels),
        "residual": draw(1, batch, rows, channels),
        "weight": draw(2, channels),
        **{name: draw(3, 3, channels) for name in ("shift", "scale", "gate")},
        "index": torch.arange(rows) % 3,
    }


@pytest.mark.parametrize("name", PAIRS)
def test_an_index_outside_the_tables_is_loud(name: str) -> None:
    """The reference raises. A kernel can't: it makes that row NaN, and reads nothing outside the tables."""
    call = plain()
    call["index"] = torch.tensor([0, 3, -1, 2])
    reference, kernel = PAIRS[name]
    arguments = picked(call, *argument_names(name))
    eps = {} if name == "gate_residual" else {"eps": EPS}
    with pytest.raises((IndexError, RuntimeError)):
        reference(**arguments, **eps)
    got = kernel(**arguments, **eps)
    for out in got if isinstance(got, tuple) else (got,):
        assert out[0, [1, 2]].isnan().all() and out[0, [0, 3]].isfinite().all()


def argument_names(name: str) -> list[str]:
    gate, norm = ["residual", "x", "gate", "index"], ["x", "weight", "shift", "scale", "index"]
    parts = {"norm_modulate": norm, "gate_residual": gate}
    return parts.get(name, list(dict.fromkeys(gate + norm)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": draw(0, 4, 8)}, r"x must be \(batch, rows, channels\)"),
        ({"x": draw(0, 1, 4, 0)}, "x has no channels"),
        ({"weight": draw(0, 9)}, r"weight must be \(8,\)"),
        ({"weight": draw(0, 16)[::2]}, r"weight is not contiguous: pass weight.contiguous\(\)"),
        ({"shift": draw(0, 3, 16)[:, ::2]}, r"shift has channels 2 apart: pass shift.contiguous\(\)"),
        ({"shift": draw(0, 2, 8)}, "one index addresses both"),
        ({"index": torch.zeros(3, dtype=torch.int64)}, r"index must be \(4,\)"),
        ({"index": torch.zeros(4)}, "cast it to int32 or int64"),
        ({"index": torch.zeros(8, dtype=torch.int64)[::2]}, "index is not contiguous"),
        ({"shift": draw(0, 0, 8), "scale": draw(0, 0, 8), "gate": draw(0, 0, 8)}, "tables have no rows"),
        ({"residual": draw(0, 1, 4, 8, dtype=torch.float16)}, "residual and x must agree"),
        ({"gate": draw(0, 2, 8)}, "gate has 2 rows and shift 3"),
        ({"index": torch.zeros(4, dtype=torch.int64, device="meta")}, "all tensors must be on one device"),
    ],
)
def test_what_does_not_fit_is_refused_by_both(change: dict[str, Any], says: str) -> None:
    call = {**plain(), **change}
    if "residual" not in change:
        call["residual"] = torch.zeros_like(call["x"])
    both = picked(call, *argument_names("gate_residual_norm_modulate"))
    for function in PAIRS["gate_residual_norm_modulate"]:
        with pytest.raises(ValueError, match=says):
            function(**both, eps=EPS)


def test_a_kernel_refuses_what_it_has_no_code_for() -> None:
    call = picked(plain(), "x", "weight", "shift", "scale", "index")
    with pytest.raises(ValueError, match=r"x is torch\.float64: cast it"):
        modulation_triton.norm_modulate(**{**call, "x": call["x"].double()}, eps=EPS)
    wide = picked(plain(1, 16385), "x", "weight", "shift", "scale", "index")
    with pytest.raises(ValueError, match="16385 channels and this kernel holds 16384: use the reference"):
        modulation_triton.norm_modulate(**wide, eps=EPS)


def test_what_the_table_says_it_takes_is_what_the_kernel_takes() -> None:
    for name in PAIRS:
        assert OPS[name].named("triton").needs.at_most == {"width": rows_triton.MAX_CHANNELS}


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "here"])
@pytest.mark.parametrize("channels", [1, 5376, 16384])
def test_every_config_gives_the_same(target: str, channels: int) -> None:
    call = picked(plain(2, channels), "x", "weight", "shift", "scale", "index")
    configs = rows_triton.row_configs(channels, target)
    assert configs and all(c.blocks["BLOCK"] >= channels for c in configs)
    results = [modulation_triton.norm_modulate(**call, eps=EPS, config=config) for config in configs]
    assert all(torch.equal(one, results[0]) for one in results)
