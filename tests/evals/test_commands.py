"""The evaluations as commands: a bad output or model is one line and exit code 2; a run writes its file."""

import importlib
import json

import pytest


@pytest.mark.parametrize("name", ["adherence", "reconstruction", "generate_time"])
def test_an_unwritable_result_is_refused_before_any_work(name, tmp_path, capsys):
    main = importlib.import_module(f"evals.{name}").main
    assert main(["--out", str(tmp_path / "missing" / "x.json")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1


@pytest.mark.parametrize("name", ["adherence", "reconstruction"])
def test_an_unknown_model_is_refused(name, tmp_path, capsys):
    main = importlib.import_module(f"evals.{name}").main
    assert main(["--model", "nope", "--out", str(tmp_path / "x.json")]) == 2
    assert "nope" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_child_that_fails_and_no_runs_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    from evals import generate_time

    argv = ["--out", str(tmp_path / "x.json")]
    with pytest.raises(SystemExit) as ended:
        generate_time.main([*argv, "--runs", "0"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "whole number of 1 or more" in said
    monkeypatch.setattr(generate_time, "PROMPT", " ")  # which generate refuses
    assert generate_time.main([*argv, "--runs", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: videoaccel generate ended with code 2 (the prompt is empty")
    assert not list(tmp_path.iterdir())


def test_reconstruction_writes_what_it_measured(tmp_path):
    from evals.reconstruction import main

    out = tmp_path / "r.json"
    assert main(["--clips", "1", "--frames", "22", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["metrics"]["n"] == len(result["rows"]) == 1
    assert result["metrics"]["psnr_db"] == pytest.approx(result["rows"][0]["psnr_db"])
