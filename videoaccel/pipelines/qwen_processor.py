"""The Qwen3-VL processor without torchvision: what the H3 blocks call of it, in PIL and torch.

Images go through transformers' own PIL image processor. Videos have no such variant in transformers, so this
file follows `Qwen3VLVideoProcessor` (transformers 5.24): its `smart_resize` over the whole clip, bicubic
resize, rescale, normalise, and the patch layout `(grid_t * grid_h * grid_w, C * T * P * P)`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from videoaccel.errors import UserError

# `Qwen3VLVideoProcessor`'s class defaults, for checkpoints that ship no video_preprocessor_config.json.
_VIDEO_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
_HALF = (0.5, 0.5, 0.5)


class QwenVideoProcessor:
    """Clips to the patch rows of Qwen3-VL's vision tower.

    Attributes:
        patch_size: pixels of a patch's edge, P.
        temporal_patch_size: frames merged into one patch, T.
        merge_size: patches of an edge that the vision tower merges into one token.
        size: `shortest_edge` and `longest_edge`: least and most pixels of a whole clip.
    """

    def __init__(
        self,
        *,
        patch_size: int = 16,
        temporal_patch_size: int = 2,
        merge_size: int = 2,
        size: Mapping[str, int] | None = None,
        image_mean: Sequence[float] = _HALF,
        image_std: Sequence[float] = _HALF,
        rescale_factor: float = 1 / 255,
    ) -> None:
        self.patch_size = patch_size
        self.temporal_patch_size = temporal_patch_size
        self.merge_size = merge_size
        self.size = dict(size or _VIDEO_SIZE)
        self.image_mean = tuple(image_mean)
        self.image_std = tuple(image_std)
        self.rescale_factor = rescale_factor

    def __call__(
        self,
        videos: Sequence[np.ndarray[Any, Any]],
        do_sample_frames: bool = False,
        return_tensors: str = "pt",
    ) -> dict[str, torch.Tensor]:
        """Patch rows of clips that are sampled already.

        Args:
            videos: one `(T, H, W, 3)` uint8 array a clip.
            do_sample_frames: must be False; the H3 blocks sample for themselves.
            return_tensors: must be `"pt"`.

        Returns:
            `pixel_values_videos` `(sum of rows, 3 * T * P * P)` float32, `video_grid_thw` `(clips, 3)` int64.
        """
        if do_sample_frames or return_tensors != "pt":
            raise ValueError("Pass sampled frames and return_tensors='pt'.")
        rows, grids = [], []
        for video in videos:
            patches, grid = self._patches(np.asarray(video))
            rows.append(patches)
            grids.append(grid)
        return {
            "pixel_values_videos": torch.cat(rows),
            "video_grid_thw": torch.tensor(grids, dtype=torch.int64),
        }

    def resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """`(height, width)` a clip is resized to: multiples of `patch_size * merge_size`, the clip in `size`.

        As `smart_resize` of transformers' qwen3_vl video processor.
        """
        factor, temporal = self.patch_size * self.merge_size, self.temporal_patch_size
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise UserError(
                f"a {width}x{height} reference video is too narrow; keep its aspect ratio under 200"
            )
        low, high = self.size["shortest_edge"], self.size["longest_edge"]
        out_h, out_w = round(height / factor) * factor, round(width / factor) * factor
        pixels = round(frames / temporal) * temporal * out_h * out_w
        if pixels > high:
            beta = math.sqrt(frames * height * width / high)
            out_h = max(factor, math.floor(height / beta / factor) * factor)
            out_w = max(factor, math.floor(width / beta / factor) * factor)
        elif pixels < low:
            beta = math.sqrt(low / (frames * height * width))
            out_h = math.ceil(height * beta / factor) * factor
            out_w = math.ceil(width * beta / factor) * factor
        return out_h, out_w

    def _patches(self, video: np.ndarray[Any, Any]) -> tuple[torch.Tensor, tuple[int, int, int]]:
        count, height, width = video.shape[:3]
        out_h, out_w = self.resized(count, height, width)
        if (out_h, out_w) != (height, width):
            bicubic = Image.Resampling.BICUBIC
            video = np.stack([np.asarray(Image.fromarray(f).resize((out_w, out_h), bicubic)) for f in video])
        pixels = torch.from_numpy(np.ascontiguousarray(video)).permute(0, 3, 1, 2).to(torch.float32)
        # transformers folds the rescale into mean and deviation; the order of operations is kept.
        mean = torch.tensor(self.image_mean).view(1, -1, 1, 1) * (1.0 / self.rescale_factor)
        std = torch.tensor(self.image_std).view(1, -1, 1, 1) * (1.0 / self.rescale_factor)
        pixels = (pixels - mean) / std
        t, p, m = self.temporal_patch_size, self.patch_size, self.merge_size
        if pad := -count % t:
            pixels = torch.cat([pixels, pixels[-1:].expand(pad, -1, -1, -1)])
        grid = (len(pixels) // t, out_h // p, out_w // p)
        blocks = pixels.reshape(grid[0], t, 3, grid[1] // m, m, p, grid[2] // m, m, p)
        blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return blocks.reshape(grid[0] * grid[1] * grid[2], 3 * t * p * p), grid


class QwenProcessor:
    """The parts of `Qwen3VLProcessor` that conditioning needs.

    Attributes:
        tokenizer: the checkpoint's tokenizer, passed through.
        image_processor: transformers' `Qwen2VLImageProcessorPil`.
        video_processor: `QwenVideoProcessor`.
    """

    def __init__(self, *, tokenizer: Any, image_processor: Any, video_processor: QwenVideoProcessor) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        self.image_token_id: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.video_token_id: int = tokenizer.convert_tokens_to_ids("<|video_pad|>")

    def create_mm_token_type_ids(self, input_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Per token: 0 text, 1 image, 2 video."""
        kinds = {self.image_token_id: 1, self.video_token_id: 2}
        return [[kinds.get(int(token), 0) for token in row] for row in input_ids]

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Any) -> QwenProcessor:
        """Read `preprocessor_config.json` and `video_preprocessor_config.json`, or `processor_config.json`.

        Raises:
            UserError: the folder holds no image processor config.
        """
        both = _read(folder / "processor_config.json")
        image = _read(folder / "preprocessor_config.json") or both.get("image_processor", {})
        video = _read(folder / "video_preprocessor_config.json") or both.get("video_processor", {})
        if not image:
            raise UserError(f"no preprocessor_config.json in {folder}; copy the whole processor folder there")
        patches = {
            key: image[key] for key in ("patch_size", "temporal_patch_size", "merge_size") if key in image
        }
        # The auto class's bookkeeping keys are not settings of the PIL class.
        settings = {
            key: value
            for key, value in image.items()
            if not key.endswith("_type") and key != "processor_class"
        }
        settings.pop("auto_map", None)
        # Qwen3-VL normalises by 0.5; the Qwen2-VL class defaults to CLIP's statistics.
        settings.setdefault("image_mean", list(_HALF))
        settings.setdefault("image_std", list(_HALF))
        keys = (
            "patch_size",
            "temporal_patch_size",
            "merge_size",
            "size",
            "image_mean",
            "image_std",
            "rescale_factor",
        )
        chosen = {**patches, **{key: video[key] for key in keys if video.get(key) is not None}}
        return cls(
            tokenizer=tokenizer,
            image_processor=Qwen2VLImageProcessorPil(**settings),
            video_processor=QwenVideoProcessor(**chosen),
        )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"cannot read {path}: {error}; restore it from the checkpoint's source") from error
    return value if isinstance(value, dict) else {}
