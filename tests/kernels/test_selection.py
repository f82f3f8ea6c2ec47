"""What every op gets on every device of the catalogue, as a file that a reviewer reads.

`RENEW_SNAPSHOTS=1 python -m pytest tests/kernels/test_selection.py` writes selection.txt anew; read its diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from videoaccel.errors import UserError
from videoaccel.kernels.catalogue import CATALOGUE
from videoaccel.kernels.devices import cpu_profile
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.profile import DeviceProfile
from videoaccel.kernels.registry import Choice, select

SNAPSHOT = Path(__file__).with_name("selection.txt")
PACKAGES = {"torch": "2.11.0", "triton": "3.6.0", "pytorch-triton-rocm": "3.6.0"}
SIZES = {
    "rows": 37_966,
    "key_rows": 37_966,
    "heads": 56,
    "head_dim": 128,
    "width": 5376,
    "in_features": 5376,
    "out_features": 7168,
    "rotary_dim": 96,
}
"""Of MiniMax-H3 at 5 s; an op that asks about another size adds it here."""


def choices() -> list[tuple[DeviceProfile, str, Choice | UserError]]:
    found: list[tuple[DeviceProfile, str, Choice | UserError]] = []
    for device in (*CATALOGUE.values(), cpu_profile()):
        for name, op in OPS.items():
            try:
                found.append((device, name, select(op, SIZES, torch.bfloat16, device, packages=PACKAGES)))
            except UserError as error:
                found.append((device, name, error))
    return found


def written(found: list[tuple[DeviceProfile, str, Choice | UserError]]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in PACKAGES.items())
    lines = [f"bfloat16, the sizes of MiniMax-H3 at 5 s, {packages}"]
    last = ""
    for device, name, choice in found:
        if device.name != last:
            lines += ["", f"{device.name} ({device.arch})"]
            last = device.name
        if isinstance(choice, UserError):
            lines.append(f"  {name}: none: {choice}")
            continue
        lines.append(f"  {name}: {choice.impl.name}, {choice.why}")
        lines += [f"      not {rejected.impl}: {rejected.why}" for rejected in choice.rejected]
    return "\n".join(lines) + "\n"


def test_selection_for_every_device_is_as_reviewed() -> None:
    text = written(choices())
    if os.environ.get("RENEW_SNAPSHOTS") == "1":
        SNAPSHOT.write_text(text, encoding="utf-8")
    assert text == SNAPSHOT.read_text(encoding="utf-8"), "renew selection.txt as this file's docstring says"


def test_nothing_selected_needs_more_shared_memory_than_its_device_has() -> None:
    """A config over the card's limit is otherwise found in production: Triton compiles it without a word."""
    for device, name, choice in choices():
        assert isinstance(choice, Choice), f"{name} on {device.name}: {choice}"
        assert choice.impl.needs.shared_memory <= (device.shared_memory or 0), f"{name} on {device.name}"


def test_with_everything_installed_no_device_falls_back() -> None:
    assert [c.fallback for _, _, c in choices() if isinstance(c, Choice) and c.fallback] == []
