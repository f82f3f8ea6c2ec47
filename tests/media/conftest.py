"""A short clip with sound, and the picture in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from videoaccel.media import (
    write_video,
)


def moving_square(frames: int, height: int = 64, width: int = 96) -> np.ndarray:
    clip = np.full((frames, height, width, 3), 30, np.uint8)
    for t in range(frames):
        clip[t, 16:48, 2 * t % width : 2 * t % width + 16] = (200, 120, 40)
    return clip


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    sound = np.zeros((2, 52_000), np.float32)
    sound[:, 26_000:26_200] = 0.8
    write_video(tmp_path / "clip.mp4", moving_square(39), fps=24, audio=sound, rate=32_000)
    return tmp_path / "clip.mp4"
