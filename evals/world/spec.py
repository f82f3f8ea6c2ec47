"""What a clip of the procedural world holds: objects, motions, camera, and the caption that names them.

The caption fixes colour, shape, motion, speed and camera pan. Everything else (texture, position, size,
phase, background, distractors) is drawn from the clip's seed and stays unsaid, so that late denoising steps
have detail of their own to decide.
"""

import colorsys
import math
from dataclasses import dataclass, replace

import numpy as np

FPS = 24
SIZE = 128

# Eight saturated hues, far enough apart to survive chroma subsampling. Backgrounds never exceed
# MUTED_SATURATION.
HUES = {
    "red": 0.0,
    "orange": 0.083,
    "yellow": 0.158,
    "green": 0.345,
    "cyan": 0.5,
    "blue": 0.63,
    "purple": 0.765,
    "pink": 0.9,
}
MUTED_SATURATION = 0.22
COLORS = tuple(HUES)
SHAPES = ("disc", "square", "triangle", "star", "cross", "ring", "crescent", "bar")
MOTIONS = (
    "slides left",
    "slides right",
    "rises",
    "falls",
    "bounces",
    "spins",
    "grows",
    "shrinks",
    "orbits",
    "sways",
)
SPEEDS = ("slowly", "quickly")
PANS = ("", "left", "right")
TEXTURES = ("stripes", "checker", "dots", "halves", "wedges")
JOINS = (" and ", " while ", " as ")

# Pitch of an object's bounce in Hz, by shape: about a quarter octave apart. Multiples of 40 Hz, the rate of
# the audio latents, so that a steady tone is a steady latent and a small codec can learn it.
PITCHES = dict(zip(SHAPES, (320.0, 400.0, 480.0, 560.0, 680.0, 800.0, 960.0, 1160.0), strict=True))

# Speeds as (slowly, quickly): screens a second, seconds a period, turns a second, or a ratio over the clip.
_TRANSLATION = (0.16, 0.34)
_BOUNCE_PERIOD = (0.95, 0.55)
_BOUNCE_HEIGHT = (0.30, 0.26)
_TURNS = (0.4, 1.0)
_GROWTH = (1.5, 2.3)
_ORBIT_PERIOD = (2.6, 1.4)
_ORBIT_RADIUS = 0.17
_SWAY_PERIOD = (1.2, 0.65)
_SWAY_REACH = 0.13
PAN_SPEED = 0.28

# At rest a shape stands as it is commonly drawn, leaning by at most TILT: with every angle as likely, most of
# what early steps decide about an outline would be its angle, which no caption mentions. Radians; y is down.
UPRIGHT = {"triangle": -math.pi / 2, "star": -math.pi / 2}
TILT = 0.3

# Bounces count twice: only they are heard.
_MOTION_SHARES = np.array([2.0 if motion == "bounces" else 1.0 for motion in MOTIONS]) / (len(MOTIONS) + 1)


@dataclass(frozen=True, kw_only=True)
class ObjectSpec:
    """One object. Lengths are shares of the canvas edge, angles radians, `phase` a share of a period."""

    color: str
    shape: str
    motion: str
    speed: str
    radius: float
    x: float
    y: float
    angle: float = 0.0
    phase: float = 0.0
    direction: int = 1
    texture: str = "stripes"
    texture_scale: float = 4.0
    texture_angle: float = 0.0
    shade: float = 0.5
    value: float = 1.0

    def rgb(self) -> tuple[float, float, float]:
        """The object's base colour in [0, 1]."""
        return colorsys.hsv_to_rgb(HUES[self.color], 0.95, self.value)

    def phrase(self) -> str:
        """`a red star bounces quickly`."""
        article = "an" if self.color[0] in "aeiou" else "a"
        return f"{article} {self.color} {self.shape} {self.motion} {self.speed}"


@dataclass(frozen=True, kw_only=True)
class ClipSpec:
    """One clip: one or two objects (the first in front), the camera's pan, and the seed of the unsaid."""

    objects: tuple[ObjectSpec, ...]
    pan: str
    seed: int
    frames: int = 39
    join: str = " and "

    def caption(self) -> str:
        """The text that the model is given."""
        text = self.join.join(item.phrase() for item in self.objects)
        return text + (f", camera panning {self.pan}" if self.pan else "")

    def reference_prompt(self) -> str:
        """The text of a `ref2va` request: the object comes from the picture, the motion from the text."""
        item = self.objects[0]
        text = f"this object {item.motion} {item.speed}"
        return text + (f", camera panning {self.pan}" if self.pan else "")


def is_held_out(color: str, shape: str, motion: str) -> bool:
    """Whether a (colour, shape, motion) combination is kept out of training: 15 % of 640, by a fixed hash."""
    key = (COLORS.index(color) * len(SHAPES) + SHAPES.index(shape)) * len(MOTIONS) + MOTIONS.index(motion)
    return ((key + 1) * 2654435761 % 2**32) / 2**32 < 0.15


def trajectory(item: ObjectSpec, frames: int) -> np.ndarray:
    """Where an object is.

    Args:
        item: the object.
        frames: number of frames T at `FPS`.

    Returns:
        `(T, 4)` float64: x, y (canvas shares, y down), scale (times `radius`), angle (radians).
    """
    t = np.arange(frames) / FPS
    duration = frames / FPS
    quick = SPEEDS.index(item.speed)
    x, y = np.full(frames, item.x), np.full(frames, item.y)
    scale, angle = np.ones(frames), np.full(frames, item.angle)
    if item.motion in ("slides left", "slides right", "rises", "falls"):
        sign = -1.0 if item.motion in ("slides left", "rises") else 1.0
        travel = sign * _TRANSLATION[quick] * (t - duration / 2)
        # An object that has left the canvas whole comes back from the other side.
        reach = 1.0 + 2.2 * item.radius
        if item.motion.startswith("slides"):
            x = (item.x + travel + 1.1 * item.radius) % reach - 1.1 * item.radius
        else:
            y = (item.y + travel + 1.1 * item.radius) % reach - 1.1 * item.radius
    elif item.motion == "bounces":
        u = (t / _BOUNCE_PERIOD[quick] + item.phase) % 1.0
        y = item.y + _BOUNCE_HEIGHT[quick] * (0.5 - 4.0 * u * (1.0 - u))
    elif item.motion == "spins":
        angle = item.angle + item.direction * 2 * math.pi * _TURNS[quick] * t
    elif item.motion in ("grows", "shrinks"):
        power = (t / duration - 0.5) * (1.0 if item.motion == "grows" else -1.0)
        scale = _GROWTH[quick] ** power
    elif item.motion == "orbits":
        turn = 2 * math.pi * (item.direction * t / _ORBIT_PERIOD[quick] + item.phase)
        x, y = item.x + _ORBIT_RADIUS * np.cos(turn), item.y + _ORBIT_RADIUS * np.sin(turn)
    elif item.motion == "sways":
        x = item.x + _SWAY_REACH * np.sin(2 * math.pi * (t / _SWAY_PERIOD[quick] + item.phase))
    else:
        raise ValueError(f"unknown motion {item.motion!r}; known: {', '.join(MOTIONS)}")
    return np.stack([x, y, scale, angle], axis=1)


def bounce_times(item: ObjectSpec, frames: int) -> np.ndarray:
    """Seconds at which a bouncing object touches its floor, inside the clip; empty for other motions."""
    if item.motion != "bounces":
        return np.empty(0)
    period = _BOUNCE_PERIOD[SPEEDS.index(item.speed)]
    first = math.ceil(item.phase)
    times = (np.arange(first, first + math.ceil(frames / FPS / period) + 1) - item.phase) * period
    return times[(times >= 0) & (times < frames / FPS)]


def _draw_object(
    rng: np.random.Generator, count: int, slot: int, held_out: bool | None, taken: str | None
) -> ObjectSpec:
    while True:
        color, shape = str(rng.choice(COLORS)), str(rng.choice(SHAPES))
        motion = str(rng.choice(MOTIONS, p=_MOTION_SHARES))
        if taken is not None and _hue_distance(color, taken) < 0.12:
            continue
        if held_out is None or is_held_out(color, shape, motion) == held_out:
            break
    radius = rng.uniform(0.19, 0.24) if count == 1 else rng.uniform(0.15, 0.19)
    if motion in ("grows", "shrinks"):
        radius *= 0.9
    spread = (0.34, 0.66) if count == 1 else ((0.2, 0.42), (0.58, 0.8))[slot]
    moving = motion.split()[0] in ("slides", "rises", "falls")
    x = rng.uniform(*((0.4, 0.6) if moving and motion.startswith("slides") else spread))
    y = rng.uniform(0.4, 0.6) if motion in ("bounces", "rises", "falls", "orbits") else rng.uniform(0.3, 0.7)
    return ObjectSpec(
        color=color,
        shape=shape,
        motion=motion,
        speed=str(rng.choice(SPEEDS)),
        radius=float(radius),
        x=float(x),
        y=float(y),
        angle=_rest_angle(rng, shape),
        phase=float(rng.uniform()),
        direction=int(rng.choice((-1, 1))),
        texture=str(rng.choice(TEXTURES)),
        texture_scale=float(rng.uniform(2.5, 4.5)),
        texture_angle=float(rng.uniform(0, 2 * math.pi)),
        shade=float(rng.uniform(0.4, 0.6)),
        value=float(rng.uniform(0.88, 1.0)),
    )


def _rest_angle(rng: np.random.Generator, shape: str) -> float:
    return UPRIGHT.get(shape, 0.0) + float(rng.uniform(-TILT, TILT))


def _hue_distance(first: str, second: str) -> float:
    gap = abs(HUES[first] - HUES[second])
    return min(gap, 1.0 - gap)


def _hidden_share(objects: tuple[ObjectSpec, ...], frames: int) -> float:
    """Share of frames in which two objects overlap by much."""
    if len(objects) < 2:
        return 0.0
    first, second = (trajectory(item, frames) for item in objects)
    distance = np.hypot(*(first[:, :2] - second[:, :2]).T)
    reach = first[:, 2] * objects[0].radius + second[:, 2] * objects[1].radius
    return float((distance < 0.75 * reach).mean())


def draw_clip(
    seed: int,
    *,
    frames: int = 39,
    objects: int | None = None,
    held_out: bool | None = False,
    pan: str | None = None,
) -> ClipSpec:
    """Draw a clip from a seed.

    Args:
        seed: every choice comes from it.
        frames: length at 24 fps.
        objects: 1 or 2; by default two in 40 % of clips.
        held_out: False for combinations that may be trained on, True for those that may not, None for any.
        pan: "", "left" or "right"; by default drawn.

    Returns:
        The clip. Two objects never hide each other in more than 35 % of the frames.
    """
    rng = np.random.default_rng(seed)
    count = objects if objects is not None else (2 if rng.uniform() < 0.4 else 1)
    while True:
        first = _draw_object(rng, count, 0, held_out, None)
        items = (first,)
        if count == 2:
            items = (first, _draw_object(rng, count, 1, held_out, first.color))
            if rng.uniform() < 0.5:
                items = (items[1], items[0])
        if _hidden_share(items, frames) <= 0.35:
            break
    chosen = pan if pan is not None else str(rng.choice(PANS, p=(0.6, 0.2, 0.2)))
    return ClipSpec(objects=items, pan=chosen, seed=seed, frames=frames, join=str(rng.choice(JOINS)))


def reference_still(spec: ClipSpec) -> ClipSpec:
    """The one-frame clip that shows a clip's first object large, at rest: a `ref2va` request's reference."""
    item = spec.objects[0]
    rng = np.random.default_rng(spec.seed + 7_000_003)
    still = replace(
        item,
        motion="spins",
        speed="slowly",
        radius=0.33,
        x=float(rng.uniform(0.45, 0.55)),
        y=float(rng.uniform(0.45, 0.55)),
        angle=_rest_angle(rng, item.shape),
    )
    return ClipSpec(objects=(still,), pan="", seed=spec.seed + 7_000_003, frames=1)
