"""Finds the hooks that a swapped forward would pass by: they move or cast what it reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from videoaccel.errors import UserError


def check_unhooked(modules: Iterable[tuple[str, torch.nn.Module]], what: str) -> None:
    """Refuses modules that a library loads, moves or casts piece by piece.

    Offloading (diffusers' by leaves, accelerate's) brings a module's weights when its own forward is called;
    read by somebody else they are on another device, or nothing at all.

    Args:
        modules: with their names, which errors name.
        what: the setting that has to go without it.

    Raises:
        UserError: one of them carries a hook, or a weight without storage.
    """
    for name, module in modules:
        registry = vars(module).get("_diffusers_hook")
        if "_hf_hook" in vars(module) or (registry is not None and registry.hooks):
            raise UserError(
                f"{name} is offloaded or hooked by itself, which {what} passes by: take the hook off, or use "
                f"tier 'exact'"
            )
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            raise UserError(f"{name} has no weights loaded: load the whole model, or use tier 'exact'")
