"""The evaluations as commands: a bad output or model is one line and exit code 2; a run writes its file."""

import importlib
import json

import pytest


@pytest.mark.parametrize("name", ["adherence", "reconstruction", "generate_time", "world.truth"])
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


@pytest.mark.parametrize(
    ("name", "argv", "said"),
    [
        ("adherence", "--clips 0", "whole number of 1 or more"),
        ("adherence", "--long-clips 0", "whole number of 1 or more"),
        ("adherence", "--batch 0", "whole number of 1 or more"),
        ("adherence", "--generate-time nope.json", "nope.json: No such file"),
        ("adherence", "--generate-time list.json", "no metrics.generate_s_2cores"),
        ("adherence", "--generate-time text.json", "no metrics.generate_s_2cores"),
        ("reconstruction", "--clips 0", "whole number of 1 or more"),
        ("reconstruction", "--frames 40", "17n+5 from 22 up, which the video VAE takes: give 39"),
        ("reconstruction", "--frames 5", "give 22"),
        ("h3_dense", "--dry-run --device cpu --text-rows -1", "whole number of 1 or more"),
        ("h3_dense", "--dry-run --device cpu --text-rows 0", "whole number of 1 or more"),
        ("world.truth", "--clips 0", "whole number of 1 or more"),
        ("world.truth", "--first-seed -1", "whole number of 0 or more"),
        ("world.truth", "--noise -1", "at least 0"),
        ("world.truth", "--hue nan", "take numbers"),
    ],
)
def test_bad_values_are_told_before_any_work(name, argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_bytes(b"\xff")
    module = importlib.import_module(f"evals.{name}")
    for work in ("open_run", "build_random_h3"):
        monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("work"), raising=False)
    try:
        code = module.main([*argv.split(), "--out", "x.json"])
    except SystemExit as ended:  # argparse: its usage stands above
        code = ended.code
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and "error: " in error and said in error
    assert not (tmp_path / "x.json").exists()
