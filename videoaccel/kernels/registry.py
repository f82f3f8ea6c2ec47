"""Which implementation an op gets on a device, why, and why each better one did not.

An op declares its implementations, best first, the eager one last; an implementation declares what it needs.
Nothing here runs or imports a kernel, so selection is the same with the card in the machine and without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from videoaccel.errors import UserError, unknown
from videoaccel.kernels.profile import DeviceProfile, Vendor
from videoaccel.receipt import KernelChoice, Rejected

EAGER = "eager"
"""The implementation that every op has, last: the maths in torch's own ops, which runs anywhere."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an implementation needs. Empty fields ask for nothing.

    The first four are the device's; one that lacks them is no fallback, as nothing there could do better.

    Attributes:
        vendors: makers of devices it runs on.
        archs: compile targets it is written for, exactly.
        capability: least compute capability, of devices that have one.
        shared_memory: bytes for one block.
        dtypes: of what the op is given.
        choices: sizes that must be one of a few (`head_dim`), by name.
        multiples: sizes that must be a multiple, by name.
        at_most: largest sizes, by name.
        packages: requirements, as in `triton>=3.6`; `a>=1 | b>=1` is met by either.
    """

    vendors: tuple[Vendor, ...] = ()
    archs: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    shared_memory: int = 0
    dtypes: tuple[torch.dtype, ...] = ()
    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)
    at_most: Mapping[str, int] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    def missing_on(self, device: DeviceProfile) -> str | None:
        """What `device` lacks, in words; None where it has all of it."""
        if self.vendors and device.vendor not in self.vendors:
            return f"runs on {' and '.join(self.vendors)}, not on {device.vendor}"
        if self.archs and device.arch not in self.archs:
            return f"is written for {', '.join(self.archs)}, not for {device.arch}"
        if self.capability is not None and (device.capability or self.capability) < self.capability:
            wanted = "{}.{}".format(*self.capability)
            return f"needs compute capability {wanted}, not {device.arch}"
        if self.shared_memory and self.shared_memory > (device.shared_memory or 0):
            have = (device.shared_memory or 0) // 1024
            return f"needs {-(-self.shared_memory // 1024)} KB of shared memory a block, not {have} KB"
        return None

    def missing_in(
        self, sizes: Mapping[str, int], dtype: torch.dtype, packages: Mapping[str, str]
    ) -> str | None:
        """What this call or this environment lacks, in words; None where it has all of it.

        Raises:
            ValueError: a size that it asks about was not given.
        """
        if self.dtypes and dtype not in self.dtypes:
            takes = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            return f"takes {takes}, not {str(dtype).removeprefix('torch.')}"
        for name in {**self.choices, **self.multiples, **self.at_most}:
            if name not in sizes:
                raise ValueError(f"selection needs the size {name!r}; given: {', '.join(sizes) or 'none'}")
        for name, known in self.choices.items():
            if sizes[name] not in known:
                return f"takes {name} {', '.join(map(str, known))}, not {sizes[name]}"
        for name, unit in self.multiples.items():
            if sizes[name] % unit:
                return f"needs {name} to be a multiple of {unit}, not {sizes[name]}"
        for name, most in self.at_most.items():
            if sizes[name] > most:
                return f"takes {name} up to {most}, not {sizes[name]}"
        return self.missing_package(packages)

    def missing_package(self, packages: Mapping[str, str]) -> str | None:
        """The first requirement that `packages` (canonical name to version) doesn't meet, and the fix."""
        for text in self.packages:
            wanted = [Requirement(part.strip()) for part in text.split("|")]
            names = {part: canonicalize_name(part.name) for part in wanted}
            found = [(part, packages[name]) for part, name in names.items() if name in packages]
            if not found:
                return f"needs {wanted[0]}, which is not installed: pip install '{wanted[0]}'"
            if not any(part.specifier.contains(version, prereleases=True) for part, version in found):
                part, version = found[0]
                return f"needs {part}, not {version}: pip install '{part}'"
        return None


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run an op.

    Attributes:
        name: unique within its op.
        where: "package.module:attribute" of the function, imported when it is first needed.
        needs: what it needs.
        note: what sets it apart, for tables.
    """

    name: str
    where: str
    needs: Needs = Needs()
    note: str = ""

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        module, _, attribute = self.where.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return function


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op and its implementations.

    Attributes:
        name: unique.
        what: what it computes, in one line.
        implementations: best first; the last one is `eager` and needs nothing.
    """

    name: str
    what: str
    implementations: tuple[Implementation, ...]

    def __post_init__(self) -> None:
        names = [impl.name for impl in self.implementations]
        last = self.implementations[-1] if names else None
        if last is None or last.name != EAGER or last.needs != Needs() or len(set(names)) != len(names):
            raise ValueError(f"op {self.name} needs distinct implementations, at the end a free {EAGER}")

    def named(self, name: str) -> Implementation:
        """The implementation of that name. Raises `UserError` where there is none."""
        for impl in self.implementations:
            if impl.name == name:
                return impl
        raise unknown(f"implementation of {self.name}", name, [impl.name for impl in self.implementations])


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What an op gets on a device.

    Attributes:
        op: the op's name.
        impl: the implementation.
        why: in words.
        rejected: every better implementation, with the reason it was turned down.
        fallback: what this device could run and does not get, with the fix; None where it gets its best.
        pinned: the config asked for it.
    """

    op: str
    impl: Implementation
    why: str
    rejected: tuple[Rejected, ...] = ()
    fallback: str | None = None
    pinned: bool = False

    def record(self) -> KernelChoice:
        """As a receipt keeps it."""
        return KernelChoice(op=self.op, impl=self.impl.name, why=self.why, rejected=self.rejected)


def installed_packages() -> dict[str, str]:
    """Names and versions of what is installed, names as indexes compare them (`flash-attn-3`)."""
    return {
        canonicalize_name(dist.metadata["Name"]): dist.version
        for dist in importlib.metadata.distributions()
        if dist.metadata["Name"]
    }


def select(
    op: Op,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: DeviceProfile,
    *,
    pinned: str | None = None,
    packages: Mapping[str, str] | None = None,
) -> Choice:
    """The best implementation of `op` that `device`, these sizes and this environment allow.

    Args:
        op: what is to be run.
        sizes: what the implementations ask about, by name: `width`, `head_dim`, `rows`, ...
        dtype: of what the op is given.
        device: where; need not be in the machine.
        pinned: the one implementation to take, whatever is better.
        packages: canonical names to versions; default: what is installed.

    Raises:
        UserError: `pinned` is unknown, can't run here or must not: a pinned one is never replaced by another.
        ValueError: a size is missing.
    """
    have = installed_packages() if packages is None else packages
    allowed = device.explicit.get(op.name)

    def missing(impl: Implementation) -> str | None:
        if allowed is not None and impl.name not in allowed:
            return f"is not named for {device.name}, which takes {', '.join(allowed)}"
        return impl.needs.missing_on(device) or impl.needs.missing_in(sizes, dtype, have)

    if pinned is not None:
        impl = op.named(pinned)
        lacks = missing(impl)
        if op.name in device.off and impl.name != EAGER:
            lacks = f"is off on {device.name}: {device.off[op.name]}"
        if lacks is not None:
            raise UserError(f"{op.name} is pinned to {pinned}, which {lacks}; pin another or none")
        return Choice(op=op.name, impl=impl, why="pinned by the config", pinned=True)
    if op.name in device.off:
        impl = op.named(EAGER)
        why = f"off on {device.name}: {device.off[op.name]}"
        rejected = tuple(Rejected(impl=other.name, why=why) for other in op.implementations[:-1])
        return Choice(op=op.name, impl=impl, why=why, rejected=rejected)
    turned_down: list[Rejected] = []
    fallback: str | None = None
    for impl in op.implementations:
        lacks = missing(impl)
        if lacks is None:
            why = "the best for this device" if fallback is None else "the best of what is left"
            return Choice(op=op.name, impl=impl, why=why, rejected=tuple(turned_down), fallback=fallback)
        named = allowed is None or impl.name in allowed
        if fallback is None and named and impl.needs.missing_on(device) is None:
            fallback = f"{op.name}: {impl.name} would run on {device.name}, but {lacks}"
        turned_down.append(Rejected(impl=impl.name, why=lacks))
    reasons = "; ".join(f"{r.impl} {r.why}" for r in turned_down)
    raise UserError(f"no implementation of {op.name} is left on {device.name}: {reasons}")
