"""SwiGLU against float64 and against diffusers' own module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from videoaccel.kernels.rows_triton import MAX_CHANNELS
from videoaccel.kernels.swiglu import swiglu_reference
from videoaccel.kernels.swiglu_triton import configs, swiglu

from . import references
from .references import BATCHES, FLOATS, ROWS, STRIDES, assert_close, assert_quantized, draw, laid_out, spoil

pytestmark = pytest.mark.usefixtures("interpreted")

BOTH = pytest.mark.parametrize("function", [swiglu_reference, swiglu], ids=["eager", "triton"])


@BOTH
@settings(max_examples=100)
@given(
    shape=st.tuples(
        st.sampled_from(BATCHES), st.sampled_from(ROWS), st.sampled_from([1, 2, 3, 24, 64, 65, 200, 2049])
    ),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(FLOATS),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
    special=st.sampled_from(["plain", "plain", "zero", "nan", "inf", "tiny"]),
    how=st.sampled_from(STRIDES),
    quantize=st.booleans(),
)
def test_swiglu(
    function: Callable[..., Any],
    shape: tuple[int, int, int],
    seed: int,
    dtype: torch.dtype,
    spread: float,
    special: str,
    how: str,
    quantize: bool,
) -> None:
    batch, rows, channels = shape
    x = laid_out(spoil(draw(seed, batch, rows, 2 * channels, dtype=dtype, scale=spread), special), how)
    want, size = references.swiglu(x)
    got = function(x, quantize=quantize)
    if quantize:
        assert_quantized(*got, want, size)
    else:
        assert got.dtype == dtype
        assert_close(got, want, size)


@BOTH
@pytest.mark.parametrize("how", STRIDES)
def test_any_layout(function: Callable[..., Any], how: str) -> None:
    x = laid_out(draw(0, 2, 3, 2 * 65), how)
    assert_close(function(x), *references.swiglu(x))


@BOTH
def test_the_halves_lie_as_in_diffusers(function: Callable[..., Any]) -> None:
    from diffusers.models.activations import SwiGLU

    module = SwiGLU(8, 24)
    with torch.no_grad():
        x = draw(0, 2, 3, 8)
        torch.testing.assert_close(function(module.proj(x)), module(x), rtol=2e-6, atol=2e-6)


@BOTH
def test_large_gates_neither_overflow_nor_vanish(function: Callable[..., Any]) -> None:
    gate = torch.tensor([-1e30, -200.0, -100.0, 0.0, 100.0, 1e30])
    got = function(torch.cat((torch.ones(6), gate))[None, None])
    torch.testing.assert_close(got[0, 0], gate.clamp_min(0), rtol=1e-6, atol=1e-30)


def test_what_does_not_fit_is_refused() -> None:
    for function in (swiglu_reference, swiglu):
        with pytest.raises(ValueError, match="x has 3 channels: it must hold two halves"):
            function(draw(0, 1, 2, 3))
        with pytest.raises(ValueError, match=r"x must be \(batch, rows, channels\)"):
            function(draw(0, 2, 4))
    with pytest.raises(ValueError, match=r"x is torch\.float64: cast it"):
        swiglu(draw(0, 1, 2, 4).double())
    wide = torch.zeros(1, 1, 2 * MAX_CHANNELS + 2)
    assert swiglu(wide).shape == (1, 1, MAX_CHANNELS + 1)
    with pytest.raises(ValueError, match="16385 channels and this kernel holds 16384: use the reference"):
        swiglu(wide, quantize=True)


@pytest.mark.parametrize("quantize", [False, True])
def test_every_config_gives_the_same(quantize: bool) -> None:
    x = draw(0, 1, 2, 6000)
    cuts = configs(3000, "sm_90", quantize=quantize)
    results = [swiglu(x, quantize=quantize, config=cut) for cut in cuts]
    pairs = [result if quantize else (result,) for result in results]
    assert len(cuts) > 1
    assert all(
        torch.equal(a.float(), b.float()) for pair in pairs for a, b in zip(pair, pairs[0], strict=True)
    )
