"""Queries and keys before attention, against float64 and against diffusers' own processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from videoaccel.kernels.ops import OPS
from videoaccel.kernels.qk_norm_rope import qk_norm_rope_reference
from videoaccel.kernels.qk_norm_rope_triton import MAX_HEAD_DIM, configs, qk_norm_rope

from . import references
from .references import BATCHES, FLOATS, ROWS, assert_close, draw, spoil

pytestmark = pytest.mark.usefixtures("interpreted")

EPS = 1e-5
BOTH = pytest.mark.parametrize("function", [qk_norm_rope_reference, qk_norm_rope], ids=["eager", "triton"])


@st.composite
def calls(draws: Callable[..., Any]) -> dict[str, Any]:
    """Queries and keys as separate projections make them, or as chunks of a fused one."""
    batch, rows = draws(st.sampled_from(BATCHES)), draws(st.sampled_from(ROWS))
    heads, key_heads = draws(st.sampled_from([(1, 1), (2, 2), (3, 3), (9, 9), (4, 1), (1, 5)]))
    channels = draws(st.sampled_from([1, 2, 3, 16, 24, 40, 64, 128]))
    rotary = 2 * draws(st.integers(0, channels // 2))
    seed, dtype = draws(st.integers(0, 2**16)), draws(st.sampled_from(FLOATS))
    spread = draws(st.sampled_from([1e-3, 1.0, 100.0]))
    special = st.sampled_from(["plain", "plain", "zero", "nan", "inf", "tiny"])
    counts = (heads, key_heads, key_heads)
    fused = draw(seed, batch, rows, channels * sum(counts), dtype=dtype, scale=spread)
    query, key, _ = fused.split([channels * count for count in counts], -1)
    query = spoil(query, draws(special)).unflatten(-1, (heads, channels))
    key = spoil(key, draws(special)).unflatten(-1, (key_heads, channels))
    if draws(st.booleans()):
        query, key = query.contiguous(), key.contiguous()
    if draws(st.booleans()):
        # As attention keeps them: heads before rows.
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    table = draws(st.sampled_from(FLOATS))
    angles = draw(seed + 1, rows, rotary + 3)[:, :rotary] * 10
    gains = draws(st.booleans())
    return {
        "query": query,
        "key": key,
        "query_weight": draw(seed + 2, channels, dtype=dtype) if gains else None,
        "key_weight": draw(seed + 3, channels, dtype=dtype) if gains else None,
        "cos": angles.cos().to(table) if rotary else None,
        "sin": angles.sin().to(table) if rotary else None,
    }


@BOTH
@settings(max_examples=80)
@given(call=calls())
def test_qk_norm_rope(function: Callable[..., Any], call: dict[str, Any]) -> None:
    query, key = function(**call, eps=EPS)
    angles = call["cos"], call["sin"], EPS
    for name, got in (("query", query), ("key", key)):
        assert got.dtype == call[name].dtype
        assert_close(got, *references.qk_norm_rope(call[name], call[f"{name}_weight"], *angles))


@BOTH
@pytest.mark.parametrize("heads", [(3, 3), (9, 2)])
@pytest.mark.parametrize("kind", ["fused", "apart", "turned"])
def test_any_layout(function: Callable[..., Any], kind: str, heads: tuple[int, int]) -> None:
    channels, rows = 40, 5
    fused = draw(0, 2, rows, (sum(heads) + heads[1]) * channels)
    query, key, _ = fused.split([heads[0] * channels, heads[1] * channels, heads[1] * channels], -1)
    query, key = query.unflatten(-1, (-1, channels)), key.unflatten(-1, (-1, channels))
    if kind == "apart":
        query, key = query.contiguous(), key.contiguous()
    elif kind == "turned":
        query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    # Tables that are a slice of wider ones.
    angles = draw(1, rows, 31)[:, :24]
    gains = draw(2, channels), draw(3, channels)
    got = function(query, key, *gains, angles.cos(), draw(4, rows, 29)[:, :24], EPS)
    for x, gain, one in zip((query, key), gains, got, strict=True):
        assert_close(one, *references.qk_norm_rope(x, gain, angles.cos(), draw(4, rows, 29)[:, :24], EPS))


@BOTH
def test_it_is_what_the_processor_of_diffusers_does(function: Callable[..., Any]) -> None:
    """In float32, where the processor's own roundings don't show, with H3's head and its three axes."""
    from diffusers.models.transformers.transformer_minimax_h3 import (
        MiniMaxH3RotaryPosEmbed,
        _apply_rotary_emb,
    )

    cos, sin = MiniMaxH3RotaryPosEmbed()(torch.tensor([[0, 0, 0], [3, 1, 4], [15, 9, 2]]))
    query, key = draw(0, 1, 3, 5, 128), draw(1, 1, 3, 5, 128)
    norms = [torch.nn.RMSNorm(128, eps=EPS) for _ in range(2)]
    with torch.no_grad():
        for seed, norm in enumerate(norms):
            norm.weight.copy_(draw(seed + 2, 128))
        want = [_apply_rotary_emb(norm(x), cos, sin) for norm, x in zip(norms, (query, key), strict=True)]
        got = function(query, key, norms[0].weight, norms[1].weight, cos, sin, EPS)
    assert cos.shape == (3, 96)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def plain() -> dict[str, Any]:
    tables = {"cos": draw(3, 4, 6), "sin": draw(4, 4, 6)}
    weights = {"query_weight": draw(1, 8), "key_weight": draw(2, 8)}
    return {"query": draw(0, 1, 4, 2, 8), "key": draw(5, 1, 4, 2, 8), **weights, **tables}


@BOTH
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"query": draw(0, 1, 4, 16)}, r"query must be \(batch, rows, heads, channels\)"),
        ({"key": draw(0, 1, 4, 2, 16)[..., ::2]}, r"key has channels 2 apart: pass key\.contiguous\(\)"),
        ({"key": draw(0, 1, 5, 2, 8)}, "query and key must agree but for their heads"),
        ({"key": draw(0, 1, 4, 2, 8, dtype=torch.float16)}, "query and key must agree but for their heads"),
        ({"query_weight": draw(0, 9)}, r"query_weight must be \(8,\)"),
        ({"sin": None}, "cos and sin come together"),
        ({"cos": draw(0, 4, 5)}, "cos has 5 channels: an even number up to 8"),
        ({"cos": draw(0, 4, 10)}, "cos has 10 channels: an even number up to 8"),
        ({"sin": draw(0, 3, 6)}, r"sin must be \(4, 6\)"),
        ({"sin": draw(0, 4, 12)[:, ::2]}, "sin has channels 2 apart"),
        ({"cos": torch.zeros(4, 6, device="meta")}, "all tensors must be on one device"),
    ],
)
def test_what_does_not_fit_is_refused(function: Any, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        function(**{**plain(), **change}, eps=EPS)


def test_a_kernel_refuses_what_it_has_no_code_for() -> None:
    wide = draw(0, 1, 1, 1, MAX_HEAD_DIM + 1)
    with pytest.raises(
        ValueError, match="heads of 257 channels and this kernel takes 256: use the reference"
    ):
        qk_norm_rope(wide, wide, None, None, None, None, EPS)
    double = draw(0, 1, 1, 1, 8).double()
    with pytest.raises(ValueError, match=r"query is torch\.float64: cast it"):
        qk_norm_rope(double, double, None, None, None, None, EPS)
    assert OPS["qk_norm_rope"].named("triton").needs.at_most == {"head_dim": MAX_HEAD_DIM}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("heads", [1, 7, 56, 64])
def test_every_config_gives_the_same(target: str, heads: int) -> None:
    call = plain()
    call["query"], call["key"] = draw(0, 1, 4, heads, 8), draw(1, 1, 4, heads, 8)
    results = [qk_norm_rope(**call, eps=EPS, config=config) for config in configs(heads, 8, target)]
    assert all(
        torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True)
    )


def test_heads_of_h3_leave_no_lane_idle() -> None:
    assert configs(56, 128, "sm_90")[0].blocks == {"HEADS": 8}
    assert configs(64, 128, "sm_90")[0].blocks == {"HEADS": 32}
