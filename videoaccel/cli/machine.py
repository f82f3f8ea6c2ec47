"""What `doctor` reads off a machine, as plain values: a broken set-up can be put before it anywhere."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x19e5": "Huawei", "0x1d94": "Hygon"}
"""PCI vendors of accelerators."""
CLASSES = ("0x0300", "0x0302", "0x0b40", "0x1200")
"""PCI classes of accelerators: VGA and 3D controllers, co-processors, processing accelerators."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """An accelerator as torch sees it.

    Attributes:
        name: the driver's.
        bus: its PCI address (`0000:17:00.0`); None where torch doesn't say.
    """

    name: str
    bus: str | None = None


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The torch that is installed, and what it sees.

    Attributes:
        version: its own.
        cuda, hip: what it was built for; None for what it wasn't.
        cards: the accelerators, in its order.
        unreachable: pairs of cards of which the first can't read the second's memory.
        threads: that it computes with on the CPU.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    cards: tuple[Card, ...] = ()
    unreachable: tuple[tuple[int, int], ...] = ()
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything the checks look at.

    Attributes:
        torch: see there.
        packages: canonical names to versions.
        root: of the file system that holds /proc and /sys.
        environ: variables.
        cores: that this process may use.
        checkpoints: where the hub's checkpoints go.
        free_gb: on its disk, decimal GB; None where it can't be asked.
        lspci: what `lspci -vv` prints; None where it wasn't run or isn't there.
    """

    torch: TorchBuild
    packages: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    checkpoints: Path = Path("/")
    free_gb: float | None = None
    lspci: str | None = None

    def read(self, path: str | Path) -> str | None:
        """A small file under the root, stripped; None where it isn't there or may not be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def accelerators(self) -> tuple[str, ...]:
        """PCI addresses of the accelerators that the bus shows, whatever torch says."""
        return tuple(_accelerators(self))

    @property
    def count(self) -> int:
        """Accelerators, by torch or by the bus, whichever shows more."""
        return max(len(self.torch.cards), len(self.accelerators()))


def _accelerators(machine: Machine) -> Iterator[str]:
    folder = machine.root / "sys/bus/pci/devices"
    try:
        places = sorted(path.name for path in folder.iterdir())
    except OSError:
        return
    for place in places:
        vendor = machine.read(f"sys/bus/pci/devices/{place}/vendor")
        kind = machine.read(f"sys/bus/pci/devices/{place}/class") or ""
        if vendor in MAKERS and kind.startswith(CLASSES):
            yield place


def checkpoint_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Where huggingface_hub keeps what it fetches."""
    if "HF_HUB_CACHE" in environ:
        return Path(environ["HF_HUB_CACHE"])
    own = Path(environ["HF_HOME"]) if "HF_HOME" in environ else home / ".cache/huggingface"
    return own / "hub"


def this_machine() -> Machine:
    """The machine that runs this. Nothing is written, and nothing needs more rights than it has."""
    from videoaccel.kernels.registry import installed_packages

    folder = checkpoint_folder(os.environ, Path.home())
    found = Machine(
        torch=_torch_build(),
        packages=installed_packages(),
        environ=dict(os.environ),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        checkpoints=folder,
        free_gb=_free_gb(folder),
    )
    if found.count < 2:
        return found
    return dataclasses.replace(found, lspci=_lspci())


def _torch_build() -> TorchBuild:
    import torch

    cards: list[Card] = []
    unreachable: list[tuple[int, int]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
            known = [part for part in place if isinstance(part, int)]
            bus = "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else None
            cards.append(Card(name=properties.name, bus=bus))
        pairs = [(one, other) for one in range(len(cards)) for other in range(len(cards)) if one != other]
        unreachable = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    elif torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        cards = [Card(name=f"{kind}:{index}") for index in range(torch.accelerator.device_count())]
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cards=tuple(cards),
        unreachable=tuple(unreachable),
        threads=torch.get_num_threads(),
    )


def _free_gb(folder: Path) -> float | None:
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free / 1e9
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _lspci() -> str | None:
    try:
        return subprocess.run(["lspci", "-vv"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
