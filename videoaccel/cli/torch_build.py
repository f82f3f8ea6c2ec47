"""The torch that is installed and the accelerators it sees, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Card:
    """An accelerator as torch sees it.

    Attributes:
        name: the driver's.
        arch: compile target (`sm_120`); None where torch doesn't say.
        bus: its PCI address (`0000:17:00.0`); None where torch doesn't say.
    """

    name: str
    arch: str | None = None
    bus: str | None = None


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The torch that is installed, and what it sees.

    Attributes:
        version: its own.
        cuda, hip: what it was built for; None for what it wasn't.
        archs: what its own kernels are compiled for (`sm_90`, `compute_120`).
        cards: the accelerators, in its order.
        unreachable: pairs of cards of which the first can't read the second's memory.
        threads: that it computes with on the CPU.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    archs: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    unreachable: tuple[tuple[int, int], ...] = ()
    threads: int = 1


def torch_build() -> TorchBuild:
    """What this process's torch says of itself."""
    import torch

    cards: list[Card] = []
    unreachable: list[tuple[int, int]] = []
    archs: list[str] = []
    if torch.cuda.is_available():
        cards = [_cuda_card(index) for index in range(torch.cuda.device_count())]
        pairs = [(one, other) for one in range(len(cards)) for other in range(len(cards)) if one != other]
        unreachable = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        archs = torch.cuda.get_arch_list()
    elif torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        cards = [Card(name=f"{kind}:{index}") for index in range(torch.accelerator.device_count())]
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        archs=tuple(archs),
        cards=tuple(cards),
        unreachable=tuple(unreachable),
        threads=torch.get_num_threads(),
    )


def _cuda_card(index: int) -> Card:
    import torch

    properties = torch.cuda.get_device_properties(index)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in place if isinstance(part, int)]
    return Card(
        name=properties.name,
        arch=None if torch.version.hip else f"sm_{properties.major}{properties.minor}",
        bus="{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else None,
    )
