"""Draws clips of the procedural world, batched, in torch, on any device.

The same spec gives the same picture everywhere up to float rounding. Shapes are drawn from signed distances;
the verifier (verify.py) has its own, different idea of what each shape is.
"""

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from evals.world.spec import (
    FPS,
    MUTED_SATURATION,
    PAN_SPEED,
    PITCHES,
    SHAPES,
    SIZE,
    TEXTURES,
    ClipSpec,
    bounce_times,
    trajectory,
)

WAVES = 5
DISTRACTORS = 4
SAMPLE_RATE = 32000
_TONE_DECAY = 0.1
HUMS = (80.0, 120.0, 160.0, 200.0)


@dataclass
class Scene:
    """The numbers of a batch of clips, as tensors; absent objects have zero radius."""

    path: torch.Tensor  # (B, K, T, 4): x, y, radius, angle
    shape: torch.Tensor  # (B, K) index into SHAPES
    texture: torch.Tensor  # (B, K) index into TEXTURES
    look: torch.Tensor  # (B, K, 7): r, g, b, texture scale, texture angle, shade, present
    waves: torch.Tensor  # (B, WAVES, 4): frequency x, frequency y, phase, drift in cycles a second
    ground: torch.Tensor  # (B, 14): see `_ground`
    size: int

    def to(self, device: torch.device | str) -> "Scene":
        """A copy on `device`."""
        moved = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return Scene(**moved, size=self.size)


def _muted(rng: np.random.Generator, value: float) -> tuple[float, float, float]:
    return colorsys.hsv_to_rgb(rng.uniform(), rng.uniform(0.0, MUTED_SATURATION), value)


def _ground(rng: np.random.Generator, spec: ClipSpec) -> tuple[np.ndarray, np.ndarray]:
    """Waves, and (dark rgb, light rgb, tile frequency, angle, velocity x, y, mix, edge, offset x, y)."""
    angle = rng.uniform(0, math.pi, WAVES)
    frequency = rng.uniform(1.5, 5.5, WAVES)
    pan = {"": 0.0, "left": PAN_SPEED, "right": -PAN_SPEED}[spec.pan]
    drift = rng.uniform(-0.05, 0.05, 2)
    velocity = np.array([pan + drift[0] * (0.3 if spec.pan else 1.0), drift[1] * (0.3 if spec.pan else 1.0)])
    kx, ky = frequency * np.cos(angle), frequency * np.sin(angle)
    # Each wave also crawls by itself, so the texture deforms and does not only scroll.
    own = rng.uniform(-0.25, 0.25, WAVES)
    waves = np.stack([kx, ky, rng.uniform(0, 1, WAVES), own - (kx * velocity[0] + ky * velocity[1])], axis=1)
    dark, light = _muted(rng, rng.uniform(0.12, 0.32)), _muted(rng, rng.uniform(0.6, 0.88))
    numbers = [*dark, *light, rng.uniform(3.0, 8.0), rng.uniform(0, math.pi), *velocity]
    numbers += [rng.uniform(0.25, 0.75), rng.uniform(1.5, 5.0), rng.uniform(), rng.uniform()]
    return waves, np.array(numbers)


def _distractors(
    rng: np.random.Generator, spec: ClipSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Grey shapes that the caption never names: paths (D, T, 4), shapes, textures, looks."""
    t = np.arange(spec.frames) / FPS
    pan = {"": 0.0, "left": PAN_SPEED, "right": -PAN_SPEED}[spec.pan]
    paths, shapes, textures, looks = [], [], [], []
    for _ in range(DISTRACTORS):
        radius = rng.uniform(0.05, 0.1)
        speed = rng.uniform(-0.09, 0.09, 2)
        reach = 1.0 + 2.2 * radius
        x = (rng.uniform() * reach + (speed[0] + pan) * t) % reach - 1.1 * radius
        y = (rng.uniform() * reach + speed[1] * t) % reach - 1.1 * radius
        turn = rng.uniform(0, 2 * math.pi) + rng.uniform(-1.5, 1.5) * t
        paths.append(np.stack([x, y, np.full_like(x, radius), turn], axis=1))
        shapes.append(rng.integers(len(SHAPES)))
        textures.append(rng.integers(len(TEXTURES)))
        looks.append([*_muted(rng, rng.uniform(0.35, 1.0)), rng.uniform(2, 5), rng.uniform(0, 6.3), 0.5, 1.0])
    return np.array(paths), np.array(shapes), np.array(textures), np.array(looks)


def build_scene(specs: Sequence[ClipSpec], size: int = SIZE) -> Scene:
    """Turn specs of equal length into the tensors that `render` draws (on the CPU)."""
    return scene_of(scene_arrays(specs), size)


def scene_of(arrays: dict[str, np.ndarray], size: int = SIZE) -> Scene:
    """A scene from what `scene_arrays` gave, perhaps in another process."""
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return Scene(**tensors, size=size)


def scene_arrays(specs: Sequence[ClipSpec]) -> dict[str, np.ndarray]:
    """The fields of a `Scene`, as numpy arrays."""
    paths, shapes, textures, looks, waves, grounds = [], [], [], [], [], []
    for spec in specs:
        rng = np.random.default_rng([spec.seed, 1])
        wave, ground = _ground(rng, spec)
        path, shape, texture, look = _distractors(rng, spec)
        # Painter's order: distractors, then the last object, then the first.
        for slot in (1, 0):
            if slot < len(spec.objects):
                item = spec.objects[slot]
                where = trajectory(item, spec.frames)
                where[:, 2] *= item.radius
                numbers = [*item.rgb(), item.texture_scale, item.texture_angle, item.shade, 1.0]
                kind, cloth = SHAPES.index(item.shape), TEXTURES.index(item.texture)
            else:
                where, numbers, kind, cloth = np.zeros((spec.frames, 4)), [0.0] * 7, 0, 0
            path = np.concatenate([path, where[None]])
            look = np.concatenate([look, np.array(numbers)[None]])
            shape, texture = np.append(shape, kind), np.append(texture, cloth)
        for rows, row in zip(
            (paths, shapes, textures, looks, waves, grounds),
            (path, shape, texture, look, wave, ground),
            strict=True,
        ):
            rows.append(row)
    return {
        "path": np.array(paths, dtype=np.float32),
        "shape": np.array(shapes, dtype=np.int64),
        "texture": np.array(textures, dtype=np.int64),
        "look": np.array(looks, dtype=np.float32),
        "waves": np.array(waves, dtype=np.float32),
        "ground": np.array(grounds, dtype=np.float32),
    }


def _fold(x: torch.Tensor, y: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold the plane into one mirrored sector of an n-fold symmetric figure; a tip points along +x."""
    radius = torch.sqrt(x * x + y * y + 1e-12)
    sector = 2 * math.pi / n
    theta = torch.atan2(y, x)
    theta = torch.abs(torch.remainder(theta + sector / 2, sector) - sector / 2)
    return radius * torch.cos(theta), radius * torch.sin(theta)


def _distance(kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance to a shape of unit radius, negative inside; exact near edges, a bound near corners."""
    if kind == "disc":
        return torch.sqrt(x * x + y * y) - 0.88
    if kind == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.76
    if kind == "triangle":
        fx, fy = _fold(x, y, 3)
        return fx * math.cos(math.pi / 3) + fy * math.sin(math.pi / 3) - 0.5
    if kind == "star":
        fx, fy = _fold(x, y, 5)
        inner = 0.42
        bx, by = inner * math.cos(math.pi / 5), inner * math.sin(math.pi / 5)
        ex, ey = bx - 1.0, by
        length = math.hypot(ex, ey)
        return ((fx - 1.0) * ey - fy * ex) / length
    if kind == "cross":
        ax, ay = x.abs(), y.abs()
        return torch.minimum(torch.maximum(ax - 0.95, ay - 0.29), torch.maximum(ax - 0.29, ay - 0.95))
    if kind == "ring":
        return (torch.sqrt(x * x + y * y) - 0.7).abs() - 0.22
    if kind == "crescent":
        outer = torch.sqrt(x * x + y * y) - 0.95
        bite = torch.sqrt((x - 0.5) ** 2 + y * y) - 0.72
        return torch.maximum(outer, -bite)
    if kind == "bar":
        return torch.maximum(x.abs() - 0.98, y.abs() - 0.3)
    raise ValueError(f"unknown shape {kind!r}; known: {', '.join(SHAPES)}")


def _wave(x: torch.Tensor, sharp: float) -> torch.Tensor:
    """A soft square wave of period 1 in [0, 1]."""
    return torch.sigmoid(sharp * torch.sin(2 * math.pi * x))


def _cloth(kind: str, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A texture in [0, 1] over object coordinates of unit radius."""
    if kind == "stripes":
        return _wave(x * scale / 2, 6.0)
    if kind == "checker":
        return torch.sigmoid(
            9.0 * torch.sin(math.pi * x * scale * 0.75) * torch.sin(math.pi * y * scale * 0.75)
        )
    if kind == "dots":
        gx, gy = (
            torch.remainder(x * scale * 0.6 + 0.3, 1.0) - 0.5,
            torch.remainder(y * scale * 0.6, 1.0) - 0.5,
        )
        return torch.sigmoid(24.0 * (0.3 - torch.sqrt(gx * gx + gy * gy + 1e-9)))
    if kind == "halves":
        return torch.sigmoid(14.0 * (x + 0.1))
    if kind == "wedges":
        return torch.sigmoid(6.0 * torch.sin(3.0 * torch.atan2(y + 0.12, x + 1e-6)))
    raise ValueError(f"unknown texture {kind!r}; known: {', '.join(TEXTURES)}")


def _backdrop(scene: Scene, x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """(B, 3, T, H, W): crawling blotches and drifting sharp tiles in two muted tones."""
    total = torch.zeros(len(scene.waves), len(t), scene.size, scene.size, device=t.device)
    for index in range(WAVES):
        fx, fy, phase, drift = scene.waves[:, index].unbind(1)
        argument = (
            fx[:, None, None, None] * x
            + fy[:, None, None, None] * y
            + phase[:, None, None, None]
            + drift[:, None, None, None] * t[None, :, None, None]
        )
        total = total + torch.sin(2 * math.pi * argument)
    g = scene.ground[:, :, None, None, None]
    blotch = torch.sigmoid(g[:, 11] * total * 1.6)
    sx, sy = x - g[:, 8] * t[:, None, None] + g[:, 12], y - g[:, 9] * t[:, None, None] + g[:, 13]
    u = sx * torch.cos(g[:, 7]) + sy * torch.sin(g[:, 7])
    v = sy * torch.cos(g[:, 7]) - sx * torch.sin(g[:, 7])
    tiles = torch.sigmoid(
        8.0 * torch.sin(2 * math.pi * g[:, 6] * u) * torch.sin(2 * math.pi * g[:, 6] * 0.6 * v)
    )
    level = (g[:, 10] * blotch + (1 - g[:, 10]) * tiles)[:, None]
    dark, light = scene.ground[:, 0:3, None, None, None], scene.ground[:, 3:6, None, None, None]
    return dark + (light - dark) * level


def render(scene: Scene) -> torch.Tensor:
    """Draw a batch of clips.

    Args:
        scene: from `build_scene`, on any device.

    Returns:
        `(B, T, H, W, 3)` uint8.
    """
    device = scene.path.device
    size, frames = scene.size, scene.path.shape[2]
    axis = (torch.arange(size, device=device) + 0.5) / size
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    t = torch.arange(frames, device=device) / FPS
    picture = _backdrop(scene, x, y, t)
    for k in range(scene.path.shape[1]):
        present = scene.look[:, k, 6] > 0
        for kind_index in scene.shape[:, k][present].unique().tolist():
            rows = torch.nonzero(present & (scene.shape[:, k] == kind_index)).flatten()
            picture[rows] = _paint(scene, picture[rows], rows, k, SHAPES[kind_index], x, y)
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def _paint(
    scene: Scene,
    picture: torch.Tensor,
    rows: torch.Tensor,
    k: int,
    kind: str,
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    path = scene.path[rows, k][..., None, None]  # (N, T, 4, 1, 1)
    dx, dy = x - path[:, :, 0], y - path[:, :, 1]
    radius = path[:, :, 2].clamp_min(1e-4)
    cos, sin = torch.cos(path[:, :, 3]), torch.sin(path[:, :, 3])
    u, v = (dx * cos + dy * sin) / radius, (dy * cos - dx * sin) / radius
    pixels = radius * scene.size
    distance = _distance(kind, u, v) * pixels
    cover = (0.5 - distance).clamp(0, 1)
    look = scene.look[rows, k][:, :, None, None, None]
    tcos, tsin = torch.cos(look[:, 4]), torch.sin(look[:, 4])
    tu, tv = u * tcos + v * tsin, v * tcos - u * tsin
    cloth = torch.zeros_like(u)
    for index in scene.texture[rows, k].unique().tolist():
        same = torch.nonzero(scene.texture[rows, k] == index).flatten()
        cloth[same] = _cloth(TEXTURES[index], tu[same], tv[same], look[same, 3])
    tone = 1.0 - look[:, 5] * cloth
    # A dark rim a pixel and a half wide.
    rim = ((distance + 2.0) / 1.0).clamp(0, 1)
    tone = tone * (1 - 0.85 * rim)
    color = look[:, 0:3] * tone[:, None]
    return picture * (1 - cover[:, None]) + color * cover[:, None]


def soundtracks(
    specs: Sequence[ClipSpec], samples: int | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The sound of clips of one length: a low hum, and a decaying tone of the shape's pitch at each bounce.

    Args:
        specs: the clips.
        samples: length; by default the clips' own at 32 kHz.
        device: where to compute.

    Returns:
        `(B, 2, N)` float32 in [-1, 1], left and right.
    """
    count = samples if samples is not None else round(specs[0].frames / FPS * SAMPLE_RATE)
    hums, tones = [], []
    for spec in specs:
        rng = np.random.default_rng([spec.seed, 2])
        pair = rng.choice(HUMS, 2, replace=False)
        hums.append(np.stack([pair, rng.uniform(0.01, 0.03, 2), rng.uniform(0, 1, 2)], axis=1))
        events = []
        for item in spec.objects:
            where = trajectory(item, spec.frames)
            for start in bounce_times(item, spec.frames):
                side = float(np.clip(where[min(int(start * FPS), spec.frames - 1), 0], 0, 1)) * math.pi / 2
                events.append((start, PITCHES[item.shape], 0.45 * math.cos(side), 0.45 * math.sin(side)))
        tones.append(events)
    most = max(map(len, tones), default=0)
    table = torch.zeros(len(specs), most, 4)
    for row, events in zip(table, tones, strict=True):
        if events:
            row[: len(events)] = torch.tensor(events)
    hum, table = torch.tensor(np.array(hums), dtype=torch.float32).to(device), table.to(device)
    time = (torch.arange(count, device=device) / SAMPLE_RATE)[None]
    mono = torch.zeros(len(specs), count, device=device)
    for index in range(2):
        frequency, level, phase = hum[:, index].unbind(1)
        mono += level[:, None] * torch.sin(2 * math.pi * (frequency[:, None] * time + phase[:, None]))
    sound = mono[:, None].repeat(1, 2, 1)
    for index in range(most):
        start, pitch, left, right = table[:, index].unbind(1)
        age = time - start[:, None]
        tone = torch.where(age >= 0, torch.exp(-age.clamp_min(0) / _TONE_DECAY), 0.0)
        # In phase with the clip, not the bounce: pitches are multiples of the audio latents' rate, so a tone
        # is the same picture in every latent and only its level moves.
        tone = tone * torch.sin(2 * math.pi * pitch[:, None] * time)
        sound += torch.stack([left, right], dim=1)[:, :, None] * tone[:, None]
    return sound.clamp(-1, 1)


def soundtrack(spec: ClipSpec, samples: int | None = None) -> np.ndarray:
    """One clip's stereo sound, `(2, N)` float32: see `soundtracks`."""
    return soundtracks([spec], samples)[0].numpy()
