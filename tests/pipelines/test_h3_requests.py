"""What an H3 request may ask for, and the one line it gets otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from videoaccel.errors import UserError
from videoaccel.pipelines.facts import ModelFacts
from videoaccel.pipelines.family import Reference, Request, family_of
from videoaccel.pipelines.h3_pipeline import H3Pipeline

from .conftest import picture


@pytest.fixture(scope="module")
def stock() -> Any:
    """The released model's geometry: no components, the stock facts and canvas, stock schedulers."""
    from diffusers import MiniMaxH3Scheduler
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks

    pipe = H3Pipeline(MiniMaxH3Blocks())
    pipe.register_components(scheduler=MiniMaxH3Scheduler(12.0), audio_scheduler=MiniMaxH3Scheduler(3.0))
    return pipe


def test_defaults_are_the_checkpoints_own(tiny: Any, stock: Any) -> None:
    plan = family_of(tiny).resolve(tiny, Request(prompt="a"))
    assert (plan.task, plan.height, plan.width, plan.num_frames, plan.steps) == ("t2va", 128, 128, 39, 50)
    assert (plan.forwards, plan.fps, plan.seconds, plan.notes) == (49, 24.0, 1.625, ())
    plan = family_of(stock).resolve(stock, Request(prompt="a"))
    assert (plan.height, plan.width, plan.num_frames, plan.steps) == (768, 1344, 124, 50)


def test_facts_reach_the_pipeline_and_default_to_the_stock_class(tiny: Any, stock: Any) -> None:
    from diffusers import MiniMaxH3ModularPipeline

    plain = MiniMaxH3ModularPipeline()
    for name in ("min_duration", "max_duration", "text_encoder_layer"):
        assert getattr(stock, name) == getattr(plain, name)
    assert (tiny.min_duration, tiny.max_duration, tiny.text_encoder_layer) == (0.9, 5.2, 2)
    assert H3Pipeline(plain.blocks, facts=ModelFacts(max_seconds=7.0)).max_duration == 7.0


@pytest.mark.parametrize(
    ("asked", "frames"),
    [
        ({"seconds": 5}, 124),
        ({"seconds": 15}, 345),
        ({"seconds": 10.0}, 243),
        ({"num_frames": 120}, 124),
        ({"num_frames": 125}, 141),
        ({"num_frames": 345}, 345),
        ({"num_frames": 124, "seconds": 9.0}, 124),
    ],
)
def test_lengths_snap_to_17n_plus_5_and_say_so(stock: Any, asked: dict[str, Any], frames: int) -> None:
    plan = family_of(stock).resolve(stock, Request(prompt="a", **asked))
    assert plan.num_frames == frames and plan.num_frames % 17 == 5
    assert bool(plan.notes) == (asked.get("num_frames") != frames)


@pytest.mark.parametrize(
    ("edge", "canvas"), [(None, (768, 1344)), (768, (768, 1344)), (544, (544, 960)), (1088, (1088, 1920))]
)
def test_canvas_keeps_the_models_shape(stock: Any, edge: int | None, canvas: tuple[int, int]) -> None:
    assert family_of(stock).canvas(stock, edge) == canvas


def test_keyframe_sets_the_canvas_where_the_model_has_no_fixed_one(stock: Any) -> None:
    plan = family_of(stock).resolve(stock, Request(prompt="a", first_frame=picture(0, 900, 1600)))
    assert (plan.task, plan.height, plan.width) == ("fl2va", 1344, 768)


NARROW = Image.new("RGB", (10, 90))
SOUND = torch.zeros(2, 100)
IMAGE = Reference(kind="image", image=picture(0))
FRAMES = np.zeros((24, 64, 64, 3), np.uint8)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "  "}, "prompt is empty"),
    ({"prompt": "word " * 300}, "at most 256; shorten"),
    ({"prompt": "a <|image_pad|> b"}, r"<\|image_pad\|>.*take it out"),
    ({"prompt": 3}, "prompt must be text, got the int 3"),
    ({"prompt": ["a", "b"]}, "prompt must be text, got the list"),
    ({"prompt": "a \ud83d square"}, r"prompt holds '\\ud83d' \(number 3\).*take it out"),
    ({"negative_prompt": "\udc00"}, "negative prompt holds"),
    ({"first_frame": "x.png"}, r"first frame must be a PIL image.*videoaccel\.media\.read_image"),
    ({"last_frame": np.zeros((64, 64, 3), np.uint8)}, "last frame must be a PIL image.*fromarray"),
    ({"references": "x.png"}, "must be a tuple of Reference, got the str 'x.png'"),
    ({"references": IMAGE}, "must be a tuple of Reference"),
    ({"references": np.zeros((2, 64, 64, 3))}, "must be a tuple of Reference, got a ndarray"),
    ({"references": ("x.png",)}, r"reference 1 must be a Reference.*media\.read_image"),
    ({"references": (IMAGE, [picture(0)])}, "reference 2 must be a Reference"),
    ({"references": (Reference(kind="image", image="x.png"),)}, r"image of reference 1.*read_image"),
    ({"references": (Reference(kind="video", frames="x.mp4", fps=24),)}, r"NumPy array.*media\.read_video"),
    (
        {"references": (Reference(kind="video", frames=torch.zeros(24, 64, 64, 3).byte(), fps=24),)},
        r"NumPy array, got a Tensor; call \.cpu\(\)\.numpy\(\)",
    ),
    ({"references": (Reference(kind="video", frames=FRAMES, fps="24"),)}, "fps of .* must be a number"),
    ({"references": (IMAGE, Reference(kind="audio", audio=SOUND.numpy()))}, r"torch\.from_numpy"),
    ({"references": (IMAGE, Reference(kind="audio", audio="a.wav"))}, r"media\.read_audio"),
    ({"references": (IMAGE, Reference(kind="audio", audio=SOUND, sample_rate="x"))}, "set sample_rate"),
    ({"task": "t2v"}, "did you mean 't2va'"),
    ({"task": "fl2va"}, "--first-frame"),
    ({"task": "ref2va"}, "--reference"),
    ({"task": "t2va", "first_frame": picture(0)}, "use fl2va"),
    ({"first_frame": picture(0), "references": (IMAGE,)}, "cannot be combined"),
    ({"first_frame": NARROW}, "crop it"),
    ({"height": 128}, "together"),
    ({"height": 100, "width": 128}, "multiple of 16, got 100; try 96"),
    ({"height": 0, "width": 128}, "try 16"),
    ({"height": 32, "width": 256}, "crop it"),
    ({"height": 1024, "width": 1024}, "1048576 pixels and this model makes at most 65536; try 256x256"),
    ({"height": 256, "width": 272}, "at most 65536; try 256x240"),
    ({"seconds": 9.0}, "give 0.9 to 5.2"),
    ({"seconds": 0.1}, "give 0.9 to 5.2"),
    ({"seconds": float("nan")}, "must be a number"),
    ({"num_frames": 0}, "positive whole number"),
    ({"num_frames": 4000}, "give 22 to 124 frames"),
    ({"num_frames": 1}, "give 22 to 124 frames"),
    ({"steps": 1}, "from 2 to 1000"),
    ({"steps": 5000}, "from 2 to 1000"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"guidance": 3.0}, "guidance-distilled"),
    ({"negative_prompt": "blur"}, "guidance-distilled"),
    ({"references": (IMAGE,) * 10}, "at most 9 image"),
    (
        {"references": (IMAGE,) * 9 + (Reference(kind="audio", audio=SOUND),) * 3 + (IMAGE,)},
        "at most 9 image",
    ),
    ({"references": (Reference(kind="audio", audio=SOUND),)}, "add one"),
    ({"references": (Reference(kind="image", image=NARROW),)}, "crop it"),
    ({"references": (Reference(kind="image"),)}, "decode the file"),
    ({"references": (Reference(kind="film"),)}, "unknown kind of reference"),
    ({"references": (Reference(kind="video", frames=np.zeros((9, 9, 9)), fps=24),)}, r"\(T, H, W, 3\)"),
    ({"references": (Reference(kind="video", frames=np.zeros((9, 64, 64, 3), np.uint8)),)}, "set fps"),
    (
        {"references": (Reference(kind="video", frames=np.zeros((9, 64, 64, 3), np.uint8), fps=24),)},
        "too short",
    ),
    ({"references": (IMAGE, Reference(kind="audio", audio=torch.zeros(100)))}, "samples"),
    ({"references": (IMAGE, Reference(kind="audio", audio=torch.full((2, 9), torch.nan)))}, "finite floats"),
    ({"references": (IMAGE, Reference(kind="audio", audio=torch.zeros(2, 9).short()))}, "not torch.int16"),
    ({"references": (Reference(kind="video", frames=np.zeros((24, 64, 64, 3)), fps=24),)}, "uint8 frames"),
]


@pytest.mark.parametrize(("asked", "line"), BAD)
def test_bad_requests_get_one_line_that_names_the_fix(tiny: Any, asked: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        family_of(tiny).start(tiny, Request(**{"prompt": "a red square", **asked}))
    assert "\n" not in str(caught.value)


def test_the_canvas_limit_is_the_models_own(tiny: Any, stock: Any) -> None:
    plan = family_of(tiny).resolve(tiny, Request(prompt="a", height=256, width=256))
    assert (plan.height, plan.width) == (256, 256)
    plan = family_of(stock).resolve(stock, Request(prompt="a", height=1536, width=2688))
    assert (plan.height, plan.width) == (1536, 2688)
    with pytest.raises(UserError, match="at most 4128768; try 2688x1536"):
        family_of(stock).resolve(stock, Request(prompt="a", height=3072, width=5376))


def test_unknown_pipelines_have_no_family() -> None:
    with pytest.raises(UserError, match="not a supported pipeline"):
        family_of(object())
