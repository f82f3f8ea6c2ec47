"""What command-line values mean: resolutions, counts, lists. No torch here, so bad values fail fast."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import NamedTuple

MAX_SIDE = 4096
"""Longest side of a canvas that is asked for, px; no model here was trained on half of it."""
MAX_ASPECT = 4
"""As in pipelines.checks, which imports torch and says it of pictures."""
MAX_WHOLE = 2**63 - 1
"""The largest seed that torch takes."""


class Resolution(NamedTuple):
    """Either a short edge (`768p`), whose width follows from the model's aspect ratio, or a whole canvas."""

    short_edge: int | None
    width: int | None
    height: int | None

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" if self.short_edge is None else f"{self.short_edge}p"


def resolution(text: str) -> Resolution:
    """`768p`, or `1344x768` (width x height)."""
    if match := re.fullmatch(r"(\d{1,5})p", text):
        return Resolution(int(match[1]), None, None)
    if match := re.fullmatch(r"(\d{1,5})x(\d{1,5})", text):
        width, height = int(match[1]), int(match[2])
        if max(width, height) > MAX_SIDE:
            raise argparse.ArgumentTypeError(f"{text} is over {MAX_SIDE} px a side: give a smaller canvas")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise argparse.ArgumentTypeError(
                f"{text} is too narrow: give a canvas between 1:{MAX_ASPECT} and {MAX_ASPECT}:1"
            )
        return Resolution(None, width, height)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a resolution: give 768p, or width x height as in 1344x768"
    )


def seconds(text: str) -> float:
    """A length in seconds, finite and above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a length in seconds: give a number such as 5")
    return value


def whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` up."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,19}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        if int(text) > MAX_WHOLE:
            raise argparse.ArgumentTypeError(f"{text} is too large: give {MAX_WHOLE} at most")
        return int(text)

    return parse


def filled(text: str) -> str:
    """A value that must not be empty, such as a file name."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty: give one, or leave the flag out")
    return text


def names(text: str) -> list[str]:
    """A comma-separated list, in order, each name once."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("the list is empty: give a name, or several with commas between")
    return found
