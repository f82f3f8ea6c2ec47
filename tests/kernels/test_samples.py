"""Every op is timed with arguments that it takes."""

from __future__ import annotations

import pytest
import torch

from videoaccel.kernels.ops import OPS
from videoaccel.kernels.registry import EAGER
from videoaccel.kernels.samples import SAMPLES, Draw

SIZES = {
    "rows": 7,
    "key_rows": 5,
    "heads": 2,
    "head_dim": 8,
    "width": 16,
    "in_features": 16,
    "out_features": 4,
}


@pytest.mark.parametrize("op", [name for name in SAMPLES if name in OPS])
def test_the_reference_takes_the_arguments(op: str) -> None:
    arguments = SAMPLES[op](SIZES, Draw(torch.float32, torch.device("cpu")))
    results = OPS[op].named(EAGER).load()(*arguments)
    for result in results if isinstance(results, tuple) else (results,):
        assert result.isfinite().all() and result.shape[:2] == (1, SIZES["rows"])


def test_linear_takes_the_arguments() -> None:
    x, weight = SAMPLES["linear"](SIZES, Draw(torch.float32, torch.device("cpu")))
    assert torch.nn.functional.linear(x, weight).shape == (1, SIZES["rows"], SIZES["out_features"])


def test_rows_of_one_table_row_lie_together() -> None:
    index = Draw(torch.float32, torch.device("cpu")).index(100)
    assert index.tolist() == sorted(index.tolist()) and len(set(index.tolist())) == 6
