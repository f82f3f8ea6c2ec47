"""What the tests of an accelerator share. `python -m evals.gpu_tests` runs this folder by itself.

Nothing here leans on tests/conftest.py: an accelerator machine may have pytest and little else. The variable
VIDEOACCEL_TEST_DEVICE=cpu runs the same tests on a CPU, at a small size, to try them out.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Before anything imports a hub client: a test that would fetch something fails instead.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import pytest
import torch

from videoaccel.pipelines.loading import load

HERE = Path(__file__).parent
DEVICE = torch.device(os.environ.get("VIDEOACCEL_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder where there is no accelerator and nobody asked for the CPU."""
    if ON_CUDA and not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def _helpers() -> ModuleType:
    # By path: other installed packages may be called `tests` too, so no import name is safe.
    spec = importlib.util.spec_from_file_location("family_helpers", HERE.parent / "pipelines" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_shared = _helpers()
stock_h3, make_wan, picture = _shared.stock_h3, _shared.make_wan, _shared.picture


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference| in float64; refuses NaN, infinity and a reference of 0."""
    a, b = value.detach().double().cpu(), reference.detach().double().cpu()
    assert a.shape == b.shape and a.isfinite().all() and b.isfinite().all() and b.any()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


@pytest.fixture(autouse=True)
def plain_arithmetic() -> Iterator[None]:
    """TF32 off, and cuDNN held to repeatable algorithms.

    Two implementations can agree to the bit only where one of them agrees with itself from call to call.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32)
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = False, True, False, False
    yield
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = before


@pytest.fixture(scope="session")
def device_pipes() -> dict[torch.dtype, Any]:
    """The bundled model on the device, in the precision of an accelerator and in float32."""
    return {dtype: load("tiny-h3", device=DEVICE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def pipe(request: pytest.FixtureRequest, device_pipes: dict[torch.dtype, Any]) -> Any:
    """The bundled model on the device, in one precision after the other."""
    return device_pipes[request.param]


@pytest.fixture(scope="session")
def cpu_pipe() -> Any:
    """The bundled model on the CPU, in float32."""
    return load("tiny-h3", device="cpu", dtype=torch.float32)
