"""Reads a finished clip back, blind, and judges what was read against what was asked for.

No learned weights and none of the renderer's code: objects are found by saturation and hue
(verify_segment.py), named by overlap with drawn polygons (verify_shapes.py), followed (verify_track.py), and
their paths explained (verify_motion.py); the pan comes from the background (verify_ground.py), the tones
from the sound (verify_sound.py).
"""

import itertools
import os
from dataclasses import dataclass

import numpy as np
from scipy import signal

from evals.world import verify_shapes
from evals.world.spec import FPS, ClipSpec, ObjectSpec
from evals.world.verify_ground import background_velocity, pan_of
from evals.world.verify_motion import Fit, explain
from evals.world.verify_segment import MIN_AREA, Layer, find_layers, grow, named_color
from evals.world.verify_sound import Onset, hear
from evals.world.verify_track import Track, follow, whole_frames
from videoaccel.media import read_video

# An onset belongs to a bounce when it is at most this many seconds away: two frames.
SOUND_TOLERANCE = 2 / FPS
# Smallest overlap with the named shape's template, and lead over the next shape. Convex shapes need more: a
# blob overlaps them well without being one.
MIN_OVERLAP = {
    "disc": 0.945,
    "square": 0.925,
    "triangle": 0.89,
    "star": 0.84,
    "cross": 0.85,
    "ring": 0.8,
    "crescent": 0.85,
    "bar": 0.87,
}
MIN_LEAD = 0.035
# Share of the frames in which the named shape must also be the best one.
MIN_AGREEMENT = 0.7
_PROMINENCE = 0.06


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One object as read.

    Attributes:
        color, shape, motion, speed: caption words, or None where what is seen has no clear name.
        path: `(T, 3)` x, y and nominal radius in canvas shares; NaN where hidden.
        bounces: seconds of the lowest points in view, where a bounce must sound.
        edge_bounces: seconds where one may sound: at the clip's ends, or while the object is hidden.
        hue: in turns.
        scores: mean overlap with each shape's template.
        turn: radians a frame.
        rate, misfit: of the motion, see `verify_motion.Fit`.
    """

    color: str | None
    shape: str | None
    motion: str | None
    speed: str | None
    path: np.ndarray
    bounces: tuple[float, ...]
    edge_bounces: tuple[float, ...]
    hue: float
    scores: dict[str, float]
    turn: float
    rate: float
    misfit: float

    @property
    def confidence(self) -> float:
        """Lead of the best shape's overlap over the second's."""
        first, second = sorted(self.scores.values())[:-3:-1]
        return first - second


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A clip as read: objects (largest first), pan ("", "left" or "right"), tones, mean squared gradient."""

    objects: tuple[Seen, ...]
    pan: str
    tones: tuple[Onset, ...]
    sharpness: float

    @property
    def onsets(self) -> tuple[float, ...]:
        """Seconds at which a tone begins."""
        return tuple(tone.time for tone in self.tones)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which parts of a request a clip fulfils; with two objects each flag needs both.

    `all` is colour, shape and motion. `sound` is None unless a bounce was asked for; `silence` (no tone at
    all) is None where one was.
    """

    color: bool
    shape: bool
    motion: bool
    all: bool
    speed: bool
    pan: bool
    sound: bool | None
    silence: bool | None


def _lows(track: Track, fit: Fit) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of an object's lowest points: those in plain view, and those that may only be guessed."""
    known = np.isfinite(track.y)
    if known.sum() < 5:
        return (), ()
    index = np.arange(len(track.y))
    y = np.interp(index, index[known], track.y[known])
    # Walls at both ends let a peak count on what is seen of one flank alone.
    peaks, _ = signal.find_peaks(
        np.concatenate([[y.min()], y, [y.min()]]), prominence=_PROMINENCE, distance=4
    )
    sure: list[float] = []
    unsure: list[float] = []
    for peak in peaks - 1:
        # At the very ends the touch itself may fall just outside the clip, and its sound with it.
        plain = 2 <= peak < len(y) - 2 and bool(known[peak - 1 : peak + 2].all())
        (sure if plain else unsure).append(float(peak) / FPS)
    # Where it was hidden, the fitted path says when it must have touched.
    for time in fit.low:
        at = min(round(time * FPS), len(y) - 1)
        if not known[max(0, at - 1) : at + 2].all():
            unsure.append(time)
    return tuple(sure), tuple(unsure)


def _shape_name(found: verify_shapes.Match) -> str | None:
    best, second = sorted(found.scores, key=lambda name: -found.scores[name])[:2]
    clear = found.scores[best] >= MIN_OVERLAP[best] and found.scores[best] - found.scores[second] >= MIN_LEAD
    return best if clear and found.agreement >= MIN_AGREEMENT else None


def _look(frames: np.ndarray, layer: Layer, others: np.ndarray) -> Seen:
    floor = max(4, round(MIN_AREA * frames.shape[1] * frames.shape[2]))
    clean = whole_frames(layer.mask, others, floor)
    if clean.sum() < min(4, len(frames)):
        # Never whole: the frames in which most of it shows have to do.
        area = layer.mask.sum(axis=(1, 2))
        clean = area >= max(floor, 0.85 * area.max())
    found = verify_shapes.match(layer.mask, clean)
    track = follow(frames, layer.mask, others, found, clean)
    fit = explain(track)
    bounces, edge_bounces = _lows(track, fit)
    return Seen(
        color=named_color(layer.hue),
        shape=_shape_name(found),
        motion=fit.motion,
        speed=fit.speed(),
        path=np.stack([track.x, track.y, track.scale], axis=1),
        bounces=bounces,
        edge_bounces=edge_bounces,
        hue=layer.hue,
        scores=found.scores,
        turn=track.turn,
        rate=fit.rate,
        misfit=fit.misfit,
    )


def sharpness(frames: np.ndarray) -> float:
    """Mean squared brightness gradient per pixel of `(T, H, W, 3)` uint8, brightness in [0, 1]."""
    grey = frames.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32) / 255.0
    across, down = np.diff(grey, axis=2), np.diff(grey, axis=1)
    return float((across**2).mean() + (down**2).mean())


def read_clip(frames: np.ndarray, audio: np.ndarray | None, rate: int) -> Reading:
    """Read a clip with nothing known about it.

    Args:
        frames: `(T, H, W, 3)` uint8 at 24 fps.
        audio: `(2, N)` floats in [-1, 1]; None or empty is silence.
        rate: samples a second.
    """
    layers = find_layers(frames)
    union = np.zeros(frames.shape[:3], bool)
    for layer in layers:
        union |= layer.mask
    seen = []
    for layer in layers[:4]:
        others = np.zeros_like(union)
        for other in layers:
            if other is not layer:
                others |= other.mask
        seen.append(_look(frames, layer, others))
    velocity, _ = background_velocity(frames, grow(union, 3))
    return Reading(
        objects=tuple(seen),
        pan=pan_of(velocity),
        tones=tuple(hear(audio, rate)) if audio is not None else (),
        sharpness=sharpness(frames),
    )


def read_mp4(path: str | os.PathLike[str]) -> Reading:
    """Read a finished mp4.

    Raises:
        UserError: missing, broken or without a picture.
    """
    video = read_video(path)
    return read_clip(video.frames, video.audio, video.rate or 32000)


def _marks(seen: Seen, item: ObjectSpec) -> tuple[bool, bool, bool, bool]:
    motion = seen.motion == item.motion
    return seen.color == item.color, seen.shape == item.shape, motion, motion and seen.speed == item.speed


def _rank(pairs: list[tuple[Seen, ObjectSpec]]) -> tuple[int, int]:
    marks = [_marks(seen, item) for seen, item in pairs]
    return sum(map(sum, marks)), sum(color for color, *_ in marks)


def _sound(tones: tuple[float, ...], bouncing: list[Seen]) -> bool:
    """Every bounce in view has its onset, and no onset lacks a bounce."""
    due = [time for seen in bouncing for time in seen.bounces]
    allowed = due + [time for seen in bouncing for time in seen.edge_bounces]
    if not due:
        return False
    heard = all(any(abs(tone - time) <= SOUND_TOLERANCE for tone in tones) for time in due)
    return heard and all(any(abs(tone - time) <= SOUND_TOLERANCE for time in allowed) for tone in tones)


def judge(reading: Reading, spec: ClipSpec) -> Verdict:
    """Hold a reading against the clip that was asked for.

    The number of objects must be right, else colour, shape, motion and speed are all wrong; objects are
    paired so that most is right. Sound is held against the bounces seen in the clip, since their phase is
    free.
    """
    bounces = any(item.motion == "bounces" for item in spec.objects)
    pan = reading.pan == spec.pan
    silence = None if bounces else not reading.tones
    if len(reading.objects) != len(spec.objects):
        sound = False if bounces else None
        return Verdict(
            color=False,
            shape=False,
            motion=False,
            all=False,
            speed=False,
            pan=pan,
            sound=sound,
            silence=silence,
        )
    pairings = [
        list(zip(order, spec.objects, strict=True)) for order in itertools.permutations(reading.objects)
    ]
    # Most marks right; colour breaks ties.
    pairs = max(pairings, key=_rank)
    color, shape, motion, speed = (
        all(column) for column in zip(*(_marks(seen, item) for seen, item in pairs), strict=True)
    )
    bouncing = [seen for seen, item in pairs if item.motion == "bounces"]
    return Verdict(
        color=color,
        shape=shape,
        motion=motion,
        all=color and shape and motion,
        speed=speed,
        pan=pan,
        sound=_sound(reading.onsets, bouncing) if bounces else None,
        silence=silence,
    )


def judge_reference(reading: Reading, spec: ClipSpec) -> Verdict:
    """Hold a `ref2va` clip against its request: one object, the picture's colour and shape, moving as
    told."""
    return judge(
        reading, ClipSpec(objects=spec.objects[:1], pan=spec.pan, seed=spec.seed, frames=spec.frames)
    )
