"""What flags mean, and the parts of the command line that need no model."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest

from videoaccel.cli import main, values
from videoaccel.cli.progress import ProgressReport, clock, time_left
from videoaccel.cli.values import names, resolution, seconds, whole
from videoaccel.pipelines import checks
from videoaccel.pipelines.request import Progress


def test_resolutions() -> None:
    assert resolution("768p") == (768, None, None)
    assert resolution("1344x768") == (None, 1344, 768)
    assert [str(resolution(text)) for text in ("128p", "96x64")] == ["128p", "96x64"]
    for text in ("768x", "x768", "768", "p", "768P ", "-768p", "7e2p", "1344×768", "", "999999p"):
        with pytest.raises(argparse.ArgumentTypeError, match="1344x768"):
            resolution(text)


def test_numbers_and_lists() -> None:
    assert seconds("5") == 5.0
    for text in ("nan", "inf", "0", "-1", "five"):
        with pytest.raises(argparse.ArgumentTypeError):
            seconds(text)
    assert whole(2)("2") == 2 and whole(0)(str(2**63 - 1)) == 2**63 - 1
    for text in ("1", "2.0", "-3", "x", "9" * 30):
        with pytest.raises(argparse.ArgumentTypeError):
            whole(2)(text)
    assert names("exact, high,exact") == ["exact", "high"]
    with pytest.raises(argparse.ArgumentTypeError):
        names(" , ")


def test_time_left_is_the_median_of_recent_steps() -> None:
    assert clock(65.4) == "1:05"
    # A slow first step (set-up) doesn't count for the other nine.
    assert time_left(10, 40, [60.0] + [2.0] * 9) == "1:00 left"
    assert time_left(0, 40, []) == "" and time_left(40, 40, [1.0]) == ""


def test_plain_progress_says_each_stage_and_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReport() as report:
        report.stage("load")
        report(Progress(stage="encode", done=0, total=1, step_s=0.0, elapsed_s=0.0))
        report(Progress(stage="encode", done=1, total=1, step_s=0.0, elapsed_s=0.0))
        for step in range(4):
            report(Progress(stage="denoise", done=step, total=3, step_s=0.5, elapsed_s=0.0))
        report.stage("mux")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["load ...", "encode ...", "denoise step 0/3", "denoise step 3/3", "mux ..."]


def test_bar_on_a_terminal_shows_step_stage_and_time_left() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with ProgressReport(stream=terminal) as report:
        report.stage("load")
        for step in range(3):
            report(Progress(stage="denoise", done=step, total=3, step_s=30.0, elapsed_s=0.0))
    shown = terminal.getvalue()
    assert "denoise" in shown and "step 2/3" in shown and "0:30 left" in shown


def test_bad_flags_never_import_torch() -> None:
    """A wrong flag answers at once: torch alone takes seconds."""
    code = (
        "import sys; from videoaccel.cli import main; "
        "codes = [main(['generate', 'x', '--res', '768x']), main(['generate', 'x', '--tier', 'hihg'])]; "
        "print(codes, 'torch' in sys.modules, 'diffusers' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[2, 2] False False"


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        ([], "COMMAND"),
        (["generat"], "generate"),
        (["generat", "x"], "did you mean generate?"),
        (["generate", "x", "--model", ""], "empty"),
        (["generate", "x", "-o", ""], "empty"),
        (["generate", "x", "--receipt", " "], "empty"),
        (["generate", "x", "--seed", str(2**63)], str(2**63 - 1)),
        (["generate", "x", "--res", "9999x9999"], "smaller canvas"),
        (["generate", "x", "--res", "1600x64"], "4:1"),
        (["generate"], "prompt"),
        (["generate", "x", "--steps", "0"], "1 or more"),
        (["generate", "x", "--tire", "exact"], "did you mean --tier?"),
        (["bench", "--tier", "exact"], "did you mean --tiers?"),
        (["bench", "--requests", "0"], "1 or more"),
        (["bench", "--tiers", "exact,hihg"], "'high'"),
        (["bench", "--res", "768x"], "1344x768"),
        (["bench", "--weights", "rnadom"], "random"),
    ],
)
def test_bad_flags_are_one_line(argv: list[str], fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert fix in captured.err


def test_help_says_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for command in ("generate", "bench"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown[command] = " ".join(capsys.readouterr().out.split())
        for words in ("default: the model's own", "default: 0", "default: tiny-h3"):
            assert words in shown[command]
    assert "--reference" in shown["generate"] and "--reference" not in shown["bench"]


def test_openmp_threads_sleep_unless_told_otherwise() -> None:
    """Set before torch loads, and a choice of the user's own stands."""
    import os

    code = (
        "import os, sys; from videoaccel.cli import main; main(['generate', 'x', '--res', '768x']); "
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    bare = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, wanted in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        answer = subprocess.run(
            [sys.executable, "-c", code], env=bare | given, capture_output=True, text=True, check=True
        )
        assert answer.stdout.split() == [wanted, "False"]


def test_what_is_known_without_torch_is_what_the_checks_say() -> None:
    """Limits that stand a second time, so that a bad flag is refused before torch is imported."""
    assert values.MAX_ASPECT == checks.MAX_ASPECT
    assert checks.check_seed(values.MAX_WHOLE) == values.MAX_WHOLE
