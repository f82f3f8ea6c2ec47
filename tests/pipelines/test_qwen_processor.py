"""The processor without torchvision, against an index-by-index formula and transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3VLProcessor

from videoaccel.errors import UserError
from videoaccel.pipelines.qwen_processor import QwenProcessor, QwenVideoProcessor

from .conftest import picture


def patch_row(pixels: np.ndarray[Any, Any], grid: tuple[int, int, int], row: int) -> np.ndarray[Any, Any]:
    """Row `row` of the patch layout of `(T, H, W, 3)` pixels: merge blocks of 2x2, then C, T, P, P."""
    per_frame = grid[1] * grid[2]
    t, rest = divmod(row, per_frame)
    block, inside = divmod(rest, 4)
    block_y, block_x = divmod(block, grid[2] // 2)
    y, x = 16 * (2 * block_y + inside // 2), 16 * (2 * block_x + inside % 2)
    patch = pixels[2 * t : 2 * t + 2, y : y + 16, x : x + 16]
    return patch.transpose(3, 0, 1, 2).reshape(-1)


def scaled(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return pixels.astype(np.float64) / 255 * 2 - 1


def test_images_are_laid_out_as_the_formula(tiny: Any) -> None:
    images = [picture(0, 96, 64), picture(1, 64, 128)]
    out = tiny.processor.image_processor(images=images, return_tensors="pt")
    assert out["image_grid_thw"].tolist() == [[1, 4, 6], [1, 8, 4]]
    rows = out["pixel_values"].double().numpy()
    offset = 0
    for image, grid in zip(images, out["image_grid_thw"].tolist(), strict=True):
        # A still image fills both frames of a temporal patch.
        pixels = np.repeat(scaled(np.asarray(image))[None], 2, axis=0)
        for row in range(grid[1] * grid[2]):
            np.testing.assert_allclose(rows[offset + row], patch_row(pixels, tuple(grid), row), atol=1e-6)
        offset += grid[1] * grid[2]
    assert offset == len(rows)


@pytest.mark.parametrize("frames", [4, 5])
def test_videos_are_laid_out_as_the_formula_and_odd_lengths_repeat_the_last_frame(frames: int) -> None:
    video = np.random.default_rng(0).integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8)
    processor = QwenVideoProcessor(size={"shortest_edge": 1024, "longest_edge": 2**20})
    out = processor(videos=[video])
    grid = (3 if frames == 5 else 2, 4, 6)
    assert out["video_grid_thw"].tolist() == [list(grid)]
    padded = np.concatenate([video, video[-1:]]) if frames == 5 else video
    rows = out["pixel_values_videos"].double().numpy()
    assert rows.shape == (grid[0] * 24, 3 * 2 * 16 * 16)
    for row in range(len(rows)):
        np.testing.assert_allclose(rows[row], patch_row(scaled(padded), grid, row), atol=1e-6)


def test_a_one_frame_pair_of_a_video_equals_the_image_processor(tiny: Any) -> None:
    image = picture(3, 90, 70)
    pixels = np.stack([np.asarray(image)] * 2)
    size = tiny.processor.image_processor.size
    bounds = {"shortest_edge": 2 * size["shortest_edge"], "longest_edge": 2 * size["longest_edge"]}
    still = tiny.processor.image_processor(images=[image], return_tensors="pt")
    clip = QwenVideoProcessor(size=bounds)(videos=[pixels])
    assert clip["video_grid_thw"].tolist() == still["image_grid_thw"].tolist()
    torch.testing.assert_close(clip["pixel_values_videos"], still["pixel_values"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [(2, 10, 20), (4, 64, 64), (8, 480, 854), (16, 1080, 1920), (3, 33, 4000), (60, 768, 1344)]
)
def test_resize_is_the_one_of_transformers(shape: tuple[int, int, int]) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    processor = QwenVideoProcessor()
    expected = smart_resize(
        *shape,
        temporal_factor=2,
        factor=32,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    assert processor.resized(*shape) == expected


def test_token_types_are_the_ones_of_transformers(tiny: Any) -> None:
    processor = tiny.processor
    tokens = [1, processor.image_token_id, processor.image_token_id, 2, processor.video_token_id]

    class Ids:
        image_token_ids = (processor.image_token_id,)
        video_token_ids = (processor.video_token_id,)
        audio_token_ids: tuple[int, ...] = ()

    assert processor.create_mm_token_type_ids([tokens]) == [[0, 1, 1, 0, 2]]
    assert Qwen3VLProcessor.create_mm_token_type_ids(Ids(), [tokens]) == [[0, 1, 1, 0, 2]]  # type: ignore[arg-type]


def test_configs_of_transformers_5_in_one_file_are_read(tmp_path: Path, tiny: Any) -> None:
    (tmp_path / "processor_config.json").write_text(
        '{"processor_class": "Qwen3VLProcessor", "image_processor": {'
        '"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14,'
        '"size": {"shortest_edge": 3136, "longest_edge": 12544}},'
        '"video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", "temporal_patch_size": 4}}'
    )
    processor = QwenProcessor.from_folder(tmp_path, tiny.tokenizer)
    assert processor.image_processor.patch_size == processor.video_processor.patch_size == 14
    assert list(processor.image_processor.image_mean) == [0.5, 0.5, 0.5]
    assert processor.video_processor.temporal_patch_size == 4
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        QwenProcessor.from_folder(tmp_path / "none", tiny.tokenizer)
