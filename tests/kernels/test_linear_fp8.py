"""A linear layer on FP8 codes: exact on the codes, and near the layer that they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from videoaccel.kernels.linear_fp8 import linear_fp8_reference, linear_fp8_scaled_mm
from videoaccel.kernels.quantize_fp8 import quantize_fp8_reference

BOTH = pytest.mark.parametrize("function", [linear_fp8_reference, linear_fp8_scaled_mm])


def drawn(seed: int, *shape: int, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@BOTH
@settings(max_examples=40)
@given(
    batch=st.integers(1, 2),
    rows=st.integers(1, 9),
    inner=st.sampled_from([16, 48, 256]),
    outer=st.sampled_from([16, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_bias=st.booleans(),
)
def test_it_is_the_product_of_what_the_codes_stand_for(
    function, batch: int, rows: int, inner: int, outer: int, dtype: torch.dtype, with_bias: bool
) -> None:
    x, w = drawn(1, batch, rows, inner, spread=3.0), drawn(2, outer, inner, spread=0.02)
    (codes, scales), (weight, weight_scales) = quantize_fp8_reference(x), quantize_fp8_reference(w)
    bias = drawn(3, outer) if with_bias else None
    got = function(codes, scales, weight, weight_scales, bias, dtype=dtype)
    left = codes.double() * scales.double()[..., None]
    right = weight.double() * weight_scales.double()[:, None]
    want = left @ right.T + (0.0 if bias is None else bias.double())
    assert got.dtype == dtype and got.shape == want.shape
    size = left.abs() @ right.abs().T + (0.0 if bias is None else bias.double().abs())
    # One rounding of the result (two with a bias), and float32 sums of `inner` terms.
    bound = 2 * torch.finfo(dtype).eps * want.abs() + (2 * torch.finfo(dtype).eps + 1e-6) * size
    assert bool(((got.double() - want).abs() <= bound).all())


@BOTH
def test_the_error_is_that_of_the_codes(function) -> None:
    x, w = drawn(1, 1, 64, 512), drawn(2, 256, 512, spread=0.05)
    (codes, scales), (weight, weight_scales) = quantize_fp8_reference(x), quantize_fp8_reference(w)
    got = function(codes, scales, weight, weight_scales, dtype=torch.float32).double()
    want = x.double() @ w.double().T
    away = float((got - want).norm() / want.norm())
    # Codes of 3 mantissa bits are off by 2^-4 at most and 2^-4 / sqrt(3) / 2^0.7 or so in the mean square;
    # errors of both factors add as squares, and nothing averages them out in a relative norm.
    assert 0.025 < away < 0.05


@BOTH
def test_a_row_that_is_not_finite_stays_its_own(function) -> None:
    x, w = drawn(1, 1, 3, 32), drawn(2, 16, 32)
    x[0, 1, 5] = float("inf")
    (codes, scales), (weight, weight_scales) = quantize_fp8_reference(x), quantize_fp8_reference(w)
    got = function(codes, scales, weight, weight_scales, dtype=torch.float32)
    assert got[0, 1].isnan().all() and got[0, [0, 2]].isfinite().all()


@BOTH
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("codes", "codes is torch.float32: quantise it"),
        ("scales", r"scales must be float32 \(1, 4\)"),
        ("weight", r"weight \(N, K\), not"),
        ("weight_scales", r"weight_scales must be float32 \(16,\)"),
        ("bias", r"bias must be \(16,\)"),
    ],
)
def test_what_has_no_meaning_is_refused(function, name: str, fault: str) -> None:
    (codes, scales), (weight, weight_scales) = (
        quantize_fp8_reference(drawn(1, 1, 4, 32)),
        quantize_fp8_reference(drawn(2, 16, 32)),
    )
    given = {
        "codes": codes,
        "scales": scales,
        "weight": weight,
        "weight_scales": weight_scales,
        "bias": None,
    }
    wrong = {
        "codes": codes.float(),
        "scales": scales.squeeze(0),
        "weight": weight[:, :16],
        "weight_scales": weight_scales.double(),
        "bias": torch.zeros(4),
    }
    with pytest.raises(ValueError, match=fault):
        function(**{**given, name: wrong[name]}, dtype=torch.float32)
