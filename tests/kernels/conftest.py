"""Runs Triton kernels in its interpreter, on the CPU, and mends the one part of it that computes wrongly.

tests/conftest.py asks for the interpreter before anything imports Triton: diffusers does, and what is
decorated before that is not interpreted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

DTYPES = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}


def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of `source` to bits of `target`, as torch rounds: to nearest, ties to even."""
    bits = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.uint8).copy())
    made = bits.view(DTYPES[source.name]).to(DTYPES[target.name]).contiguous()
    unsigned = getattr(np, f"uint{target.primitive_bitwidth}")
    return np.frombuffer(made.view(torch.uint8).numpy().tobytes(), dtype=unsigned).reshape(values.shape)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[None]:
    """Triton's interpreter, with torch's conversions to bfloat16 and FP8.

    Its own (3.6 to 3.9) round ties up instead of to even, lose the carry where rounding up reaches the next
    power of two, and cut subnormals off. On a device the conversion is one instruction, which rounds as torch
    does.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled on this machine: tests/gpu runs them")
    from triton.runtime import interpreter

    patch = pytest.MonkeyPatch()
    patch.setattr(interpreter, "_convert_float", convert_float)
    # Rows that are not finite are part of the tests; numpy warns of them where a device does not.
    with np.errstate(all="ignore"):
        yield
    patch.undo()
