"""What one set-up check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at.
        state: `unknown` is what could not be read.
        says: one line.
        fix: what to do; empty where there is nothing.
    """

    check: str
    state: State
    says: str
    fix: str = ""
