"""What a command that is stopped had written, and the receipt of a request that made no clip."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from videoaccel.errors import UserError
from videoaccel.receipt import receipt_of


@contextmanager
def stops_name(outputs: Mapping[str, str | os.PathLike[str] | None]) -> Iterator[None]:
    """Notes on a Ctrl-C which of the outputs were written, for `main` to say.

    The files themselves are asked: the signal may come between one's renaming and the next line of code.

    Args:
        outputs: what a file is, as in "clip", to its path; None where it wasn't asked for.
    """
    given = {what: path for what, path in outputs.items() if path is not None}
    before = {what: identity(path) for what, path in given.items()}
    try:
        yield
    except KeyboardInterrupt as stop:
        for what, path in given.items():
            if identity(path) != before[what]:
                stop.add_note(f"the {what} is written: {os.fspath(path)}")
        raise


def identity(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """What tells a file from another one of its name; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


@contextmanager
def failures_recorded(path: str | None) -> Iterator[None]:
    """Writes the receipt of a request that failed or was stopped: how far it came, and why it ended.

    One that can't be written is said on stderr: the error that ended the request is the one to raise.
    """
    try:
        yield
    except BaseException as error:
        receipt = receipt_of(error)
        if path is not None and receipt is not None:
            try:
                receipt.save(path)
            except UserError as fault:
                print(f"note: {fault} (the receipt of the request that failed)", file=sys.stderr)
        raise
