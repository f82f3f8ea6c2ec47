"""Loading: one path for the bundled model and a folder, and the one line a bad place gets."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch

from training.skeleton import PROFILE
from videoaccel.errors import UserError
from videoaccel.pipelines.facts import ModelFacts, read_facts
from videoaccel.pipelines.family import Request, family_of
from videoaccel.pipelines.loading import bundled_folder, default_dtype, load, load_shell

from .conftest import make_wan

SMALL: dict[str, Any] = {"prompt": "a red square", "steps": 2, "num_frames": 22, "height": 32, "width": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model a test may break."""
    return Path(shutil.copytree(bundled_folder("tiny-h3"), tmp_path / "model"))


def test_bundled_runs_in_float32_on_a_cpu_and_shares_the_joint_transformer(tiny: Any) -> None:
    assert tiny.transformer is tiny.transformer_ref
    for name in ("transformer", "vae", "audio_vae", "text_encoder"):
        part = getattr(tiny, name)
        assert {p.dtype for p in part.parameters()} == {torch.float32}, name
        assert not part.training
    assert default_dtype(torch.device("cpu")) is torch.float32
    assert default_dtype(torch.device("cuda")) is torch.bfloat16


def test_a_folder_gives_the_same_bytes_as_the_bundled_name(tiny: Any, folder: Path) -> None:
    pipe = load(folder, device="cpu")
    family = family_of(pipe)
    clips = [family.generate(each, Request(**SMALL)) for each in (pipe, tiny)]
    assert np.array_equal(clips[0].frames, clips[1].frames)
    assert torch.equal(clips[0].latents["audio"], clips[1].latents["audio"])


@pytest.mark.parametrize(
    ("task", "loaded", "left"),
    [("t2va", "transformer", "transformer_ref"), ("ref2va", "transformer_ref", "transformer")],
)
def test_a_task_loads_its_own_components_only(task: str, loaded: str, left: str) -> None:
    pipe = load("tiny-h3", device="cpu", task=task)
    assert getattr(pipe, loaded) is not None and getattr(pipe, left) is None
    assert family_of(pipe).components(pipe, task) == (loaded,)


def test_a_checkpoint_without_facts_gets_the_stock_values(folder: Path) -> None:
    (folder / "videoaccel.json").unlink()
    config = folder / "text_encoder" / "config.json"
    # The released encoder's depth; the shell reads no weights, which would not fit it.
    edit(config, lambda values: values["text_config"].update(num_hidden_layers=64))
    assert load_shell(folder).model_facts == ModelFacts()


def test_two_loads_are_independent(folder: Path) -> None:
    one, two = (load(folder, device="cpu", task="t2va") for _ in range(2))
    family = family_of(one)
    before = family.generate(two, Request(**SMALL))
    with torch.no_grad():
        for parameter in one.transformer.parameters():
            parameter.zero_()
    one.scheduler.set_shift(2.0)
    after = family.generate(two, Request(**SMALL))
    assert torch.equal(before.latents["video"], after.latents["video"])
    assert not torch.equal(family.generate(one, Request(**SMALL)).latents["video"], after.latents["video"])


def test_a_shell_resolves_as_the_loaded_pipeline_and_reads_no_weights(tiny: Any, folder: Path) -> None:
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    shell, family = load_shell(folder), family_of(tiny)
    # 48 is a multiple of this model's 16 and not of the released model's 32.
    for request in (Request(prompt="a"), Request(**{**SMALL, "width": 48}), Request(prompt="a", seconds=5.0)):
        plan = family.resolve(tiny, request)
        assert family.resolve(shell, request) == plan
        assert family.steps(shell, plan) == family.steps(tiny, plan)
    assert family.canvas(shell, 64) == family.canvas(tiny, 64)
    with pytest.raises(UserError, match="shorten"):
        family.resolve(shell, Request(prompt="word " * 300))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a JSON file."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def broken(folder: Path, what: str) -> None:
    """Breaks a copy of the bundled model in one way."""
    index = folder / "modular_model_index.json"
    if what == "no index":
        index.unlink()
    elif what == "index not json":
        index.write_text("{")
    elif what == "another class":
        index.write_text(json.dumps({"_class_name": "FluxPipeline"}))
    elif what == "no vae":
        shutil.rmtree(folder / "vae")
    elif what == "no processor":
        shutil.rmtree(folder / "processor")
    elif what == "cut weights":
        weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    elif what == "facts not json":
        (folder / "videoaccel.json").write_text("[")
    elif what == "facts key":
        (folder / "videoaccel.json").write_text('{"max_second": 3}')
    elif what == "facts value":
        (folder / "videoaccel.json").write_text('{"default_steps": "fifty"}')
    elif what == "facts flag":
        (folder / "videoaccel.json").write_text('{"trained": 0}')
    elif what == "facts of wan":
        edit(folder / "videoaccel.json", lambda facts: facts.update(family="wan"))
    elif what == "no facts":
        (folder / "videoaccel.json").unlink()
    elif what == "layer":
        edit(folder / "videoaccel.json", lambda facts: facts.update(text_encoder_layer=3))
    elif what == "fewer layers":
        edit(folder / "transformer" / "config.json", lambda config: config.update(num_layers=3))
    elif what == "more layers":
        edit(folder / "transformer" / "config.json", lambda config: config.update(num_layers=9))
    elif what == "wider":
        edit(folder / "transformer" / "config.json", lambda config: config.update(ffn_dim=512))
    elif what == "shallow encoder":
        edit(
            folder / "text_encoder" / "config.json",
            lambda config: config["vision_config"].update(depth=1),
        )
    elif what == "weights of the VAE":
        name = "diffusion_pytorch_model.safetensors"
        shutil.copy(folder / "vae" / name, folder / "transformer" / name)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("no index", "not in the diffusers layout"),
        ("index not json", "restore it"),
        ("another class", "FluxPipeline; supported"),
        ("no vae", "lacks component vae"),
        ("no processor", r"preprocessor_config\.json"),
        ("cut weights", "cannot load component transformer"),
        ("facts flag", "trained cannot be 0"),
        ("facts of wan", "is of family 'wan' and the model beside it of 'minimax_h3'; restore"),
        ("no facts", "no .*videoaccel.json, so it is the released model's 50; restore"),
        ("layer", "text_encoder_layer must be below the text encoder's 3 layers"),
        ("fewer layers", "transformer of .* no place for: transformer_blocks.3.* more; .* copy both again"),
        ("more layers", "transformer of .* lack transformer_blocks.8.* more; .* copy both again"),
        ("wider", "cannot load component transformer"),
        ("shallow encoder", "text_encoder of .* no place for: .*blocks.1.* copy both again"),
        ("weights of the VAE", "transformer of .* lack .* copy both again"),
        ("facts not json", "restore it"),
        ("facts key", "did you mean 'max_seconds'"),
        ("facts value", "default_steps cannot be 'fifty'"),
    ],
)
def test_broken_folders_get_one_line(folder: Path, what: str, line: str) -> None:
    broken(folder, what)
    with pytest.raises(UserError, match=line) as caught:
        load(folder, device="cpu", task="t2va")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"model": "tiny-h4"}, "not bundled .tiny-h3., not a folder, not a hub id"),
        ({"model": "./nowhere"}, "not a folder"),
        ({"model": "someone/some-model"}, "cannot reach the hub"),
        ({"model": Path(__file__)}, "is a file"),
        ({"task": "t2v"}, "did you mean 't2va'"),
        ({"device": "cuda:99"}, "try --device"),
        ({"device": "gpu"}, "try --device"),
        ({"device": "hpu"}, "try --device"),
        ({"device": "meta"}, "'meta' holds no numbers to compute with; try --device"),
        ({"device": ["cpu"]}, "try --device"),
    ],
)
def test_bad_arguments_get_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        load(**{"device": "cpu", **arguments})
    assert "\n" not in str(caught.value)


def test_facts_of_the_bundled_model() -> None:
    facts = read_facts(bundled_folder("tiny-h3") / "videoaccel.json")
    assert facts.canvas == (128, 128) and facts.family == "minimax_h3"
    # Whether it is trained changes with the weights; the rest is the architecture's.
    said = json.loads((bundled_folder("tiny-h3") / "videoaccel.json").read_text())
    assert said | {"trained": None} == {**PROFILE, "trained": None}
    assert facts.max_pixels == 256 * 256 and ModelFacts().trained


def test_a_wan_folder_loads_as_itself(tmp_path: Path) -> None:
    pipe = make_wan(two_experts=True)
    pipe.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="serves t2v, not i2v"):
        load(tmp_path, device="cpu", task="i2v")
    facts = tmp_path / "videoaccel.json"
    facts.write_text("{}")  # those of the released MiniMax-H3
    with pytest.raises(UserError, match="is of family 'minimax_h3' and the model beside it of 'wan'"):
        load(tmp_path, device="cpu", task="t2v")
    facts.write_text('{"family": "wan"}')
    loaded = load(tmp_path, device="cpu", task="t2v")
    assert type(loaded).__name__ == "WanPipeline" and loaded.config.boundary_ratio == 0.9
    for name in ("transformer", "transformer_2"):
        for ours, theirs in zip(
            getattr(loaded, name).parameters(), getattr(pipe, name).parameters(), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["transformer", "vae", "scheduler", "text_encoder"])
def test_a_local_folder_is_never_completed_from_the_hub(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / name)
    # Whatever the index says about where the parts came from.
    edit(folder / "modular_model_index.json", lambda index: index[name][2].update(OTHER))
    monkeypatch.setattr(socket, "getaddrinfo", refuse_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=f"lacks component {name}"):
        load(folder, device="cpu", task="t2va")
    if name != "text_encoder":
        with pytest.raises(UserError, match=f"lacks component {name}"):
            load_shell(folder)


OTHER = {"pretrained_model_name_or_path": "someone/another-model"}


def refuse_network(*_: Any, **__: Any) -> Any:
    raise AssertionError("the network was asked")


def test_a_wan_folder_whose_config_is_not_its_weights_is_refused(tmp_path: Path) -> None:
    make_wan().save_pretrained(tmp_path)
    edit(tmp_path / "transformer" / "config.json", lambda config: config.update(num_layers=1))
    with pytest.raises(UserError, match=r"no place for: blocks\.1"):
        load(tmp_path, device="cpu")
    shutil.rmtree(tmp_path / "transformer")
    with pytest.raises(UserError, match="lacks component transformer"):
        load(tmp_path, device="cpu")
