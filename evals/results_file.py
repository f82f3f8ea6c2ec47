"""Writes a result file: what was measured, by which command, at which commit, on what."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from videoaccel.environment import command_line, commit, versions
from videoaccel.media import write_json

FLAT = (int, float, str, bool, type(None))


def finite(value: Any, where: str) -> Any:
    """`value` as plain JSON types, numpy and torch scalars unwrapped.

    Raises:
        ValueError: a NaN or an infinity anywhere in it, or a type that JSON has no word for.
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: a result must be finite (leave out what was not measured)")
    if isinstance(value, Mapping):
        return {str(key): finite(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, FLAT):
        raise ValueError(f"{where} is a {type(value).__name__}, which a result file can't hold")
    return value


def write_result(
    name: str,
    *,
    device: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]] = (),
    command: str | None = None,
) -> dict[str, Any]:
    """Writes one result file, whole or not at all, and returns what it holds.

    Args:
        name: what was measured; the file's stem.
        device: what it ran on, in words (`videoaccel.environment.device_name`).
        config: every setting that shapes the result.
        metrics: flat; the keys that a claim cites.
        path: where to write.
        rows: one mapping a measurement, where there are several.
        command: how to make the file again; read off the running process by default.

    Raises:
        ValueError: a NaN or an infinity anywhere, or a metric that is not flat.
        UserError: the path cannot be written.
    """
    for key, value in metrics.items():
        if isinstance(value, Mapping | list | tuple):
            raise ValueError(f"metric {key} must be one value; put the rest under rows")
    result = {
        "name": name,
        "command": command or command_line(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": versions(),
        "config": finite(config, "config"),
        "metrics": finite(metrics, "metrics"),
        "rows": finite(rows, "rows"),
    }
    write_json(path, result)
    return result
