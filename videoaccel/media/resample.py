"""Changes the sample rate of a sound, through the resampler of ffmpeg that PyAV carries."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from videoaccel.errors import UserError
from videoaccel.media.mp4 import Float32

MIN_RATE = 1_000
"""Lowest sample rate of a sound, Hz. Telephones have 8000; far below, ffmpeg's resampler gives nothing."""


def resample(samples: npt.NDArray[Any], rate: int, target: int) -> Float32:
    """`(channels, N)` float at `rate` samples a second as `(channels, round(N * target / rate))` at `target`.

    Args:
        samples: mono or stereo.
        rate: its samples a second.
        target: the samples a second to give.

    Raises:
        UserError: a sample rate of no sound, or so short a sound that nothing of it is left.
    """
    import av

    same: Float32 = np.ascontiguousarray(samples, dtype=np.float32)
    if rate == target:
        return same
    if rate < MIN_RATE:
        raise UserError(f"a sound of {rate} samples a second is none; give one of {MIN_RATE} Hz at least")
    layout = "mono" if len(same) == 1 else "stereo"
    frame = av.AudioFrame.from_ndarray(same, format="fltp", layout=layout)
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=target)
    blocks = [block.to_ndarray() for part in (frame, None) for block in resampler.resample(part)]
    length = round(same.shape[1] * target / rate)
    if not blocks or length == 0:
        raise UserError(f"a sound of {same.shape[1] / rate:.2g} s is too short; give a longer one")
    out = np.zeros((len(same), length), np.float32)
    found = np.concatenate(blocks, axis=1)[:, :length]
    out[:, : found.shape[1]] = found
    return out
