"""FP8 codes and scales: what they say against float64, both implementations alike to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from videoaccel.kernels.fp8_triton import check_e4m3
from videoaccel.kernels.modulation_triton import plan_norm_modulate
from videoaccel.kernels.quantize_fp8 import BLOCK, E4M3, dequantize_fp8, quantize_fp8_reference
from videoaccel.kernels.quantize_fp8_triton import configs, plan_quantize_fp8, quantize_fp8
from videoaccel.kernels.swiglu_triton import plan_swiglu

from .references import BATCHES, FLOATS, ROWS, STRIDES, assert_quantized, draw, laid_out, spoil

pytestmark = pytest.mark.usefixtures("interpreted")

BOTH = pytest.mark.parametrize("function", [quantize_fp8_reference, quantize_fp8], ids=["eager", "triton"])


def codes_of(x: Tensor) -> Tensor:
    """Bits, with every NaN alike."""
    return torch.where(x.float().isnan(), 127, x.view(torch.uint8))


@settings(max_examples=120)
@given(
    shape=st.tuples(
        st.sampled_from(BATCHES), st.sampled_from(ROWS), st.sampled_from([1, 3, 64, 127, 128, 129, 384, 2500])
    ),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(FLOATS),
    spread=st.sampled_from([1e-30, 1e-3, 1.0, 1e3]),
    special=st.sampled_from(["plain", "plain", "zero", "nan", "inf", "tiny"]),
    how=st.sampled_from(STRIDES),
    block=st.sampled_from([None, BLOCK]),
)
def test_quantize(
    shape: tuple[int, int, int],
    seed: int,
    dtype: torch.dtype,
    spread: float,
    special: str,
    how: str,
    block: int | None,
) -> None:
    x = laid_out(spoil(draw(seed, *shape, dtype=dtype, scale=spread), special), how)
    results = [function(x, block=block) for function in (quantize_fp8_reference, quantize_fp8)]
    for codes, scales in results:
        if block is None:
            assert_quantized(codes, scales, x.double(), torch.zeros_like(x, dtype=torch.float64))
            continue
        assert scales.shape == (*shape[:2], -(-shape[2] // BLOCK))
        for group in range(scales.shape[-1]):
            part = slice(BLOCK * group, BLOCK * group + BLOCK)
            want = x[..., part].double()
            assert_quantized(codes[..., part], scales[..., group], want, torch.zeros_like(want))
    (codes, scales), (other_codes, other_scales) = results
    assert torch.equal(codes_of(codes), codes_of(other_codes))
    assert torch.equal(scales.nan_to_num(nan=-1.0), other_scales.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("block", [None, BLOCK])
@pytest.mark.parametrize("how", STRIDES)
def test_any_layout(how: str, block: int | None) -> None:
    x = laid_out(draw(0, 2, 3, 300), how)
    (codes, scales), (want, want_scales) = (
        function(x, block=block) for function in (quantize_fp8, quantize_fp8_reference)
    )
    assert torch.equal(codes_of(codes), codes_of(want)) and torch.equal(scales, want_scales)


@BOTH
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 4, 5), (0, 5)])
def test_any_number_of_dimensions(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    x = draw(0, *shape)
    for block, groups in ((None, ()), (BLOCK, (1,))):
        codes, scales = function(x, block=block)
        assert codes.shape == shape and scales.shape == (*shape[:-1], *groups)
        assert (dequantize_fp8(codes, scales) - x).abs().max().item() <= 0.25 if x.numel() else True


@BOTH
def test_by_hand(function: Callable[..., Any]) -> None:
    codes, scales = function(torch.tensor([[448.0, 1.0, -0.26, 17.0, 2**-10, 1.5 * 2**-9]]))
    # 17 lies midway between 16 and 18, and 2^-10 between 0 and 2^-9: ties go to the even code.
    assert codes.float().tolist() == [[448.0, 1.0, -0.25, 16.0, 0.0, 2 * 2**-9]]
    assert scales.tolist() == [1.0]
    zero = function(torch.zeros(1, 3))
    assert zero[0].float().tolist() == [[0.0] * 3] and zero[1].tolist() == [2.0**-96]


def test_what_does_not_fit_is_refused() -> None:
    for function in (quantize_fp8_reference, quantize_fp8):
        with pytest.raises(ValueError, match="block is 64: leave it out for a scale a row, or pass 128"):
            function(draw(0, 2, 4), block=64)
        with pytest.raises(ValueError, match="with a channel or more"):
            function(draw(0, 2, 0))
    torn = draw(0, 2, 3, 4, 5).transpose(0, 1)
    with pytest.raises(ValueError, match=r"pass x\.contiguous\(\)"):
        quantize_fp8(torn)
    with pytest.raises(ValueError, match=r"x is torch\.float64: cast it"):
        quantize_fp8(draw(0, 2, 4).double(), block=BLOCK)
    with pytest.raises(ValueError, match="16385 channels and this kernel holds 16384: use the reference"):
        quantize_fp8(torch.zeros(1, 16385))
    with pytest.raises(ValueError, match=r"fit codes .* neither by row nor by block"):
        dequantize_fp8(torch.zeros(2, 4).to(E4M3), torch.zeros(3))


def test_without_e4m3_it_is_refused_before_the_compiler() -> None:
    check_e4m3("sm_89")
    x, table = draw(0, 1, 2, 8), draw(1, 1, 8)
    index = torch.zeros(2, dtype=torch.int64)
    for plan in (
        lambda: plan_quantize_fp8(x, target="sm_80"),
        lambda: plan_quantize_fp8(x, block=BLOCK, target="sm_80"),
        lambda: plan_swiglu(x, quantize=True, target="sm_80"),
        lambda: plan_norm_modulate(x, None, table, table, index, 1e-5, quantize=True, target="sm_80"),
    ):
        with pytest.raises(ValueError, match="sm_80 has no e4m3"):
            plan()


@pytest.mark.parametrize("block", [None, BLOCK])
def test_every_config_gives_the_same(block: int | None) -> None:
    x = draw(0, 3, 3000)
    cuts = configs(3000, "sm_90", block)
    results = [quantize_fp8(x, block=block, config=config) for config in cuts]
    assert len(cuts) > 1
    assert all(torch.equal(codes_of(codes), codes_of(results[0][0])) for codes, _ in results)
