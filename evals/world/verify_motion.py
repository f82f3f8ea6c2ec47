"""Names a motion and its speed from a tracked path: the kind of path that fits it best."""

import math
from dataclasses import dataclass

import numpy as np

from evals.world.spec import FPS
from evals.world.verify_track import Track

# Rate that parts slowly from quickly, halfway (geometrically) between the two that the world uses.
# Translation in screens a second, bounce, orbit and sway in periods a second, spin in turns a second, growth
# as a ratio.
SPEED_SPLIT = {
    "slides": 0.233,
    "bounces": 1.383,
    "orbits": 0.524,
    "sways": 1.132,
    "spins": 0.632,
    "grows": 1.857,
}
_MIN_FRAMES = 8
_MIN_KNOWN = 0.5
# How far, in canvas shares, a thing at rest may wander, and a path may be from the best fit to it.
_REST = 0.03
_MISFIT = 0.03
_MIN_TURN = math.radians(2.5)
_MIN_GROWTH = 1.25
# A second motion this strong on top of the named one makes the whole unclear; less is a wobble.
_SPOILS_TURN = math.radians(4.0)
_SPOILS_GROWTH = 1.4
_MIN_SLIDE = 0.075
_MIN_COHERENCE = 0.45


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A path explained: the motion's caption name (None where none fits), its rate, its rms misfit.

    The misfit is in canvas shares. `low` holds the times in seconds of a bounce's lowest points, fitted,
    inside the clip.
    """

    motion: str | None
    rate: float
    misfit: float
    low: tuple[float, ...] = ()

    def speed(self) -> str | None:
        """`slowly` or `quickly`."""
        if self.motion is None:
            return None
        first = self.motion.split()[0]
        kind = {"rises": "slides", "falls": "slides", "shrinks": "grows"}.get(first, first)
        return "quickly" if self.rate > SPEED_SPLIT[kind] else "slowly"


def _solve(columns: list[np.ndarray], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    matrix = np.stack(columns, axis=1)
    solution = np.linalg.lstsq(matrix, values, rcond=None)[0]
    return solution, values - matrix @ solution


def _rms(*residuals: np.ndarray) -> float:
    return float(np.sqrt(sum((r**2).mean() for r in residuals)))


def _still(values: np.ndarray) -> np.ndarray:
    return np.asarray(values - values.mean())


def unwrapped(t: np.ndarray, values: np.ndarray, reach: float) -> np.ndarray:
    """Undo re-entry: a thing that leaves one side comes back `reach` away."""
    steps, gaps = np.diff(values), np.diff(t)
    near = gaps < 1.5 / FPS
    if not near.any():
        return values
    velocity = float(np.median(steps[near] / gaps[near]))
    jumps = np.round((values[:-1] + velocity * gaps - values[1:]) / reach)
    return np.asarray(values + reach * np.concatenate([[0.0], np.cumsum(jumps)]))


def _slide(t: np.ndarray, x: np.ndarray, y: np.ndarray, reach: float, names: tuple[str, str]) -> Fit:
    along = unwrapped(t, x, reach)
    (velocity, _), residual = _solve([t, np.ones_like(t)], along)
    if abs(velocity) < _MIN_SLIDE:
        return Fit(motion=None, rate=0.0, misfit=math.inf)
    misfit = _rms(residual, _still(y))
    return Fit(motion=names[0] if velocity < 0 else names[1], rate=abs(float(velocity)), misfit=misfit)


def _bounce(t: np.ndarray, x: np.ndarray, y: np.ndarray, end: float) -> Fit:
    best = Fit(motion=None, rate=0.0, misfit=math.inf)
    flat = _still(x)
    centered = y - y.mean()
    for period in np.geomspace(0.4, 1.35, 48):
        phases = np.arange(0, 1, 0.04)
        u = (t[None] / period + phases[:, None]) % 1.0
        arc = 0.5 - 4 * u * (1 - u)
        arc = arc - arc.mean(axis=1, keepdims=True)
        energy = (arc**2).sum(axis=1)
        height = (arc @ centered) / energy
        error = (centered**2).sum() - height**2 * energy
        error[(height < 0.11) | (height > 0.55)] = np.inf
        pick = int(error.argmin())
        misfit = math.sqrt(max(error[pick], 0.0) / len(t) + float((flat**2).mean()))
        if misfit < best.misfit:
            first = math.ceil(phases[pick] - 1e-9)
            times = (np.arange(first, first + math.ceil(end / period) + 1) - phases[pick]) * period
            low = tuple(float(at) for at in times if 0 <= at < end)
            best = Fit(motion="bounces", rate=float(1 / period), misfit=misfit, low=low)
    return best


def _sway(t: np.ndarray, x: np.ndarray, y: np.ndarray) -> Fit:
    best = Fit(motion=None, rate=0.0, misfit=math.inf)
    flat = _still(y)
    for period in np.geomspace(0.45, 1.8, 40):
        angle = 2 * math.pi * t / period
        (_, a, b), residual = _solve([np.ones_like(t), np.sin(angle), np.cos(angle)], x)
        misfit = _rms(residual, flat)
        if 0.06 <= math.hypot(a, b) <= 0.28 and misfit < best.misfit:
            best = Fit(motion="sways", rate=float(1 / period), misfit=misfit)
    return best


def _orbit(t: np.ndarray, x: np.ndarray, y: np.ndarray) -> Fit:
    best = Fit(motion=None, rate=0.0, misfit=math.inf)
    one, none = np.ones_like(t), np.zeros_like(t)
    for period in np.geomspace(0.9, 4.5, 40):
        angle = 2 * math.pi * t / period
        if (t[-1] - t[0]) / period < 0.3:
            continue
        cos, sin = np.cos(angle), np.sin(angle)
        for sense in (1, -1):
            columns = [
                np.concatenate([one, none]),
                np.concatenate([none, one]),
                np.concatenate([cos, sense * sin]),
                np.concatenate([-sense * sin, cos]),
            ]
            solution, residual = _solve(columns, np.concatenate([x, y]))
            misfit = _rms(residual) * math.sqrt(2)
            if 0.08 <= math.hypot(solution[2], solution[3]) <= 0.32 and misfit < best.misfit:
                best = Fit(motion="orbits", rate=float(1 / period), misfit=misfit)
    return best


def explain(track: Track) -> Fit:
    """Name the motion of a track, or say that none of the ten fits.

    A thing that goes somewhere must not also turn or change size; a thing that spins, grows or shrinks must
    stay where it is. The rate is in the units of `SPEED_SPLIT`.
    """
    frames = len(track.x)
    duration = frames / FPS
    known = np.isfinite(track.x) & np.isfinite(track.y)
    whole = np.isfinite(track.scale)
    lost = Fit(motion=None, rate=0.0, misfit=math.inf)
    if known.sum() < max(_MIN_FRAMES, _MIN_KNOWN * frames) or whole.sum() < 4:
        return lost
    time = np.arange(frames) / FPS
    t, x, y = time[known], track.x[known], track.y[known]
    slope, _ = np.polyfit(time[whole], np.log(track.scale[whole]), 1)
    growth = math.exp(slope * duration)
    size = max(growth, 1 / growth)
    turn = abs(track.turn) if track.coherence >= _MIN_COHERENCE else 0.0
    rest = Fit(motion=None, rate=0.0, misfit=_rms(_still(x), _still(y)))
    reach = 1.0 + 2.2 * float(np.median(track.scale[whole]))
    moves = [
        _slide(t, x, y, reach, ("slides left", "slides right")),
        _slide(t, y, x, reach, ("rises", "falls")),
        _bounce(t, x, y, duration),
        _sway(t, x, y),
        _orbit(t, x, y),
    ]
    best = min(moves, key=lambda fit: fit.misfit)
    if best.misfit < 0.6 * rest.misfit:
        spoilt = turn >= _SPOILS_TURN or size >= _SPOILS_GROWTH
        if spoilt or best.misfit > max(_MISFIT, 0.25 * rest.misfit):
            return Fit(motion=None, rate=0.0, misfit=best.misfit)
        return best
    if rest.misfit > _REST:
        return rest
    if turn >= _MIN_TURN and size < _SPOILS_GROWTH:
        return Fit(motion="spins", rate=turn * FPS / (2 * math.pi), misfit=rest.misfit)
    if size >= _MIN_GROWTH and turn < _SPOILS_TURN:
        return Fit(motion="grows" if growth > 1 else "shrinks", rate=size, misfit=rest.misfit)
    return rest
