"""The errors this package raises on purpose, and the "did you mean" that most of them want."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the caller can fix. The message is one line and names the fix.

    The command line prints it without a traceback and exits with `exit_code`; a server answers 400.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        # A quoted value may carry newlines (a prompt, a path): the promise is one line.
        super().__init__(" ".join(message.split()))


class RequestError(RuntimeError):
    """A request that cannot go on through no fault of its input, such as a non-finite latent."""


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known name that `key` most likely meant, or None where nothing is near.

    Case and the choice between `-` and `_` don't count as differences.
    """
    folded = {name.lower().replace("-", "_"): name for name in known}
    hits = difflib.get_close_matches(key.lower().replace("-", "_"), folded, n=1, cutoff=0.5)
    return folded[hits[0]] if hits else None


def unknown(what: str, key: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a closed set: names the nearest one, and all of them.

    Args:
        what: what the name is, as in "tier" or "key of config section 'cache'".
        key: the name as given.
        known: every name that would have been accepted.
    """
    names = list(known)
    near = nearest(str(key), names)
    hint = f"did you mean {near!r}? " if near else ""
    choices = f"known: {', '.join(names)}" if names else "none is known"
    return UserError(f"unknown {what} {str(key)!r}: {hint}{choices}")
