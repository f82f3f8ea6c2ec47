"""What one set-up check found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "unknown", "optional"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at.
        state: `warn` is a fault, `unknown` what could not be read, `optional` what could be added or set.
        says: one line.
        fix: what to do, in one line; empty where there is nothing.
    """

    check: str
    state: State
    says: str
    fix: str = ""


def grouped(found: Iterable[tuple[str, Finding]]) -> Iterator[Finding]:
    """One finding for all cards that have the same one: eight equal lines hide the one that differs.

    Args:
        found: what to call a card, and what was found of it.
    """
    cards: dict[Finding, list[str]] = {}
    for card, finding in found:
        cards.setdefault(finding, []).append(card)
    for finding, names in cards.items():
        where = ", ".join(names) if len(cards) > 1 or len(names) == 1 else f"all {len(names)} cards"
        says = f"{finding.says} ({where})"
        yield Finding(check=finding.check, state=finding.state, says=says, fix=finding.fix)
