"""The Qwen processor without torchvision, against transformers' own classes, which are built on it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2Tokenizer

from videoaccel.pipelines.loading import bundled_folder
from videoaccel.pipelines.qwen_processor import QwenProcessor, QwenVideoProcessor

pytestmark = pytest.mark.gpu

LEVEL = 2 / 255
"""One of 256 grey levels, in the processor's normalised units."""
EXACT = 1e-6
MOST, MEAN = 2 * LEVEL, 0.5 * LEVEL
"""With a resize: both resize bytes and round their bicubic weights differently. Another filter is 2.5 off in
the mean and 12 at the most, in levels."""


def scene(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Noise over a gradient, `(H, W, 3)` uint8: sharp enough that another filter would show."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 160, width)[None, :, None] + np.zeros((height, 1, 3))
    return (ramp + rng.integers(0, 96, (height, width, 3))).astype(np.uint8)


@pytest.fixture(scope="module")
def ours() -> QwenProcessor:
    folder = bundled_folder("tiny-h3")
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    return QwenProcessor.from_folder(folder / "processor", tokenizer)


def assert_close(got: torch.Tensor, want: torch.Tensor, resized: bool) -> None:
    assert got.shape == want.shape
    difference = (got.double() - want.double()).abs()
    assert float(difference.max()) <= (MOST if resized else EXACT)
    assert float(difference.mean()) <= (MEAN if resized else EXACT)


# The first two are multiples of the merged patch, 32 px, within the size limits: no resize.
@pytest.mark.parametrize(
    ("height", "width", "resized"), [(64, 96, False), (128, 128, False), (90, 71, True), (200, 333, True)]
)
def test_images(ours: QwenProcessor, height: int, width: int, resized: bool, record_property: Any) -> None:
    pytest.importorskip("torchvision")
    from transformers import Qwen2VLImageProcessor

    raw = json.loads((bundled_folder("tiny-h3") / "processor" / "preprocessor_config.json").read_text())
    settings = {k: v for k, v in raw.items() if not k.endswith("_type") and k != "processor_class"}
    theirs = Qwen2VLImageProcessor(**settings)
    assert "Pil" not in type(theirs).__name__
    image = Image.fromarray(scene(height, height, width))
    got = ours.image_processor(images=[image], return_tensors="pt")
    want = theirs(images=[image], return_tensors="pt")
    assert got["image_grid_thw"].tolist() == want["image_grid_thw"].tolist()
    record_property("max_levels", float((got["pixel_values"] - want["pixel_values"]).abs().max()) / LEVEL)
    assert_close(got["pixel_values"], want["pixel_values"], resized)


@pytest.mark.parametrize(("frames", "height", "width", "resized"), [(4, 64, 96, False), (5, 90, 71, True)])
def test_videos(frames: int, height: int, width: int, resized: bool, record_property: Any) -> None:
    pytest.importorskip("torchvision")
    from transformers import Qwen3VLVideoProcessor

    size = {"shortest_edge": 2 * 32 * 32, "longest_edge": 2**22}
    video = np.stack([scene(index, height, width) for index in range(frames)])
    got = QwenVideoProcessor(size=size)(videos=[video])
    theirs = Qwen3VLVideoProcessor(size=size, do_sample_frames=False, cap_pixels_per_frame=False)
    want = theirs(videos=[torch.from_numpy(video).permute(0, 3, 1, 2)], return_tensors="pt")
    assert got["video_grid_thw"].tolist() == want["video_grid_thw"].tolist()
    difference = got["pixel_values_videos"] - want["pixel_values_videos"]
    record_property("max_levels", float(difference.abs().max()) / LEVEL)
    assert_close(got["pixel_values_videos"], want["pixel_values_videos"], resized)
