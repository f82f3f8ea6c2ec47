"""The ops that a family lists for a forward, against what torch counts as its model runs on meta tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel, WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from evals.h3_dense import TINY
from videoaccel.errors import UserError
from videoaccel.kernels.work import work_of
from videoaccel.pipelines.family import FAMILIES, Family, ForwardOps, family_named
from videoaccel.pipelines.h3_ops import TEXT_ROWS, TIMESTEPS, h3_calls
from videoaccel.pipelines.op_calls import released_config


def counted(model: torch.nn.Module, *inputs: torch.Tensor) -> tuple[int, Counter[str]]:
    """FLOPs of a forward, and how often each kind of module ran."""
    ran: Counter[str] = Counter()

    def seen(module: torch.nn.Module, *_: Any) -> None:
        ran[type(module).__name__] += 1

    handles = [module.register_forward_hook(seen) for module in model.modules()]
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    for handle in handles:
        handle.remove()
    return counter.get_total_flops(), ran


def meta(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def run_h3(config: dict[str, Any], video: int, audio: int, text: int) -> tuple[int, Counter[str]]:
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**config)
    rows = video + audio + text
    full = released_config(MiniMaxH3Transformer3DModel) | config
    _, high, wide = full["patch_size"]
    floats = meta(
        (1, video, full["in_channels"] * high * wide),
        (1, audio, full["audio_in_channels"]),
        (1, text, full["text_dim"]),
        (TIMESTEPS,),
    )
    indices = meta((rows,), (rows,), dtype=torch.long)
    places = meta((video,), (audio,), (text,), dtype=torch.long)
    return counted(model, *floats, *indices, *meta((rows, 3)), *places)


def total(calls: Any) -> float:
    return sum(call.count * work_of(call, 2).flops for call in calls)


def number(ops: Any, name: str) -> int:
    return sum(call.count for call in ops if call.op == name)


@pytest.mark.parametrize(("config", "rows"), [({}, (37_296, 414, 256)), (TINY, (60, 14, 7))])
def test_h3_is_what_torch_counts(config: dict[str, Any], rows: tuple[int, int, int]) -> None:
    flops, ran = run_h3(config, *rows)
    video, audio, text = rows
    full = released_config(MiniMaxH3Transformer3DModel) | config
    calls = list(h3_calls(full, video_rows=video, audio_rows=audio, text_rows=text))
    assert total(calls) == flops
    assert number(calls, "linear") == ran["Linear"]
    assert number(calls, "attention") == ran["MiniMaxH3Attention"]
    assert number(calls, "swiglu") == ran["SwiGLU"]
    blocks = ran["MiniMaxH3TransformerBlock"]
    assert number(calls, "qk_norm_rope") == number(calls, "gate_residual") == blocks
    # Two modulated norms a block, the second behind the first gate, and the one before the heads.
    assert number(calls, "norm_modulate") == blocks + ran["MiniMaxH3AdaLayerNormOut"]
    assert number(calls, "gate_residual_norm_modulate") == blocks


def test_h3s_forward_is_the_one_that_is_measured() -> None:
    """The rows and FLOPs of the full-size forward at 5 s, and the size of its weights."""
    ops = family_named("minimax_h3").forward_ops()
    assert ops.rows == 37_296 + 414 + TEXT_ROWS == 37_966
    assert total(ops.calls) / 1e15 == pytest.approx(3.53, abs=0.005)
    attention = [call for call in ops.calls if call.op == "attention"]
    assert total(attention) / total(ops.calls) == pytest.approx(0.585, abs=0.001)
    assert ops.weights / 1e9 == pytest.approx(33.12, abs=0.01)


def test_wan_is_what_torch_counts() -> None:
    with torch.device("meta"):
        model = WanTransformer3DModel()
    ops = family_named("wan").forward_ops()
    latents, text = meta((1, 16, 21, 60, 104), (1, 512, 4096))
    flops, ran = counted(model, latents, *meta((1,)), text)
    assert ops.rows == 21 * 30 * 52
    assert total(ops.calls) == flops
    # The patch embedding is counted as the matrix that it is.
    assert number(ops.calls, "linear") == ran["Linear"] + ran["Conv3d"]
    assert number(ops.calls, "attention") == ran["WanAttention"] == 2 * ran["WanTransformerBlock"]
    assert {call.op for call in ops.calls} == {"linear", "attention"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_lists_ops_of_known_cost(name: str) -> None:
    ops = family_named(name).forward_ops()
    assert isinstance(ops, ForwardOps) and ops.title and ops.size
    for call in ops.calls:
        assert call.count > 0 and work_of(call, 2).bytes > 0


def test_a_family_that_does_not_say_is_refused() -> None:
    with pytest.raises(UserError, match="Wan does not list its ops; give --model another family"):
        Family.forward_ops(family_named("wan"))
