"""What flags mean, and the parts of the command line that need no model."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest

from videoaccel.cli import main
from videoaccel.cli.progress import ProgressReport, clock, time_left
from videoaccel.cli.values import names, resolution, seconds, whole
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
    assert whole(2)("2") == 2
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
        (["generate"], "prompt"),
        (["generate", "x", "--steps", "1"], "2 or more"),
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
