"""What `doctor` reads off a machine, as plain values: a broken set-up can be put before it anywhere."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

from videoaccel.cli.torch_build import TorchBuild, torch_build

DISPLAYS, COMPUTE = ("0x0300",), ("0x0302", "0x0380", "0x0b40", "0x1200")
"""PCI classes: VGA controllers; 3D and other display controllers, co-processors, processing accelerators."""
MAKERS = {
    "0x10de": ("NVIDIA", (*DISPLAYS, *COMPUTE)),
    # As a VGA controller it is the picture of a desktop or of the processor.
    "0x1002": ("AMD", COMPUTE),
    "0x19e5": ("Huawei", COMPUTE),
    "0x1d94": ("Hygon", COMPUTE),
}
"""PCI vendor of accelerators to its name and the classes they have."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything the checks look at.

    Attributes:
        torch: see there.
        packages: canonical names to versions.
        requires: the requirements of this package, as in `torch>=2.11`.
        root: of the file system that holds /proc, /sys and /dev.
        environ: variables.
        cores: that this process may use.
        checkpoints: where the hub's checkpoints go.
        free_gb: on its disk, decimal GB; None where it can't be asked.
        shm_gb: size of /dev/shm, decimal GB; None where it can't be asked.
        lspci: what `lspci -vv` prints; None where it wasn't run or isn't there.
    """

    torch: TorchBuild
    packages: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    checkpoints: Path = Path("/")
    free_gb: float | None = None
    shm_gb: float | None = None
    lspci: str | None = None

    def read(self, path: str | Path) -> str | None:
        """A small file under the root, stripped; None where it isn't there or may not be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def listed(self, path: str | Path) -> tuple[str, ...]:
        """The names in a folder under the root, sorted; none where it isn't there or may not be read."""
        try:
            return tuple(sorted(entry.name for entry in (self.root / path).iterdir()))
        except OSError:
            return ()

    def on_bus(self) -> dict[str, str]:
        """PCI address to maker, of every accelerator that the bus shows, whatever torch says."""
        found = {}
        for place in self.listed("sys/bus/pci/devices"):
            maker, classes = MAKERS.get(self.of_card(place, "vendor") or "", ("", ()))
            if maker and (self.of_card(place, "class") or "").startswith(classes):
                found[place] = maker
        return found

    def accelerators(self) -> tuple[str, ...]:
        """PCI addresses of the accelerators to look at: those that torch sees, else all on the bus."""
        seen = [card.bus for card in self.torch.cards if card.bus is not None]
        return tuple(seen) or tuple(self.on_bus())

    def of_card(self, place: str, name: str) -> str | None:
        """What the bus says of a card, by the name of the file."""
        return self.read(f"sys/bus/pci/devices/{place}/{name}")

    @property
    def count(self) -> int:
        """Accelerators to look at."""
        return max(len(self.torch.cards), len(self.accelerators()))


def this_machine() -> Machine:
    """The machine that runs this. Nothing is written, and nothing needs more rights than it has."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from videoaccel.kernels.registry import installed_packages

    folder = Path(HF_HUB_CACHE)
    found = Machine(
        torch=torch_build(),
        packages=installed_packages(),
        requires=requirements("videoaccel"),
        environ=dict(os.environ),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        checkpoints=folder,
        free_gb=_free_gb(folder),
        shm_gb=_size_gb(Path("/dev/shm")),
    )
    # With one card there is nothing to ask it, and it takes a second.
    return found if found.count < 2 else dataclasses.replace(found, lspci=_lspci())


def requirements(package: str) -> tuple[str, ...]:
    """What an installed package requires on this platform, without its extras; nothing where it isn't one."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    wanted = [Requirement(line) for line in lines]
    here = [part for part in wanted if part.marker is None or part.marker.evaluate({"extra": ""})]
    return tuple(f"{part.name}{part.specifier}" for part in here)


def _free_gb(folder: Path) -> float | None:
    """Of the disk that the folder is on, or will be."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free / 1e9
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _size_gb(folder: Path) -> float | None:
    try:
        return shutil.disk_usage(folder).total / 1e9
    except OSError:
        return None


def _lspci() -> str | None:
    try:
        return subprocess.run(["lspci", "-vv"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
