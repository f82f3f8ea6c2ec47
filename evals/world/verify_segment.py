"""Finds the saturated objects of a clip by hue: one mask a frame for each colour layer."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from evals.world.spec import HUES

MIN_CHROMA = 0.16
MIN_SATURATION = 0.42
# Smallest area, as a share of the canvas, that counts as an object in a frame, and the share of frames it
# must fill.
MIN_AREA = 0.004
MIN_PRESENCE = 0.25
_BINS = 120
_HUE_REACH = 0.055
_NAMED_REACH = 0.055


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One object: its pixels (T, H, W) bool, hue in turns, and the share of frames it is in."""

    hue: float
    mask: np.ndarray
    presence: float


def hue_gap(first: float, second: float) -> float:
    """Distance between two hues, in turns."""
    gap = abs(first - second) % 1.0
    return min(gap, 1.0 - gap)


def named_color(hue: float) -> str | None:
    """The nearest named hue; None where none is near."""
    name = min(HUES, key=lambda name: hue_gap(HUES[name], hue))
    return name if hue_gap(HUES[name], hue) <= _NAMED_REACH else None


def hue_of(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """Hue in turns of equally shaped RGB planes."""
    top = np.maximum(np.maximum(red, green), blue)
    safe = np.maximum(top - np.minimum(np.minimum(red, green), blue), 1e-6)
    sixths = np.where(
        top == red,
        ((green - blue) / safe) % 6.0,
        np.where(top == green, (blue - red) / safe + 2.0, (red - green) / safe + 4.0),
    )
    return np.asarray(sixths / 6.0)


def _soften(plane: np.ndarray) -> np.ndarray:
    """A light 3x3 blur of (T, H, W): takes the edge off codec noise."""
    out = 0.76 * plane
    out[:, 1:] += 0.12 * plane[:, :-1]
    out[:, :-1] += 0.12 * plane[:, 1:]
    out[:, 0] += 0.12 * plane[:, 0]
    out[:, -1] += 0.12 * plane[:, -1]
    soft = 0.76 * out
    soft[..., 1:] += 0.12 * out[..., :-1]
    soft[..., :-1] += 0.12 * out[..., 1:]
    soft[..., 0] += 0.12 * out[..., 0]
    soft[..., -1] += 0.12 * out[..., -1]
    return soft


def grow(mask: np.ndarray, pixels: int) -> np.ndarray:
    """Dilates a (T, H, W) mask within each frame by a square that reaches `pixels` to every side."""
    out = mask.copy()
    for _ in range(pixels):
        wide = out.copy()
        wide[:, 1:] |= out[:, :-1]
        wide[:, :-1] |= out[:, 1:]
        out = wide.copy()
        out[..., 1:] |= wide[..., :-1]
        out[..., :-1] |= wide[..., 1:]
    return out


def shrink(mask: np.ndarray, pixels: int) -> np.ndarray:
    """Erodes a (T, H, W) mask within each frame; outside the canvas counts as filled."""
    return ~grow(~mask, pixels)


def saturated(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels of `(T, H, W, 3)` uint8 too colourful to be background: mask, hue, chroma, each `(T, H, W)`."""
    planes = (frames[..., index].astype(np.float32) * np.float32(1 / 255) for index in range(3))
    red, green, blue = (_soften(plane) for plane in planes)
    top = np.maximum(np.maximum(red, green), blue)
    chroma = top - np.minimum(np.minimum(red, green), blue)
    strong = (chroma > MIN_CHROMA) & (chroma > MIN_SATURATION * top)
    hue = np.zeros_like(chroma)
    hue[strong] = hue_of(red[strong], green[strong], blue[strong])
    return strong, hue, chroma


def _hue_peaks(hue: np.ndarray, weight: np.ndarray) -> list[float]:
    """Hues of the layers, heaviest first: peaks of the hue histogram, each at least 6 % of the first."""
    counts, _ = np.histogram(hue, bins=_BINS, range=(0.0, 1.0), weights=weight)
    counts = ndimage.gaussian_filter1d(counts.astype(float), 1.2, mode="wrap")
    centers = (np.arange(_BINS) + 0.5) / _BINS
    peaks: list[float] = []
    heaviest = 0.0
    for _ in range(5):
        best = int(counts.argmax())
        near = np.abs((centers - centers[best] + 0.5) % 1.0 - 0.5) <= _HUE_REACH
        mass = float(counts[near].sum())
        heaviest = max(heaviest, mass)
        if mass <= 0.06 * heaviest:
            break
        angle = np.angle((counts[near] * np.exp(2j * math.pi * centers[near])).sum())
        peaks.append(float(angle / (2 * math.pi) % 1.0))
        counts[near] = 0.0
    return peaks


def _clean(mask: np.ndarray, floor: int) -> np.ndarray:
    """Drops specks: per frame, components smaller than `floor` pixels or an eighth of the largest."""
    out = np.zeros_like(mask)
    for index, picture in enumerate(mask):
        labels, count = ndimage.label(picture)
        if count == 0:
            continue
        sizes = np.bincount(labels.ravel())
        sizes[0] = 0
        out[index] = (sizes >= max(floor, sizes.max() / 8))[labels]
    return out


def _pieces(mask: np.ndarray, other: np.ndarray, floor: int) -> list[np.ndarray]:
    """Splits a layer that holds two separate things of one hue for most of the clip; else keeps it whole."""
    split = np.zeros_like(mask)
    # An object cut in two by the one in front of it is still one object.
    lonely = mask.any(axis=(1, 2)) & ~(grow(mask, 4) & other).any(axis=(1, 2))
    closed = shrink(grow(mask, 2), 2)
    apart = 0
    for index in np.flatnonzero(lonely):
        labels, count = ndimage.label(closed[index])
        if count < 2:
            continue
        sizes = np.bincount(labels.ravel())
        sizes[0] = 0
        order = np.argsort(sizes)[::-1]
        if sizes[order[1]] >= max(floor, 0.3 * sizes[order[0]]):
            apart += 1
            split[index] = (labels == order[1]) & mask[index]
    return [mask & ~split, split] if apart > 0.5 * lonely.sum() else [mask]


def find_layers(frames: np.ndarray) -> list[Layer]:
    """Find the objects of a clip, with nothing known about it.

    Args:
        frames: `(T, H, W, 3)` uint8.

    Returns:
        The objects, largest first. Things of one hue that stay apart are two objects.
    """
    strong, hue, chroma = saturated(frames)
    if not strong.any():
        return []
    peaks = _hue_peaks(hue[strong], chroma[strong])
    gaps = np.stack([np.abs((hue - peak + 0.5) % 1.0 - 0.5) for peak in peaks])
    owner = gaps.argmin(axis=0)
    floor = max(4, round(MIN_AREA * frames.shape[1] * frames.shape[2]))
    masks = []
    for index in range(len(peaks)):
        mask = strong & (owner == index) & (gaps[index] < 0.11)
        # A thin seam where two hues mix is not an object.
        mask &= grow(shrink(mask, 1), 3)
        masks.append(_clean(mask, max(4, floor // 4)))
    layers = []
    for index, mask in enumerate(masks):
        other = np.zeros_like(mask)
        for rest, elsewhere in enumerate(masks):
            if rest != index:
                other |= elsewhere
        for piece in _pieces(mask, other, floor):
            presence = float((piece.sum(axis=(1, 2)) >= floor).mean())
            if presence < MIN_PRESENCE:
                continue
            angle = np.angle((chroma[piece] * np.exp(2j * math.pi * hue[piece])).sum())
            layers.append(Layer(hue=float(angle / (2 * math.pi) % 1.0), mask=piece, presence=presence))
    return sorted(layers, key=lambda layer: -int(layer.mask.sum()))
