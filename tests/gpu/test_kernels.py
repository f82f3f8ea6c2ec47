"""The ops' kernels as a device compiles and runs them: numerics, far offsets, CUDA graphs, no host sync.

tests/kernels runs the same kernels in an interpreter, over many more shapes.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import DEVICE, ON_CUDA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CUDA, reason="a CPU compiles no kernel; tests/kernels interprets them"),
]
pytest.importorskip("triton")

from videoaccel.kernels import modulation_triton as modulation  # noqa: E402
from videoaccel.kernels.launch import target_of  # noqa: E402
from videoaccel.kernels.linear_fp8_block import quantize_squares  # noqa: E402
from videoaccel.kernels.linear_fp8_triton import configs as linear_configs  # noqa: E402
from videoaccel.kernels.linear_fp8_triton import linear_fp8, linear_fp8_block  # noqa: E402
from videoaccel.kernels.qk_norm_rope_triton import configs as head_configs  # noqa: E402
from videoaccel.kernels.qk_norm_rope_triton import qk_norm_rope  # noqa: E402
from videoaccel.kernels.quantize_fp8 import BLOCK, quantize_fp8_reference  # noqa: E402
from videoaccel.kernels.quantize_fp8_triton import quantize_fp8  # noqa: E402
from videoaccel.kernels.rows_triton import row_configs  # noqa: E402
from videoaccel.kernels.swiglu_triton import configs as swiglu_configs  # noqa: E402
from videoaccel.kernels.swiglu_triton import swiglu  # noqa: E402

EPS = 1e-5
WIDTH, HEADS, HEAD_DIM, ROTARY, FFN = 5376, 56, 128, 96, 14_336
"""Of MiniMax-H3."""
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
ROWS = pytest.mark.parametrize("shape", [(1, 1), (1, 37), (2, 301)], ids=["one", "odd", "batch"])


def _references() -> ModuleType:
    # By path: other installed packages may be called `tests` too, so no import name is safe.
    path = Path(__file__).parents[1] / "kernels" / "references.py"
    spec = importlib.util.spec_from_file_location("kernel_references", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


references = _references()


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def modulated(batch: int, rows: int, dtype: torch.dtype, width: int = WIDTH) -> dict[str, Any]:
    """The arguments of all three modulation ops; the tables are chunks of one."""
    tables = draw(2, 6, 6 * width, dtype=dtype)
    shift, scale, gate = tables.chunk(6, 1)[:3]
    residual, x = draw(0, batch, rows, width, dtype=dtype), draw(1, batch, rows, width, dtype=dtype)
    named = {"residual": residual, "x": x, "gate": gate, "index": torch.arange(rows, device=DEVICE) % 6}
    return {**named, "weight": draw(3, width, dtype=dtype), "shift": shift, "scale": scale}


def heads(batch: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Queries and keys as chunks of a fused projection, with their angles."""
    fused = draw(0, batch, rows, 3 * HEADS, HEAD_DIM, dtype=dtype)
    query, key, _ = fused.chunk(3, 2)
    angles = draw(1, rows, ROTARY) * 10
    gains = {"query_weight": draw(2, HEAD_DIM, dtype=dtype), "key_weight": draw(3, HEAD_DIM, dtype=dtype)}
    return {"query": query, "key": key, **gains, "cos": angles.cos(), "sin": angles.sin()}


def linear(rows: int, inner: int, outer: int, by_block: bool) -> dict[str, Any]:
    """Codes and scales of rows and of a weight."""
    codes, scales = quantize_fp8_reference(draw(0, 1, rows, inner), block=BLOCK if by_block else None)
    weight = draw(1, outer, inner)
    made, weight_scales = quantize_squares(weight) if by_block else quantize_fp8_reference(weight)
    return {"codes": codes, "scales": scales, "weight": made, "weight_scales": weight_scales}


def picked(call: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: call[name] for name in names}


GATE, NORM = ("residual", "x", "gate", "index"), ("weight", "shift", "scale", "index")


def parts(call: dict[str, Any], quantize: bool) -> tuple[Tensor, ...]:
    """The fused op's results by the ops it is made of."""
    added = modulation.gate_residual(**picked(call, *GATE))
    rest = modulation.norm_modulate(added, **picked(call, *NORM), eps=EPS, quantize=quantize)
    return added, *(rest if quantize else (rest,))


def fused(call: dict[str, Any], quantize: bool, **more: Any) -> tuple[Tensor, ...]:
    return modulation.gate_residual_norm_modulate(**call, eps=EPS, quantize=quantize, **more)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """To the bit."""
    return all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@DTYPES
@ROWS
def test_modulation(shape: tuple[int, int], dtype: torch.dtype) -> None:
    call = modulated(*shape, dtype)
    added, normed = fused(call, False)
    references.assert_close(added, *references.gate_residual(**picked(call, *GATE)))
    want = references.norm_modulate(added, *(call[name] for name in NORM), eps=EPS)
    references.assert_close(normed, *want)
    _, codes, scales = fused(call, True)
    references.assert_quantized(codes, scales, *want)


@DTYPES
@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("width", [1, 24, 5376, 16384])
def test_the_fused_op_is_its_parts_in_turn(width: int, quantize: bool, dtype: torch.dtype) -> None:
    call = modulated(2, 33, dtype, width)
    assert same(fused(call, quantize), parts(call, quantize))


@DTYPES
@ROWS
def test_qk_norm_rope(shape: tuple[int, int], dtype: torch.dtype) -> None:
    call = heads(*shape, dtype)
    angles = call["cos"], call["sin"], EPS
    for name, got in zip(("query", "key"), qk_norm_rope(**call, eps=EPS), strict=True):
        references.assert_close(got, *references.qk_norm_rope(call[name], call[f"{name}_weight"], *angles))


@DTYPES
@ROWS
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(0, *shape, 2 * FFN, dtype=dtype)
    references.assert_close(swiglu(x), *references.swiglu(x))
    references.assert_quantized(*swiglu(x, quantize=True), *references.swiglu(x))


@DTYPES
@ROWS
@pytest.mark.parametrize("block", [None, BLOCK], ids=["row", "block"])
def test_codes_are_those_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, block: int | None
) -> None:
    x = draw(0, *shape, WIDTH, dtype=dtype)
    x[0, 0] = 0
    assert same(quantize_fp8(x, block=block), quantize_fp8_reference(x, block=block))
    x[0, 0, 5] = torch.nan
    codes, scales = quantize_fp8(x, block=block)
    first = slice(0, BLOCK if block else WIDTH)
    assert scales.flatten()[0].isnan() and codes[0, 0, first].float().isnan().all()


@DTYPES
def test_every_config_gives_the_same(dtype: torch.dtype) -> None:
    target = target_of(DEVICE)
    call, x = modulated(1, 33, dtype), draw(0, 1, 33, 2 * FFN, dtype=dtype)
    runs = [fused(call, False, config=config) for config in row_configs(WIDTH, target)]
    # The mean square is summed in another order: by a bit of float32, which may turn a rounding.
    for run in runs:
        torch.testing.assert_close(run[1], runs[0][1], rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    for config in swiglu_configs(FFN, target):
        assert same((swiglu(x, config=config),), (swiglu(x),))
    turned = heads(1, 33, dtype)
    for config in head_configs(HEADS, HEAD_DIM, target):
        got = qk_norm_rope(**turned, eps=EPS, config=config)
        for one, other in zip(got, qk_norm_rope(**turned, eps=EPS), strict=True):
            torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("by_block", [False, True], ids=["row", "block"])
@pytest.mark.parametrize("sizes", [(1, 16, 1), (37, 144, 260), (301, WIDTH, 7168)], ids=["one", "odd", "h3"])
def test_linear_fp8(sizes: tuple[int, int, int], by_block: bool, dtype: torch.dtype) -> None:
    call = linear(*sizes, by_block)
    function = linear_fp8_block if by_block else linear_fp8
    bias = draw(5, sizes[2], dtype=dtype)
    want, size = references.linear_fp8(**call, bias=bias)
    # float32 sums of thousands of terms, 128 of them at a time with the matrix units' 13 bits or more.
    near = 2.0**-13 * size
    for config in linear_configs(target_of(DEVICE), by_block=by_block):
        got = function(**call, bias=bias, dtype=dtype, config=config)
        error = (got.double() - want).abs()
        assert bool((error <= torch.finfo(dtype).eps * want.abs() + near).all())


OPS: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "norm_modulate": lambda: (
        modulation.norm_modulate,
        {**picked(modulated(1, 301, torch.bfloat16), "x", *NORM), "eps": EPS},
    ),
    "gate_residual": lambda: (modulation.gate_residual, picked(modulated(1, 301, torch.bfloat16), *GATE)),
    "gate_residual_norm_modulate": lambda: (
        modulation.gate_residual_norm_modulate,
        {**modulated(1, 301, torch.bfloat16), "eps": EPS, "quantize": True},
    ),
    "qk_norm_rope": lambda: (qk_norm_rope, {**heads(1, 301, torch.bfloat16), "eps": EPS}),
    "swiglu": lambda: (swiglu, {"x": draw(0, 1, 301, 2 * FFN, dtype=torch.bfloat16), "quantize": True}),
    "linear_fp8": lambda: (linear_fp8, {**linear(301, WIDTH, 260, False), "dtype": torch.bfloat16}),
    "linear_fp8_block": lambda: (
        linear_fp8_block,
        {**linear(301, WIDTH, 260, True), "dtype": torch.bfloat16},
    ),
    "quantize_fp8": lambda: (quantize_fp8, {"x": draw(0, 1, 301, FFN, dtype=torch.bfloat16), "block": BLOCK}),
}
EACH = pytest.mark.parametrize("op", OPS)


def results(function: Callable[..., Any], call: dict[str, Any]) -> tuple[Tensor, ...]:
    got = function(**call)
    return got if isinstance(got, tuple) else (got,)


@EACH
def test_nothing_waits_for_the_host(op: str) -> None:
    function, call = OPS[op]()
    function(**call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EACH
def test_a_cuda_graph_replays_it(op: str) -> None:
    """On new values in the same memory, as a captured block stack would."""
    function, call = OPS[op]()
    results(function, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(function, call)
    first = next(value for value in call.values() if isinstance(value, Tensor))
    # By bytes: torch can't do arithmetic on codes, and a turned row is new values of any type.
    first.copy_(first.view(torch.uint8).flip(-2).view(first.dtype))
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, results(function, call))


def test_rows_beyond_two_to_the_31_elements() -> None:
    """15 s of H3 has 104 k rows of 28672 channels in its feed-forward: int32 offsets would wrap."""
    free, _ = torch.cuda.mem_get_info()
    rows = 160_000
    if free < rows * 3 * FFN * 2 * 1.2:
        pytest.skip("too little memory")
    x = torch.empty(1, rows, 2 * FFN, dtype=torch.bfloat16, device=DEVICE)
    try:
        assert x.numel() > 2**32 and x.numel() // 2 > 2**31
        tail = draw(0, 1, 3, 2 * FFN, dtype=torch.bfloat16)
        x[:, -3:] = tail
        assert same((swiglu(x)[:, -3:],), (swiglu(tail),))
        codes, scales = swiglu(x, quantize=True)
        assert same((codes[:, -3:], scales[:, -3:]), swiglu(tail, quantize=True))
        # The same memory as the queries and keys of a fused projection.
        wide = x.view(-1)[: rows * 3 * 48 * HEAD_DIM].view(1, rows, 3 * 48, HEAD_DIM)
        assert wide.numel() > 2**31
        wide[:, -3:] = draw(1, 1, 3, 3 * 48, HEAD_DIM, dtype=torch.bfloat16)
        query, key, _ = wide.chunk(3, 2)
        got = qk_norm_rope(query, key, None, None, None, None, EPS)
        want = qk_norm_rope(query[:, -3:], key[:, -3:], None, None, None, None, EPS)
        assert same(tuple(part[:, -3:] for part in got), want)
    finally:
        del x
        gc.collect()
        torch.cuda.empty_cache()
