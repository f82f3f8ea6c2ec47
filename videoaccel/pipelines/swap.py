"""Puts another forward in the place of a module's own, under whatever hooks it carries, and takes it off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from videoaccel.errors import UserError

Forward = Callable[..., Any]

# Where libraries keep the forward that their wrapper calls: accelerate's hooks, on the module itself.
_KEPT = "_old_forward"


def swap_forward(module: torch.nn.Module, replacement: Forward, undo: ExitStack) -> None:
    """`module(...)` runs `replacement` where it ran the class's own forward.

    Hooks that wrap the forward (diffusers' offloading, accelerate's) stay outside: what they move or cast is
    moved and cast for the replacement as well. They may also come later, and go before or after it.

    Args:
        module: whose forward is replaced; on this instance alone.
        replacement: takes what `module.forward` takes.
        undo: receives the inverse.

    Raises:
        UserError: something holds the forward that this package can't reach under.
    """
    _put(module, None, replacement)
    undo.callback(_put, module, replacement, None)


def _put(module: torch.nn.Module, old: Forward | None, new: Forward | None) -> None:
    """Replaces the innermost forward; None is the class's own."""
    own = vars(module)
    own_forward = type(module).forward.__get__(module)
    wanted = own_forward if new is None else new

    def is_old(forward: Any) -> bool:
        return bool(forward == own_forward) if old is None else forward is old

    if "forward" not in own or is_old(own["forward"]):
        if new is None:
            own.pop("forward", None)
        else:
            own["forward"] = new
        return
    hooks = getattr(own.get("_diffusers_hook"), "_fn_refs", [])
    for reference in hooks:
        if is_old(reference.forward):
            reference.forward = wanted
            return
        if reference.original_forward is not None and is_old(reference.original_forward):
            raise UserError(
                f"a diffusers hook on {type(module).__name__} replaces its forward: remove that hook first"
            )
    if is_old(own.get(_KEPT)):
        own[_KEPT] = wanted
        return
    raise UserError(
        f"the forward of {type(module).__name__} is wrapped by another library: take that off first, or "
        "accelerate the pipeline before it is put on"
    )
