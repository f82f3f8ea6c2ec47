"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from videoaccel.errors import UserError


def shown(path: str | os.PathLike[str]) -> str:
    """A path for an error message: quoted, the middle of a very long one left out."""
    text = os.fspath(path)
    return repr(text if len(text) <= 120 else f"{text[:60]}...{text[-40:]}")


def destination(path: str | os.PathLike[str]) -> Path:
    """The absolute path that writing to `path` writes: a link is followed, to a missing file as well.

    Raises:
        UserError: no name, a name that the file system refuses (too long, links in a circle), a folder, or
            something else that is no regular file (a device, a pipe), which must not be replaced by one.
    """
    if not os.fspath(path):
        raise UserError("cannot write a file without a name; give a file name")
    try:
        target = Path(os.path.realpath(path))
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {shown(path)}: {reason}; choose another file name") from error
    if stat.S_ISDIR(mode):
        raise UserError(f"cannot write {shown(path)}: it is a folder; give a file name inside it")
    if not stat.S_ISREG(mode):
        raise UserError(f"cannot write {shown(path)}: it is not a regular file; choose another file name")
    return target


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path, absolute, beside `path`; on a clean exit it takes `path`'s place in one step.

    After an exception the temporary file is gone and `path` is as it was. The temporary name keeps the
    suffix, for writers (muxers, image encoders) that choose a format by it. Where `path` is a symbolic link,
    the link stays and the file it leads to is replaced, or made where there was none.

    Raises:
        UserError: the folder is missing, is not writable, `path` is as `destination` refuses, or writing
            failed (a full disk).
    """
    target = destination(path)
    if not target.parent.is_dir():
        raise UserError(
            f"cannot write {shown(path)}: there is no folder {shown(target.parent)}; make it first"
        )
    # Absolute, since libav takes the "12:" of a relative path such as 12:30/clip.mp4 for a protocol.
    temporary = target.with_name(f".{uuid.uuid4().hex}{Path(path).suffix}")
    try:
        # Not tempfile: its files are private, and a result is for whoever the umask lets read it.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise UserError(
            f"cannot write {shown(path)}: {error.strerror or error}; choose a folder that you may write to"
        ) from error
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise UserError(
            f"cannot write {shown(path)}: {error.strerror or error}; free some space or choose another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 to `path`, whole or not at all. Raises as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
