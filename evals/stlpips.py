"""ST-LPIPS: a learned perceptual distance that forgives one-pixel shifts, with the weights its authors ship.

The package `stlpips-pytorch` carries whole weights in its wheel, but its Python imports torchvision, IPython
and torchsummary. Only its weights file is used here; the AlexNet trunk below follows the paper (Ghildyal and
Liu, "Shift-tolerant Perceptual Similarity Metric", ECCV 2022) and is tested against the package's own.
It is not LPIPS: the numbers are on another scale, and are never called by that name.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from videoaccel.errors import UserError

WEIGHTS = Path("weights/vST0.0/alex_shift_tolerant.pth")


def weights_file() -> Path:
    """The weights in the installed package, found without importing it.

    Raises:
        UserError: the package is not installed.
    """
    spec = importlib.util.find_spec("stlpips_pytorch")
    for folder in (spec.submodule_search_locations if spec is not None else None) or []:
        if (Path(folder) / WEIGHTS).is_file():
            return Path(folder) / WEIGHTS
    raise UserError('ST-LPIPS needs its weights: pip install "videoaccel[eval]"')


@functools.cache
def load_weights() -> dict[str, Tensor]:
    """The state dict: trunk, blur filters, input scaling and the five linear heads."""
    state: dict[str, Tensor] = torch.load(weights_file(), map_location="cpu", weights_only=True)
    return state


def blur_pool(x_BCHW: Tensor, filters: Tensor) -> Tensor:
    """Blurs with a 3x3 binomial filter and takes every second pixel; 2 px of reflection each side."""
    padded = F.pad(x_BCHW, (2, 2, 2, 2), mode="reflect")
    return F.conv2d(padded, filters, stride=2, groups=x_BCHW.shape[1])


def features(x_BCHW: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    """The five AlexNet feature maps; every stride is a blur pool, the first one before its rectifier."""
    x = F.conv2d(x_BCHW, w["net.slice1.0.weight"], w["net.slice1.0.bias"], padding=2)
    maps = [F.relu(blur_pool(x, w["net.slice1.1.filt"]))]
    x = blur_pool(F.max_pool2d(maps[-1], 3, stride=1), w["net.slice2.4.filt"])
    maps.append(F.relu(F.conv2d(x, w["net.slice2.5.weight"], w["net.slice2.5.bias"], padding=2)))
    x = blur_pool(F.max_pool2d(maps[-1], 3, stride=1), w["net.slice3.8.filt"])
    maps.append(F.relu(F.conv2d(x, w["net.slice3.9.weight"], w["net.slice3.9.bias"], padding=1)))
    maps.append(F.relu(F.conv2d(maps[-1], w["net.slice4.11.weight"], w["net.slice4.11.bias"], padding=1)))
    maps.append(F.relu(F.conv2d(maps[-1], w["net.slice5.13.weight"], w["net.slice5.13.bias"], padding=1)))
    return maps


@torch.inference_mode()
def stlpips(a_THWC: np.ndarray[Any, Any], b_THWC: np.ndarray[Any, Any]) -> float:
    """The mean ST-LPIPS distance of two clips, frame by frame; 0 for equal clips.

    Args:
        a_THWC, b_THWC: `(T, H, W, 3)` uint8, at least 32 px a side.

    Raises:
        UserError: the weights are not installed, or the frames are too small.
    """
    if min(a_THWC.shape[1:3]) < 32:
        raise UserError(f"ST-LPIPS needs frames of 32 px at least, not {a_THWC.shape[2]}x{a_THWC.shape[1]}")
    w = load_weights()
    total = 0.0
    for frames in zip(a_THWC, b_THWC, strict=True):
        pair = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        pair = (pair - w["scaling_layer.shift"]) / w["scaling_layer.scale"]
        for index, x in enumerate(features(pair, w)):
            unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
            difference = (unit[:1] - unit[1:]).square()
            total += F.conv2d(difference, w[f"lin{index}.model.1.weight"]).mean().item()
    return total / len(a_THWC)
