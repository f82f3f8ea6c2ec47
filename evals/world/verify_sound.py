"""Hears bounce tones: when each begins and at what pitch."""

from dataclasses import dataclass

import numpy as np

# Tones lie above, the hum below.
_LOW, _HIGH = 260.0, 1600.0
_WINDOW, _HOP = 0.024, 0.0025
_LOOK_BACK = 0.02
_APART = 0.045
# Smallest rise that counts: as an amplitude, and as a share of the clip's largest.
_MIN_AMPLITUDE = 0.04
_MIN_SHARE = 0.22


@dataclass(frozen=True, kw_only=True)
class Onset:
    """A tone's beginning: `time` in seconds, `pitch` in Hz, `strength` as an amplitude."""

    time: float
    pitch: float
    strength: float


def hear(audio: np.ndarray, rate: int) -> list[Onset]:
    """Find the onsets of tones above the hum.

    Args:
        audio: `(2, N)` floats in [-1, 1].
        rate: samples a second.

    Returns:
        Onsets in order of time.
    """
    size, hop = 2 * round(_WINDOW * rate / 2), max(1, round(_HOP * rate))
    if audio.size == 0 or audio.shape[1] < size:
        return []
    padded = np.pad(np.asarray(audio, np.float32), ((0, 0), (size, size)))
    starts = np.arange(0, padded.shape[1] - size, hop)
    window = np.hanning(size).astype(np.float32)
    pieces = np.lib.stride_tricks.sliding_window_view(padded, size, axis=1)[:, starts]
    bins = np.fft.rfftfreq(size, 1 / rate)
    band = (bins >= _LOW) & (bins <= _HIGH)
    # The root of the power over both channels, scaled so that a steady sine of amplitude a reads a.
    spectrum = np.abs(np.fft.rfft(pieces * window, axis=2)[..., band]) * (2 / window.sum())
    level = np.sqrt((spectrum**2).sum(axis=0))
    back = round(_LOOK_BACK / _HOP)
    rise = np.maximum(level[back:] - level[:-back], 0.0)
    flux = np.sqrt((rise**2).sum(axis=1)) * 0.8
    # The middle of the rise: half the look-back before the later window's centre.
    times = (starts[back:] + size / 2 - size) / rate - _LOOK_BACK / 2
    floor = max(_MIN_AMPLITUDE, _MIN_SHARE * float(flux.max(initial=0.0)))
    radius = round(_APART / _HOP)
    onsets: list[Onset] = []
    for index in np.flatnonzero(flux >= floor):
        near = flux[max(0, index - radius) : index + radius + 1]
        if flux[index] < near.max() or (onsets and times[index] - onsets[-1].time < _APART):
            continue
        after = rise[index]
        onsets.append(
            Onset(
                time=float(max(times[index], 0.0)),
                pitch=float(bins[band][after.argmax()]),
                strength=float(flux[index]),
            )
        )
    return onsets
