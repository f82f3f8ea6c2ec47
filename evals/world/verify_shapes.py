"""Names a silhouette: compares it with drawn polygons of every shape, over rotations, by overlap.

The outlines here are polygons given by corner points, filled by PIL; the renderer's signed distances are not
used. A silhouette is scaled to unit area about its centroid first, so only rotation and the loss of the dark
rim remain to be searched.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

GRID = 40
# Half width of the comparison window, in units of the square root of the silhouette's area.
REACH = 1.15
ANGLE_STEP = 5
# How much of the rim is missing from a silhouette, in units of the shape's radius.
EROSIONS = (0.0, 0.05, 0.1)
_DRAWN = 384
_SPAN = 1.2

# Turns after which a shape looks the same, as a share of a full one; 0 where every turn does.
SYMMETRY = {
    "disc": 0.0,
    "ring": 0.0,
    "square": 1 / 4,
    "cross": 1 / 4,
    "triangle": 1 / 3,
    "star": 1 / 5,
    "bar": 1 / 2,
    "crescent": 1.0,
}


def _circle(radius: float, x: float = 0.0) -> list[tuple[float, float]]:
    turns = np.linspace(0.0, 2 * math.pi, 180, endpoint=False)
    return [(x + radius * math.cos(a), radius * math.sin(a)) for a in turns]


def _wheel(radii: tuple[float, ...], count: int) -> list[tuple[float, float]]:
    """Corners at equal angles, their distances cycling through `radii`, the first on +x."""
    corners = [(radii[i % len(radii)], 2 * math.pi * i / count) for i in range(count)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in corners]


def _box(width: float, height: float) -> list[tuple[float, float]]:
    return [(-width, -height), (width, -height), (width, height), (-width, height)]


# Each shape as (filled polygons, polygons cut out), for a nominal radius of one.
_OUTLINES: dict[str, tuple[list[list[tuple[float, float]]], list[list[tuple[float, float]]]]] = {
    "disc": ([_circle(0.88)], []),
    "square": ([_box(0.76, 0.76)], []),
    "triangle": ([_wheel((1.0,), 3)], []),
    "star": ([_wheel((1.0, 0.42), 10)], []),
    "cross": ([_box(0.95, 0.29), _box(0.29, 0.95)], []),
    "ring": ([_circle(0.92)], [_circle(0.48)]),
    "crescent": ([_circle(0.95)], [_circle(0.72, 0.5)]),
    "bar": ([_box(0.98, 0.3)], []),
}


@lru_cache(maxsize=64)
def draw(shape: str, erosion: float = 0.0) -> np.ndarray:
    """A shape's silhouette, `(384, 384)` bool over [-1.2, 1.2] radii, less `erosion` radii of rim."""
    picture = Image.new("1", (_DRAWN, _DRAWN))
    pen = ImageDraw.Draw(picture)
    filled, cut = _OUTLINES[shape]
    for fill, polygons in ((1, filled), (0, cut)):
        for polygon in polygons:
            pen.polygon(
                [tuple((c / _SPAN + 1) * _DRAWN / 2 for c in corner) for corner in polygon], fill=fill
            )
    mask = np.array(picture, bool)
    if erosion > 0:
        mask = ndimage.distance_transform_edt(mask) > erosion * _DRAWN / (2 * _SPAN)
    return mask


@dataclass(frozen=True, kw_only=True)
class Bank:
    """All templates, flattened: `pixels` (N, GRID * GRID) float32, and for each its shape, erosion and angle.

    `area` is in squared radii; `offset` (N, 2) is the centroid as seen from the shape's origin, in radii.
    """

    pixels: np.ndarray
    shape: np.ndarray
    erosion: np.ndarray
    angle: np.ndarray
    area: np.ndarray
    offset: np.ndarray


def _window() -> tuple[np.ndarray, np.ndarray]:
    axis = (np.arange(GRID) + 0.5) / GRID * 2 * REACH - REACH
    y, x = np.meshgrid(axis, axis, indexing="ij")
    return x, y


@lru_cache(maxsize=1)
def bank() -> Bank:
    """The template bank, drawn once a process."""
    x, y = _window()
    pixels, shapes, erosions, angles, areas, offsets = [], [], [], [], [], []
    for shape in _OUTLINES:
        for erosion in EROSIONS:
            mask = draw(shape, erosion)
            unit = 2 * _SPAN / _DRAWN
            area = mask.sum() * unit * unit
            cy, cx = (np.array(ndimage.center_of_mass(mask)) + 0.5) * unit - _SPAN
            cell = (2 * REACH / GRID) * math.sqrt(area) / unit
            soft = ndimage.gaussian_filter(mask.astype(np.float32), 0.35 * cell)
            period = SYMMETRY[shape] * 360
            for degrees in np.arange(0, period, ANGLE_STEP) if period else (0.0,):
                cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
                u = (x * cos + y * sin) * math.sqrt(area) + cx
                v = (y * cos - x * sin) * math.sqrt(area) + cy
                where = [(v + _SPAN) / unit - 0.5, (u + _SPAN) / unit - 0.5]
                pixels.append(ndimage.map_coordinates(soft, where, order=1).ravel())
                shapes.append(shape)
                erosions.append(erosion)
                angles.append(math.radians(degrees))
                areas.append(area)
                offsets.append((cx * cos - cy * sin, cx * sin + cy * cos))
    return Bank(
        pixels=np.array(pixels, np.float32),
        shape=np.array(shapes),
        erosion=np.array(erosions),
        angle=np.array(angles),
        area=np.array(areas),
        offset=np.array(offsets),
    )


def moments(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centroid x, y in pixels (NaN where empty) and area of each frame of a `(T, H, W)` mask."""
    area = mask.sum(axis=(1, 2)).astype(float)
    safe = np.where(area > 0, area, np.nan)
    x = (mask.sum(axis=1) @ (np.arange(mask.shape[2]) + 0.5)) / safe
    y = (mask.sum(axis=2) @ (np.arange(mask.shape[1]) + 0.5)) / safe
    return x, y, area


def normalised(mask: np.ndarray, x: np.ndarray, y: np.ndarray, area: np.ndarray) -> np.ndarray:
    """Silhouettes `(T, H, W)` resampled to unit area about their centroids: `(T, GRID * GRID)` float32."""
    gx, gy = _window()
    out = np.zeros((len(mask), GRID * GRID), np.float32)
    for index, picture in enumerate(mask):
        if area[index] <= 0:
            continue
        side = math.sqrt(area[index])
        where = [gy * side + y[index] - 0.5, gx * side + x[index] - 0.5]
        out[index] = ndimage.map_coordinates(picture.astype(np.float32), where, order=1).ravel()
    return out


@dataclass(frozen=True, kw_only=True)
class Match:
    """How a clip's silhouettes compare with each shape.

    Attributes:
        scores: mean overlap (intersection over union) with each shape over the clean frames.
        shape: the best one.
        angle: `(T,)` radians, the best rotation of that shape in each frame, modulo its symmetry.
        overlap: `(T,)` the best shape's overlap in each frame.
        x, y, radius: `(T,)` the shape's origin and nominal radius, in pixels.
        erosion: the rim loss that fits best, in radii.
        agreement: share of the clean frames in which that shape is the best one.
    """

    scores: dict[str, float]
    shape: str
    angle: np.ndarray
    overlap: np.ndarray
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray
    erosion: float
    agreement: float


def match(mask: np.ndarray, clean: np.ndarray) -> Match:
    """Compare silhouettes with every shape.

    Args:
        mask: `(T, H, W)` bool.
        clean: `(T,)` bool, the frames in which the object is whole; only these decide the shape.
    """
    templates = bank()
    x, y, area = moments(mask)
    pictures = normalised(mask, x, y, area)
    inner = pictures @ templates.pixels.T
    total = (pictures**2).sum(axis=1)[:, None] + (templates.pixels**2).sum(axis=1)[None]
    overlap = inner / np.maximum(total - inner, 1e-6)
    scores: dict[str, float] = {}
    best_erosion: dict[str, float] = {}
    each_frame = np.zeros((int(clean.sum()), len(_OUTLINES)))
    for column, shape in enumerate(_OUTLINES):
        options = {}
        for erosion in EROSIONS:
            rows = (templates.shape == shape) & (templates.erosion == erosion)
            options[erosion] = float(overlap[clean][:, rows].max(axis=1).mean())
        best_erosion[shape] = max(options, key=lambda key: options[key])
        scores[shape] = options[best_erosion[shape]]
        rows = (templates.shape == shape) & (templates.erosion == best_erosion[shape])
        each_frame[:, column] = overlap[clean][:, rows].max(axis=1)
    winner = max(scores, key=lambda key: scores[key])
    rows = np.flatnonzero((templates.shape == winner) & (templates.erosion == best_erosion[winner]))
    pick = rows[overlap[:, rows].argmax(axis=1)]
    radius = np.sqrt(area / templates.area[pick])
    return Match(
        scores=scores,
        shape=winner,
        angle=templates.angle[pick],
        overlap=overlap[np.arange(len(mask)), pick],
        x=x - templates.offset[pick, 0] * radius,
        y=y - templates.offset[pick, 1] * radius,
        radius=radius,
        erosion=best_erosion[winner],
        agreement=float((each_frame.argmax(axis=1) == list(_OUTLINES).index(winner)).mean()),
    )
