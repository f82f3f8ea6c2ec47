"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from videoaccel.errors import UserError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on a clean exit it takes `path`'s place in one step.

    After an exception the temporary file is gone and `path` is as it was. The temporary name keeps the
    suffix, for writers (muxers, image encoders) that choose a format by it.

    Raises:
        UserError: the folder is missing, is not writable, or `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise UserError(f"cannot write {str(target)!r}: it is a folder; give a file name inside it")
    if not target.parent.is_dir():
        raise UserError(
            f"cannot write {str(target)!r}: there is no folder {str(target.parent)!r}; make it first"
        )
    temporary = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        # Not tempfile: its files are private, and a result is for whoever the umask lets read it.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise UserError(
            f"cannot write {str(target)!r}: {error.strerror or error}; choose a folder that you may write to"
        ) from error
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 to `path`, whole or not at all. Raises as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
