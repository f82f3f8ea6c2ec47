"""The `videoaccel` command: one file a subcommand, torch imported only by those that run a model."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from videoaccel.errors import RequestError, UserError, nearest
from videoaccel.files import shown

COMMANDS = {
    "generate": "make one clip from a prompt",
    "bench": "measure clips an hour, latency and memory",
    "doctor": "say which kernel each op gets on a device, why, and what is amiss in the set-up",
}
"""Subcommand to its one-line help; each is a module here of that name, with `add_arguments` and `run`."""


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors that name the nearest known flag."""

    def __init__(self, **kwargs: Any) -> None:
        # An abbreviation that works today names another flag tomorrow.
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = None if action.choices is None else [str(choice) for choice in action.choices]
        near = nearest(str(value), choices) if choices is not None and value not in choices else None
        if near is not None and choices is not None:
            what = f"did you mean {near}? known: {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"unknown {value!r}: {what}")
        super()._check_value(action, value)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        parsed, rest = super().parse_known_args(args, namespace)
        flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if flag is not None:
            near = nearest(flag, [name for name in self._option_string_actions if name.startswith("--")])
            hint = f"did you mean {near}? " if near else ""
            raise UserError(f"unknown flag {flag}: {hint}see {self.prog} --help")
        return parsed, rest


USERS_TO_FIX = {errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of the system that come from a path or a disk, wherever they were met; others are faults of ours."""


def prepare_process() -> None:
    """What must be so before torch is imported and before anything is printed."""
    # OpenMP's threads spin while they wait for the next operation, and take the cores from each other as soon
    # as anything else runs: asleep instead, a clip on a busy CPU takes half to two thirds of the time. The
    # clip is the same, byte for byte. The runtime reads this once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        # A file name that the terminal's encoding lacks must not fail a command whose clip is written.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Stopped(KeyboardInterrupt):
    """A signal that ends the command as Ctrl-C does: with what was begun cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP, which would leave a half-written file behind, into `Stopped`."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped(number)

    # One that is ignored stays so (nohup), and Python takes signals on the main thread alone.
    main_thread = threading.current_thread() is threading.main_thread()
    signals = [signal.SIGTERM, signal.SIGHUP] if main_thread else []
    taken = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def build_parser() -> Parser:
    """The whole command line."""
    from videoaccel import __version__

    parser = Parser(
        prog="videoaccel", description="Serve video diffusion faster, at a stated and checked loss."
    )
    parser.add_argument("--version", action="version", version=f"videoaccel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"videoaccel.cli.{name}")
        sub = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0; 2 for what the user can fix, 1 for a request that failed on its own, 128 plus its number for a
        signal that ended it (130 for Ctrl-C, 141 for a reader such as `head` that left before the end).
    """
    prepare_process()
    try:
        try:
            return served(argv)
        finally:
            # Here and not as the interpreter ends, where a reader that left would give a traceback.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        drop_unread()
        return 128 + signal.SIGPIPE


def drop_unread() -> None:
    """Sends to nowhere what a stream still holds for a reader that left, so that ending can flush it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def served(argv: Sequence[str] | None) -> int:
    """`main`, its output perhaps not read to the end."""
    try:
        with ended_by_signals():
            args = build_parser().parse_args(argv)
            code: int = args.run(args)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in USERS_TO_FIX:
            raise
        where = f"{shown(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
        print(f"error: {where}{error.strerror}; choose another file or folder", file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt as stop:
        written = getattr(stop, "__notes__", ["nothing was written"])
        print(f"stopped; {'; '.join(written)}", file=sys.stderr)
        return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        print(
            "error: out of device memory; use a smaller --res, fewer --seconds or another --device",
            file=sys.stderr,
        )
        return 1
