"""The transformer's training command: what it refuses, and which kept latents it takes."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

from training import dit, latents
from training.skeleton import AUDIO_VAE, VIDEO_VAE


def test_distilling_nothing_is_refused_before_any_data(monkeypatch, capsys):
    argv = ["dit", "distill", "--seconds", "1", "--codec", "absent", "--out", "absent"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(dit, "load_codec", lambda *_: pytest.fail("data"))
    with pytest.raises(SystemExit) as ended:
        dit.main()
    assert ended.value.code == 2
    assert "distill needs --resume" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def codec() -> latents.Codec:
    torch.manual_seed(0)
    statistics = [
        {"latents_mean": [0.0] * n, "latents_std": [1.0] * n}
        for n in (VIDEO_VAE["latent_channels"], AUDIO_VAE["latent_channels"])
    ]
    return latents.Codec(
        AutoencoderKLMiniMaxH3(**{**VIDEO_VAE, **statistics[0]}),
        AutoencoderKLMiniMaxH3Audio(**{**AUDIO_VAE, **statistics[1]}),
    )


def test_kept_latents_are_of_one_codec_and_one_world(codec, tmp_path, monkeypatch):
    """The command's own file name, in the same folder, after each change that makes other latents."""

    class Asked(Exception):
        """The file that the command would load."""

    def ask(path, *_):
        raise Asked(path)

    argv = ["train", "--seconds", "1", "--codec", "absent", "--keep-latents", str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "argv", ["dit", *argv, "--out", str(tmp_path / "out")])
    monkeypatch.setattr(dit, "load_codec", lambda *_: codec)
    monkeypatch.setattr(dit, "keep_latents", ask)

    def kept() -> Path:
        with pytest.raises(Asked) as asked:
            dit.main()
        return asked.value.args[0]

    files = [kept()]
    assert kept() == files[0] and files[0].name.startswith("whole_30000000_32000_")
    with torch.no_grad():
        next(codec.audio_vae.parameters()).view(-1)[0] += 1
    files.append(kept())
    codec.vae.register_to_config(latents_std=[2.0] * len(codec.vae.config.latents_std))
    files.append(kept())
    shutil.copytree(Path(dit.__file__).parents[1] / "evals/world", tmp_path / "world")
    monkeypatch.setattr(latents, "WORLD", tmp_path / "world", raising=False)
    assert kept() == files[-1]
    with (tmp_path / "world" / "spec.py").open("a") as source:
        source.write("# another world\n")
    files.append(kept())
    assert len(set(files)) == 4
