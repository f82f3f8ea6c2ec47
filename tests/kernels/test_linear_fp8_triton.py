"""FP8 linear layers, by row and by block, against float64: tails in every direction, rows that are not
finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from videoaccel.kernels.linear_fp8 import linear_fp8_reference
from videoaccel.kernels.linear_fp8_block import (
    dequantize_squares,
    linear_fp8_block_reference,
    quantize_squares,
)
from videoaccel.kernels.linear_fp8_triton import (
    configs,
    linear_fp8,
    linear_fp8_block,
    plan_linear_fp8,
    plan_linear_fp8_block,
)
from videoaccel.kernels.quantize_fp8 import BLOCK, E4M3, quantize_fp8_reference

from . import references
from .references import FLOATS, assert_close, assert_quantized, draw

pytestmark = pytest.mark.usefixtures("interpreted")

FUNCTIONS = {
    "eager": (linear_fp8_reference, linear_fp8_block_reference),
    "triton": (linear_fp8, linear_fp8_block),
}
BY_BLOCK = pytest.mark.parametrize("by_block", [False, True], ids=["row", "block"])


def call(seed: int, batch: int, rows: int, inner: int, outer: int, by_block: bool) -> dict[str, Any]:
    codes, scales = quantize_fp8_reference(draw(seed, batch, rows, inner), block=BLOCK if by_block else None)
    plain = draw(seed + 1, outer, inner)
    weight, weight_scales = quantize_squares(plain) if by_block else quantize_fp8_reference(plain)
    return {"codes": codes, "scales": scales, "weight": weight, "weight_scales": weight_scales}


@BY_BLOCK
@pytest.mark.parametrize("which", FUNCTIONS)
@settings(max_examples=40)
@given(
    batch=st.sampled_from([1, 2, 0]),
    rows=st.sampled_from([1, 3, 65, 129, 0]),
    inner=st.sampled_from([16, 48, 128, 144, 304]),
    outer=st.sampled_from([1, 16, 127, 129, 260]),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(FLOATS),
    biased=st.booleans(),
    spoiled=st.sampled_from(["no", "no", "row", "column"]),
)
def test_against_float64(
    which: str,
    by_block: bool,
    batch: int,
    rows: int,
    inner: int,
    outer: int,
    seed: int,
    dtype: torch.dtype,
    biased: bool,
    spoiled: str,
) -> None:
    arguments = call(seed, batch, rows, inner, outer, by_block)
    if spoiled == "row" and arguments["scales"].numel():
        arguments["scales"].view(-1)[-1] = torch.nan
    if spoiled == "column":
        arguments["weight_scales"].view(-1)[-1] = torch.nan
    bias = draw(seed + 2, outer, dtype=dtype) if biased else None
    got = FUNCTIONS[which][by_block](**arguments, bias=bias, dtype=dtype)
    assert got.dtype == dtype and got.shape == (batch, rows, outer)
    assert_close(got, *references.linear_fp8(**arguments, bias=bias))


@BY_BLOCK
def test_rows_of_wider_memory(by_block: bool) -> None:
    """Codes that are a slice: only whole channels have to lie together."""
    arguments = call(0, 1, 5, 48, 20, by_block)
    wide, weights = torch.zeros(1, 5, 80).to(E4M3), torch.zeros(20, 64).to(E4M3)
    wide[..., 16:64], weights[:, :48] = arguments["codes"], arguments["weight"]
    sliced = {**arguments, "codes": wide[..., 16:64], "weight": weights[:, :48]}
    function = FUNCTIONS["triton"][by_block]
    assert torch.equal(function(**sliced, dtype=torch.float32), function(**arguments, dtype=torch.float32))


def test_squares_of_a_weight_are_groups() -> None:
    weight = draw(0, 200, 300)
    codes, scales = quantize_squares(weight)
    assert scales.shape == (2, 3) and codes.is_contiguous()
    for high in range(2):
        for wide in range(3):
            part = slice(128 * high, 128 * high + 128), slice(128 * wide, 128 * wide + 128)
            want = weight[part].double().flatten()[None]
            square = codes[part].contiguous().view(1, -1), scales[high, wide].view(1)
            assert_quantized(*square, want, torch.zeros_like(want))
    error = (dequantize_squares(codes, scales) - weight).abs().max().item()
    assert error <= weight.abs().max().item() * 2**-4
    with pytest.raises(ValueError, match=r"weight must be \(N, K\), not \(3,\)"):
        quantize_squares(torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"codes": torch.zeros(4, 16).to(E4M3)}, r"codes must be \(B, L, K\) and weight \(N, K\)"),
        ({"codes": torch.zeros(1, 4, 16)}, r"codes is torch\.float32: quantise it"),
        ({"scales": torch.ones(1, 4)}, r"scales must be float32 \(1, 4, 1\), one a block"),
        ({"weight_scales": torch.ones(6)}, r"weight_scales must be float32 \(1, 1\), one a block"),
        ({"bias": torch.ones(7)}, r"bias must be \(6,\)"),
        ({"bias": torch.ones(6, device="meta")}, "all tensors must be on one device"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    for function in (linear_fp8_block_reference, linear_fp8_block):
        with pytest.raises(ValueError, match=says):
            function(**{**call(0, 1, 4, 16, 6, True), **change}, dtype=torch.float32)


def test_a_kernel_copies_nothing_and_refuses_what_it_has_no_code_for() -> None:
    good = call(0, 3, 4, 32, 20, False)
    turned = good["codes"].transpose(0, 1).contiguous().transpose(0, 1)
    thin = torch.zeros(20, 64).to(E4M3)[:, ::2]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"codes": turned}, r"are no matrix: pass codes\.contiguous\(\)"),
        ({"weight": thin}, "weight .* needs whole channels side by side"),
        ({"codes": torch.zeros(3, 4, 40).to(E4M3)[..., :32]}, "distance of rows multiples of 16"),
        ({"scales": good["scales"].T.contiguous().T}, r"scales is not contiguous: pass scales\.contiguous"),
        ({"dtype": torch.float64}, r"results can't be torch\.float64"),
    ]
    for change, says in changes:
        with pytest.raises(ValueError, match=says):
            linear_fp8(**{"dtype": torch.float32, **good, **change})
    with pytest.raises(ValueError, match=r"K 24, strides .* multiples of 16"):
        linear_fp8(**call(0, 1, 4, 24, 32, False), dtype=torch.float32)
    with pytest.raises(ValueError, match="sm_80 has no e4m3"):
        plan_linear_fp8(**good, dtype=torch.float32, target="sm_80")
    with pytest.raises(ValueError, match="a block needs BLOCK_K 128 and a BLOCK_N that divides it"):
        plan_linear_fp8_block(**call(0, 1, 4, 16, 32, True), dtype=torch.float32, config=configs("sm_89")[0])


@BY_BLOCK
@pytest.mark.parametrize("target", ["sm_90", "sm_89", "gfx942"])
def test_every_config_is_right(target: str, by_block: bool) -> None:
    arguments = call(0, 1, 300, 304, 270, by_block)
    want = references.linear_fp8(**arguments, bias=None)
    for config in configs(target, by_block=by_block):
        got = FUNCTIONS["triton"][by_block](**arguments, dtype=torch.float32, config=config)
        assert_close(got, *want)
