"""Follows one object through a clip: where it is when half hidden or half outside, and how it turns."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import fft, ndimage

from evals.world import verify_shapes as shapes
from evals.world.verify_segment import grow

# Below this overlap a placement of a half-hidden object is a guess and is dropped.
_MIN_PLACED = 0.6
_MIN_VISIBLE = 0.3
_RINGS = 9
_RAYS = 96
_LAGS = (1, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, kw_only=True)
class Track:
    """An object's path.

    Attributes:
        x, y: `(T,)` the shape's origin in canvas shares, NaN where unknown.
        scale: `(T,)` nominal radius in canvas shares, NaN unless the whole object is in view.
        turn: radians a frame, from the object's texture and outline.
        coherence: in [-1, 1], how alike the object is to itself turned back by `turn`.
        stillness: the same with no turn.
    """

    x: np.ndarray
    y: np.ndarray
    scale: np.ndarray
    turn: float
    coherence: float
    stillness: float


def whole_frames(mask: np.ndarray, others: np.ndarray, floor: int) -> np.ndarray:
    """`(T,)` bool: the object is there, touches neither the canvas edge nor another object."""
    edge = mask[:, 0].any(1) | mask[:, -1].any(1) | mask[:, :, 0].any(1) | mask[:, :, -1].any(1)
    touching = (grow(mask, 3) & others).any(axis=(1, 2))
    return (mask.sum(axis=(1, 2)) >= floor) & ~edge & ~touching


def _silhouette(shape: str, erosion: float, angle: float, radius: float) -> np.ndarray:
    """The shape at an angle and size in pixels, on a square of odd edge with its origin in the middle."""
    half = math.ceil(1.1 * radius)
    axis = np.arange(-half, half + 1) / radius
    v, u = np.meshgrid(axis, axis, indexing="ij")
    cos, sin = math.cos(angle), math.sin(angle)
    drawn = shapes.draw(shape, erosion).astype(np.float32)
    unit = len(drawn) / 2.4
    where = [(v * cos - u * sin + 1.2) * unit - 0.5, (u * cos + v * sin + 1.2) * unit - 0.5]
    return np.asarray(ndimage.map_coordinates(drawn, where, order=1))


def place(
    picture: np.ndarray, known: np.ndarray, templates: list[np.ndarray]
) -> tuple[float, float, float, float]:
    """Lay templates over a partly visible silhouette.

    Args:
        picture: `(H, W)` bool, what is seen of the object.
        known: `(H, W)` bool, where it could be seen (not behind another object).
        templates: odd-edged pictures with the origin in the middle, all of one size.

    Returns:
        x, y in pixels, overlap within what is known, and the visible share of the template.
    """
    height, width = picture.shape
    edge = len(templates[0])
    size = [fft.next_fast_len(length + edge - 1, real=True) for length in (height, width)]
    seen = fft.rfft2(picture & known, size)
    open_ = fft.rfft2(known.astype(np.float32), size)
    area = float((picture & known).sum())
    best = (0.0, 0.0, -1.0, 0.0)
    for template in templates:
        kernel = fft.rfft2(template[::-1, ::-1], size)
        inner = fft.irfft2(seen * kernel, size)[: height + edge - 1, : width + edge - 1]
        visible = fft.irfft2(open_ * kernel, size)[: height + edge - 1, : width + edge - 1]
        overlap = inner / np.maximum(area + visible - inner, 1.0)
        row, column = np.unravel_index(overlap.argmax(), overlap.shape)
        if overlap[row, column] > best[2]:
            share = float(visible[row, column] / template.sum())
            half = edge // 2
            best = (column - half + 0.5, row - half + 0.5, float(overlap[row, column]), share)
    return best


def turning(
    frames: np.ndarray, mask: np.ndarray, track_px: np.ndarray, good: np.ndarray
) -> tuple[float, float, float]:
    """Rate of turn from how the object's own picture moves around its origin.

    The picture is sampled in rings about the origin, the mean over each ring taken off, and frames `lag`
    apart are correlated over all angles at once; the rate is the one that explains every lag together, so a
    cross that looks the same after a quarter turn isn't mistaken.

    Args:
        frames: `(T, H, W, 3)` uint8.
        mask: `(T, H, W)` bool.
        track_px: `(T, 3)` x, y, radius in pixels.
        good: `(T,)` bool, frames to use.

    Returns:
        radians a frame, coherence at that rate, coherence at rest.
    """
    used = np.flatnonzero(good)
    if len(used) < 4:
        return 0.0, 0.0, 0.0
    theta = np.arange(_RAYS) * 2 * math.pi / _RAYS
    rings = (np.arange(_RINGS) + 0.7) / _RINGS
    du, dv = rings[:, None] * np.cos(theta), rings[:, None] * np.sin(theta)
    spectra = np.zeros((len(frames), _RINGS, _RAYS // 2 + 1), complex)
    weight = np.sqrt(rings)[:, None]
    for index in used:
        picture = frames[index].max(axis=2) * (mask[index] / 255.0)
        x, y, radius = track_px[index]
        where = [y - 0.5 + radius * dv, x - 0.5 + radius * du]
        polar = ndimage.map_coordinates(picture, where, order=1, output=np.float32)
        spectra[index] = fft.rfft(polar * weight, axis=1)
    spectra[:, :, 0] = 0
    spectra[:, :, 33:] = 0
    rates = np.radians(np.arange(-24.0, 24.01, 0.25))
    orders = np.arange(spectra.shape[2])
    power = (np.abs(spectra) ** 2).sum(axis=(1, 2))
    total, norm = np.zeros(len(rates)), 0.0
    for lag in _LAGS:
        pairs = used[np.isin(used + lag, used)]
        if len(pairs) < 2:
            continue
        cross = (spectra[pairs].conj() * spectra[pairs + lag]).sum(axis=(0, 1))
        # A turn by +a moves the picture to larger angles: F(t + lag) = F(t) exp(-i m a).
        total += (cross[None] * np.exp(1j * orders[None] * (lag * rates[:, None]))).real.sum(axis=1)
        norm += float(np.sqrt(power[pairs] * power[pairs + lag]).sum())
    if norm <= 0:
        return 0.0, 0.0, 0.0
    total /= norm
    best = int(total.argmax())
    return float(rates[best]), float(total[best]), float(total[len(rates) // 2])


def follow(
    frames: np.ndarray, mask: np.ndarray, others: np.ndarray, found: shapes.Match, clean: np.ndarray
) -> Track:
    """Build an object's track from its silhouettes.

    Args:
        frames: `(T, H, W, 3)` uint8.
        mask: `(T, H, W)` bool, the object.
        others: `(T, H, W)` bool, every other object.
        found: from `verify_shapes.match`.
        clean: `(T,)` bool, frames in which the object is whole.
    """
    height, width = mask.shape[1:]
    x, y, radius = (np.where(clean, values, np.nan) for values in (found.x, found.y, found.radius))
    turn, coherence, stillness = turning(
        frames, mask, np.stack([found.x, found.y, found.radius], axis=1), clean
    )
    index = np.arange(len(mask))
    partial = np.flatnonzero(~clean & (mask.sum(axis=(1, 2)) > 12))
    if len(partial) and clean.sum() >= 3:
        slope, start = np.polyfit(index[clean], np.log(found.radius[clean]), 1)
        hidden = grow(others, 2)
        for at in partial:
            size = math.exp(start + slope * at)
            nearest = index[clean][np.argsort(np.abs(index[clean] - at))[:3]]
            angles = {float(found.angle[near]) for near in nearest}
            templates = [_silhouette(found.shape, found.erosion, angle, size) for angle in sorted(angles)]
            px, py, overlap, share = place(mask[at], ~hidden[at], templates)
            if overlap >= _MIN_PLACED and share >= _MIN_VISIBLE:
                x[at], y[at] = px, py
    return Track(
        x=x / width, y=y / height, scale=radius / width, turn=turn, coherence=coherence, stillness=stillness
    )
