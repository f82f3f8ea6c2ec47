"""What the evaluations' commands share: a user's error is one line and exit code 2."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.media import check_writable
from videoaccel.pipelines.loading import load

Main = Callable[[Sequence[str] | None], int]


def user_errors(main: Main) -> Main:
    """A `main` that prints a `UserError` and returns its exit code."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code

    return guarded


def open_run(model: str, out: Any) -> tuple[Any, torch.device]:
    """The pipeline in float32 and the device to run on, once the result file is known to be writable."""
    check_writable(out, suffix=".json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load(model, device="cpu", dtype=torch.float32), device
