"""Profiles by name, from the catalogue, and of the device at hand, as its driver describes it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

from videoaccel.errors import UserError, unknown
from videoaccel.kernels.catalogue import CATALOGUE, DRIVER_NAMES
from videoaccel.kernels.profile import DeviceProfile, Vendor

_MAKERS = re.compile(r"\b(nvidia|geforce|amd|instinct|huawei|hygon)\b")


def _key(name: str) -> str:
    """A name without case, spacing, punctuation and maker."""
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub(" ", name.lower().replace("_", " ")))


_BY_KEY = {
    **{_key(driver): CATALOGUE[entry] for driver, entry in DRIVER_NAMES.items()},
    **{_key(name): device for name, device in CATALOGUE.items()},
}


def device_named(name: str) -> DeviceProfile:
    """The catalogue's device of that name; case, spacing and the maker's name don't count.

    Raises:
        UserError: it has no such device.
    """
    device = _BY_KEY.get(_key(name))
    if device is None:
        raise unknown("device", name, CATALOGUE)
    return device


def cpu_profile(*, name: str = "CPU", memory_gb: float = 0.0) -> DeviceProfile:
    """A machine without an accelerator. No peaks: nothing here is planned for a CPU.

    Args:
        name: the processor's, in words.
        memory_gb: of the host, decimal GB; 0 where it isn't known.
    """
    return DeviceProfile(
        name=name, vendor="cpu", arch="cpu", memory_gb=memory_gb, source="the machine itself"
    )


def profile_of(
    properties: Any, *, hip: bool = False, vendor: Vendor | None = None, p2p: bool | None = None
) -> DeviceProfile:
    """The profile of a card that torch describes.

    What the card says of itself (memory, capability, shared memory) is taken from it, and the rest from the
    catalogue's entry where its name is in there. A card that isn't has no peaks and no bandwidth.

    Args:
        properties: of `torch.cuda.get_device_properties`, or with the same attributes.
        hip: torch was built for ROCm.
        vendor: the maker where torch's backend says it.
        p2p: whether it was found to reach another card; None where there is no other one.
    """
    entry = CATALOGUE.get(DRIVER_NAMES.get(properties.name, ""))
    if hip:
        arch = str(properties.gcnArchName).partition(":")[0]
    elif hasattr(properties, "major"):
        arch = f"sm_{properties.major}{properties.minor}"
    else:
        arch = entry.arch if entry is not None else properties.name
    # On ROCm torch calls the limit of a block `shared_memory_per_block`.
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(
        properties, "shared_memory_per_block", 0
    )
    live = DeviceProfile(
        name=properties.name,
        vendor=vendor or ("amd" if hip else "nvidia"),
        arch=arch,
        memory_gb=round(properties.total_memory / 1e9, 2),
        shared_memory=shared or None,
        source="the driver; it is not in the catalogue",
    )
    if entry is not None:
        live = dataclasses.replace(
            entry,
            name=live.name,
            arch=live.arch,
            memory_gb=live.memory_gb,
            shared_memory=live.shared_memory or entry.shared_memory,
            source=f"the driver (memory, capability, shared memory); {entry.source}",
        )
    return live if p2p is None else dataclasses.replace(live, p2p="yes" if p2p else "no")


def live_profile(device: torch.device | str) -> DeviceProfile:
    """The profile of a device of this machine.

    Raises:
        UserError: torch has no such device here.
    """
    place = torch.device(device)
    if place.type == "cpu":
        return cpu_profile()
    try:
        module = torch.get_device_module(place)
        index = module.current_device() if place.index is None else place.index
        properties = module.get_device_properties(index)
    except (RuntimeError, AssertionError, AttributeError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it does not describe itself"
        raise UserError(
            f"torch finds no device {str(device)!r} here ({reason}); give another --device"
        ) from error
    if place.type != "cuda":
        return profile_of(properties, vendor="ascend" if place.type == "npu" else None)
    others = [other for other in range(module.device_count()) if other != index]
    reaches = any(torch.cuda.can_device_access_peer(index, other) for other in others) if others else None
    return profile_of(properties, hip=torch.version.hip is not None, p2p=reaches)
