"""What ends a command from outside: nothing half-written stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
CODE = """
import signal, sys
from videoaccel.cli import generate, main
from videoaccel.files import replacing

number = getattr(signal, sys.argv[1])
signal.signal(number, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.SIG_DFL)

def run(args):
    with replacing(args.out) as temporary:
        temporary.write_text("half")
        signal.raise_signal(number)
    return 0

generate.run = run
code = main(["generate", "x", "-o", "clip.mp4"])
assert signal.getsignal(number) in (signal.SIG_IGN, signal.SIG_DFL)
raise SystemExit(code)
"""


def test_a_reader_that_leaves_gives_no_traceback() -> None:
    """As `| head` does: the pipe's reading end is closed before anything is printed."""
    code = """
from videoaccel.cli import generate, main
generate.run = lambda args: print("{}") or 0
raise SystemExit(main(["generate", "x"]))
"""
    read, write = os.pipe()
    os.close(read)
    for buffered in ("", "1"):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": ROOT, "PYTHONUNBUFFERED": buffered},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (141, "")
    os.close(write)


@pytest.mark.parametrize(
    ("name", "before", "code", "left"),
    [
        ("SIGTERM", "default", 143, []),
        ("SIGHUP", "default", 129, []),
        ("SIGHUP", "ignored", 0, ["clip.mp4"]),  # nohup
    ],
)
def test_a_signal_while_a_file_is_written(
    name: str, before: str, code: int, left: list[str], tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE, name, before],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "" if code == 0 else "stopped; nothing was written\n"
    assert (ran.returncode, ran.stderr) == (code, said)
    assert [path.name for path in tmp_path.iterdir()] == left
