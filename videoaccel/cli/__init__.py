"""The `videoaccel` command: one file a subcommand, torch imported only by those that run a model."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from videoaccel.errors import RequestError, UserError, nearest

COMMANDS = {
    "generate": "make one clip from a prompt",
    "bench": "measure clips an hour, latency and memory",
}
"""Subcommand to its one-line help; each is a module here of that name, with `add_arguments` and `run`."""


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors that name the nearest known flag."""

    def __init__(self, **kwargs: Any) -> None:
        # An abbreviation that works today names another flag tomorrow.
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        parsed, rest = super().parse_known_args(args, namespace)
        flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if flag is not None:
            near = nearest(flag, [name for name in self._option_string_actions if name.startswith("--")])
            hint = f"did you mean {near}? " if near else ""
            raise UserError(f"unknown flag {flag}: {hint}see {self.prog} --help")
        return parsed, rest


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
        0; 2 for what the user can fix, 1 for a request that failed on its own, 130 for Ctrl-C.
    """
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        print(
            "error: out of device memory; use a smaller --res, fewer --seconds or another --device",
            file=sys.stderr,
        )
        return 1
