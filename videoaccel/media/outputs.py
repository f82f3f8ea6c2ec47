"""Output files: whether one could be written, and JSON that is refused rather than half right."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from videoaccel.errors import UserError
from videoaccel.files import destination, shown, write_text


def check_writable(path: str | os.PathLike[str], *, suffix: str | None = None) -> Path:
    """Refuses an output path that could not be written, before any work is done for it.

    Args:
        path: the file that is to be written; an existing file is fine (it will be replaced). A symbolic link
            stands for the file it leads to.
        suffix: the ending the name must have, such as ``".mp4"``, or None for any.

    Returns:
        The path.

    Raises:
        UserError: the name ends otherwise, is too long, names a folder or a device, or its folder is missing
            or cannot be written to.
    """
    given = Path(path)
    target = destination(path)
    if suffix is not None and given.suffix.lower() != suffix:
        raise UserError(f"cannot write {shown(path)}: the name must end in {suffix}")
    folder = target.parent
    if not folder.is_dir():
        # The folder as it was given, unless a link leads to another one.
        folder = given.parent if not given.is_symlink() else folder
        raise UserError(f"cannot write {shown(path)}: make its folder first (mkdir -p {folder})")
    try:
        # Asking for permission bits is not enough: root passes them on a read-only mount.
        descriptor, probe = tempfile.mkstemp(dir=folder, prefix=".probe-")
    except OSError as error:
        raise UserError(
            f"cannot write {shown(path)}: {error.strerror or error}; choose a folder you can write to"
        ) from error
    os.close(descriptor)
    os.unlink(probe)
    return given


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all.

    Raises:
        ValueError: `value` holds a NaN or an infinity, which JSON cannot carry.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
