"""The procedural world: what a caption fixes, what is held out, where things are, how big they are drawn."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.world.render import SAMPLE_RATE, build_scene, render, soundtrack
from evals.world.spec import (
    COLORS,
    FPS,
    JOINS,
    MOTIONS,
    PANS,
    PITCHES,
    SHAPES,
    SPEEDS,
    ClipSpec,
    ObjectSpec,
    bounce_times,
    draw_clip,
    is_held_out,
    reference_still,
    trajectory,
)

SEEDS = st.integers(0, 2**31 - 1)
FRAMES = st.sampled_from((22, 39, 124))


def item(motion: str = "spins", speed: str = "slowly", shape: str = "disc", **more: object) -> ObjectSpec:
    plain = ObjectSpec(color="red", shape=shape, motion=motion, speed=speed, radius=0.2, x=0.5, y=0.5)
    return replace(plain, **more)  # type: ignore[arg-type]


def triples(spec: ClipSpec) -> list[tuple[str, str, str]]:
    return [(o.color, o.shape, o.motion) for o in spec.objects]


@given(seed=SEEDS, frames=FRAMES)
@settings(max_examples=60)
def test_what_is_held_out_never_appears_in_training_draws(seed: int, frames: int) -> None:
    assert not any(is_held_out(*triple) for triple in triples(draw_clip(seed, frames=frames)))
    assert all(is_held_out(*triple) for triple in triples(draw_clip(seed, frames=frames, held_out=True)))


def test_held_out_is_about_15_per_cent_and_leaves_every_word_to_training() -> None:
    every = list(itertools.product(COLORS, SHAPES, MOTIONS))
    out = [triple for triple in every if is_held_out(*triple)]
    assert 0.10 <= len(out) / len(every) <= 0.20
    kept = [triple for triple in every if not is_held_out(*triple)]
    for column, words in enumerate((COLORS, SHAPES, MOTIONS)):
        assert {triple[column] for triple in kept} == set(words) == {triple[column] for triple in out}


def parse(caption: str) -> tuple[list[tuple[str, ...]], str]:
    """Colour, shape, motion and speed of each object, and the pan, out of a caption's text alone."""
    words = "|".join
    one = rf"(an?) ({words(COLORS)}) ({words(SHAPES)}) ({words(MOTIONS)}) ({words(SPEEDS)})"
    pan = rf"(?:, camera panning ({words(filter(None, PANS))}))?"
    whole = rf"{one}(?:(?:{words(map(re.escape, JOINS))}){one})?{pan}"
    found = re.fullmatch(whole, caption)
    assert found is not None, caption
    groups = found.groups()
    for article, color in (groups[0:2], groups[5:7]):
        if article is not None:
            assert article == ("an" if color == "orange" else "a")
    return [groups[start : start + 4] for start in (1, 6) if groups[start]], groups[10] or ""


@given(seed=SEEDS, frames=FRAMES)
@settings(max_examples=60)
def test_a_caption_says_all_that_is_judged_and_nothing_else(seed: int, frames: int) -> None:
    spec = draw_clip(seed, frames=frames, held_out=None)
    objects, pan = parse(spec.caption())
    assert objects == [(o.color, o.shape, o.motion, o.speed) for o in spec.objects]
    assert pan == spec.pan
    prompt = spec.reference_prompt()
    assert spec.objects[0].motion in prompt and spec.objects[0].speed in prompt
    assert not any(word in prompt.split() for word in (*COLORS, *SHAPES))


@given(seed=SEEDS)
@settings(max_examples=40)
def test_a_seed_draws_one_clip_and_two_objects_are_told_apart_by_colour(seed: int) -> None:
    spec = draw_clip(seed, objects=2)
    assert spec == draw_clip(seed, objects=2)
    first, second = spec.objects
    assert first.color != second.color
    assert {first.color, second.color} not in ({"red", "orange"}, {"orange", "yellow"}, {"pink", "red"})
    assert reference_still(spec).objects[0].color == first.color


@pytest.mark.parametrize(("speed", "screens"), [("slowly", 0.16), ("quickly", 0.34)])
@pytest.mark.parametrize(
    ("motion", "axis", "sign"),
    [("slides left", 0, -1), ("slides right", 0, 1), ("rises", 1, -1), ("falls", 1, 1)],
)
def test_translation_is_uniform_and_comes_back_from_the_other_side(
    motion: str, axis: int, sign: int, speed: str, screens: float
) -> None:
    path = trajectory(item(motion, speed), 124)
    steps = np.diff(path[:, axis])
    reach = 1.0 + 2.2 * 0.2
    wrapped = (steps - sign * screens / FPS + reach / 2) % reach - reach / 2
    assert np.abs(wrapped).max() < 1e-12
    assert np.ptp(path[:, 1 - axis]) == 0
    assert path[:, axis].min() >= -1.1 * 0.2 - 1e-12 and path[:, axis].max() <= 1 + 1.1 * 0.2 + 1e-12


@pytest.mark.parametrize(("speed", "period", "height"), [("slowly", 0.95, 0.30), ("quickly", 0.55, 0.26)])
def test_a_bounce_is_free_fall_between_touches(speed: str, period: float, height: float) -> None:
    thing = item("bounces", speed, phase=0.3)
    y = trajectory(thing, 124)[:, 1]
    touches = bounce_times(thing, 124)
    assert np.allclose(np.diff(touches), period) and abs(touches[0] - 0.7 * period) < 1e-12
    t = np.arange(124) / FPS
    # From a floor at 0.5 + h/2, up at 4h/P against a pull of 8h/P^2.
    since = (t - touches[0]) % period
    floor = 0.5 + height / 2
    fall = floor - 4 * height / period * since + 0.5 * (8 * height / period**2) * since**2
    assert np.abs(y - fall).max() < 1e-9


@pytest.mark.parametrize("quick", [0, 1])
def test_turns_growth_orbits_and_sways_against_closed_forms(quick: int) -> None:
    speed, frames = SPEEDS[quick], 97
    t = np.arange(frames) / FPS
    spin = trajectory(item("spins", speed, direction=-1, angle=0.2), frames)
    assert np.allclose(spin[:, 3], 0.2 - 2 * math.pi * (0.4, 1.0)[quick] * t)
    assert np.ptp(spin[:, :3], axis=0).max() == 0
    ratio = (1.5, 2.3)[quick]
    grow, shrink = (trajectory(item(motion, speed), frames)[:, 2] for motion in ("grows", "shrinks"))
    assert np.allclose(grow * shrink, 1.0)
    assert grow[0] == pytest.approx(ratio**-0.5)
    assert grow[1] / grow[0] == pytest.approx(ratio ** (1 / frames))
    orbit = trajectory(item("orbits", speed), frames)[:, :2] - 0.5
    assert np.allclose(np.hypot(*orbit.T), 0.17)
    turn = np.unwrap(np.arctan2(orbit[:, 1], orbit[:, 0]))
    assert np.allclose(np.diff(turn), 2 * math.pi / (2.6, 1.4)[quick] / FPS)
    sway = trajectory(item("sways", speed, phase=0.25), frames)
    assert np.allclose(sway[:, 0], 0.5 + 0.13 * np.cos(2 * math.pi * t / (1.2, 0.65)[quick]))
    assert np.ptp(sway[:, 1]) == 0


def test_an_unknown_motion_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown motion 'flies'.*orbits"):
        trajectory(item("flies"), 2)


AREAS = {
    "disc": math.pi * 0.88**2,
    "square": (2 * 0.76) ** 2,
    "bar": (2 * 0.98) * (2 * 0.3),
    "triangle": 3 * math.sqrt(3) / 4,
    # Five tips at 1, five notches at 0.42: ten triangles with 36 degrees at the centre.
    "star": 10 * 0.5 * 0.42 * math.sin(math.pi / 5),
    "cross": 2 * (2 * 0.95) * (2 * 0.29) - (2 * 0.29) ** 2,
    "ring": math.pi * (0.92**2 - 0.48**2),
}


@pytest.mark.parametrize("shape", sorted(AREAS))
def test_a_drawn_shape_has_its_closed_form_area(shape: str) -> None:
    size, radius = 640, 0.3
    spec = ClipSpec(objects=(item(shape=shape, radius=radius, angle=0.4),), pan="", seed=5, frames=1)
    drawn = render(build_scene([spec], size))[0, 0].int()
    empty = render(build_scene([replace(spec, objects=())], size))[0, 0].int()
    pixels = ((drawn - empty).abs().amax(dim=-1) > 2).sum().item()
    assert pixels == pytest.approx(AREAS[shape] * (radius * size) ** 2, rel=0.015)


def test_a_clip_is_drawn_the_same_alone_and_in_a_batch() -> None:
    specs = [draw_clip(seed, frames=5, objects=count) for seed, count in ((1, 1), (2, 2), (3, 1))]
    together = render(build_scene(specs))
    for spec, clip in zip(specs, together, strict=True):
        alone = render(build_scene([spec]))[0]
        assert (alone.int() - clip.int()).abs().max() <= 1
    assert together.dtype == torch.uint8 and together.shape == (3, 5, 128, 128, 3)


def test_only_named_objects_are_colourful() -> None:
    spec = draw_clip(11, frames=3, objects=1)
    bare = render(build_scene([replace(spec, objects=())])).float()
    top, bottom = bare.amax(dim=-1), bare.amin(dim=-1)
    # Saturation at most 0.22, up to the rounding of two bytes.
    assert (top - bottom <= 0.22 * top + 1.0).all()


def test_a_bounce_sounds_at_its_touch_at_its_shapes_pitch() -> None:
    thing = item("bounces", "slowly", shape="ring", phase=0.5, x=0.25)
    (touch,) = bounce_times(thing, 24)
    sound = soundtrack(ClipSpec(objects=(thing,), pan="", seed=3, frames=24))
    start = round(touch * SAMPLE_RATE)
    before, after = sound[:, start - 3200 : start], sound[:, start : start + 3200]
    spectrum = np.abs(np.fft.rfft(after[0] * np.hanning(3200)))
    assert np.argmax(spectrum) * SAMPLE_RATE / 3200 == pytest.approx(PITCHES["ring"], abs=10)
    assert np.abs(before).max() < 0.07 < np.abs(after[0]).max()
    # Left of the middle sounds louder on the left.
    assert np.abs(after[0]).max() > 1.5 * np.abs(after[1]).max()
