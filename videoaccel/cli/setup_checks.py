"""The set-up checks of `doctor`: one line each, and what to do about it. None of them changes anything."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from videoaccel.cli.backends import backend_findings
from videoaccel.cli.finding import Finding
from videoaccel.cli.machine import MAKERS, Machine
from videoaccel.kernels.ops import TRITON
from videoaccel.kernels.registry import Needs

DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""Least NVIDIA driver by CUDA's major version (CUDA Toolkit release notes, "minor version compatibility")."""


def setup_findings(machine: Machine, transformer_gb: float) -> list[Finding]:
    """Every check of a machine, in the order to read them.

    Args:
        machine: see there.
        transformer_gb: decimal GB of the model's transformer, for the disk.
    """
    return [
        torch_finding(machine),
        *driver_findings(machine),
        triton_finding(machine),
        *bus_findings(machine),
        *peer_findings(machine),
        *backend_findings(machine.packages),
        threads_finding(machine),
        disk_finding(machine, transformer_gb),
    ]


def torch_finding(machine: Machine) -> Finding:
    """Whether torch was built for the accelerator that is there, and sees it."""
    build, on_bus = machine.torch, machine.accelerators()
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "no CUDA or ROCm"
    what = f"torch {build.version} ({kind})"
    if build.cards:
        names = ", ".join(dict.fromkeys(card.name for card in build.cards))
        return Finding(check="torch", state="ok", says=f"{what} sees {len(build.cards)}: {names}")
    if not on_bus:
        return Finding(check="torch", state="ok", says=f"{what}; this machine has no accelerator")
    maker = MAKERS[machine.read(f"sys/bus/pci/devices/{on_bus[0]}/vendor") or ""]
    if build.cuda or build.hip:
        fix = "make nvidia-smi (rocm-smi) list it first: driver, container flags (--gpus all), permissions"
    else:
        fix = f"install the torch build for {maker}: https://pytorch.org/get-started/locally/"
    says = f"{what} sees none of the {len(on_bus)} accelerators ({maker}) on the bus"
    return Finding(check="torch", state="warn", says=says, fix=fix)


def driver_findings(machine: Machine) -> Iterator[Finding]:
    """The kernel driver against what torch's CUDA asks of it."""
    if not machine.count:
        return
    cuda = machine.torch.cuda
    nvidia = machine.read("proc/driver/nvidia/version")
    amd = machine.read("sys/module/amdgpu/version")
    if nvidia is None:
        if amd is not None and not cuda:
            yield Finding(check="driver", state="ok", says=f"amdgpu {amd}")
        else:
            yield Finding(
                check="driver", state="unknown", says="no driver says its version under /proc or /sys"
            )
        return
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", nvidia)
    if found is None:
        yield Finding(check="driver", state="unknown", says="/proc/driver/nvidia/version names no version")
        return
    driver, least = found[1], DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    if cuda and least and Version(driver) < Version(least):
        yield Finding(
            check="driver",
            state="warn",
            says=f"NVIDIA driver {driver} is older than CUDA {cuda} of this torch takes",
            fix=f"install driver {least} or later, or a torch for an older CUDA",
        )
        return
    yield Finding(
        check="driver",
        state="ok",
        says=f"NVIDIA driver {driver}" + (f", enough for CUDA {cuda}" if cuda else ""),
    )


def triton_finding(machine: Machine) -> Finding:
    """Whether the fused kernels have their compiler."""
    lacks = Needs(packages=TRITON).missing_package(machine.packages)
    if lacks is None:
        name = "triton" if "triton" in machine.packages else "pytorch-triton-rocm"
        return Finding(check="triton", state="ok", says=f"{name} {machine.packages[name]}")
    says, _, fix = lacks.partition(": ")
    return Finding(check="triton", state="warn", says=f"the fused kernels: {says}", fix=fix)


def bus_findings(machine: Machine) -> Iterator[Finding]:
    """Whether each accelerator has the PCIe lanes and speed that it could have."""
    for place in machine.accelerators():
        folder = f"sys/bus/pci/devices/{place}"
        names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
        width, widest, speed, fastest = (machine.read(f"{folder}/{name}") for name in names)
        check = f"pcie {place}"
        if not (width and widest and speed and fastest) or width in ("0", "63", "255"):
            yield Finding(check=check, state="unknown", says="the bus does not say how it is connected")
        elif int(width) < int(widest):
            yield Finding(
                check=check,
                state="warn",
                says=f"{width} of {widest} lanes",
                fix="move it to a slot with all lanes, or look for a riser, bifurcation or lane sharing",
            )
        elif _rate(speed) < _rate(fastest):
            # A card at rest slows its link down: this alone is no fault.
            yield Finding(
                check=check,
                state="unknown",
                says=f"{width} lanes at {_rate(speed):g} of {_rate(fastest):g} GT/s, as at rest",
                fix="run doctor again while the card is busy",
            )
        else:
            yield Finding(check=check, state="ok", says=f"{width} lanes at {_rate(speed):g} GT/s")


def _rate(speed: str) -> float:
    """GT/s of "32.0 GT/s PCIe"; 0 for words."""
    number = re.match(r"[\d.]+", speed)
    return float(number[0]) if number else 0.0


def peer_findings(machine: Machine) -> Iterator[Finding]:
    """Whether cards reach each other's memory, and what commonly stands in the way."""
    if machine.count < 2:
        return
    cards, blocked = machine.torch.cards, machine.torch.unreachable
    if len(cards) < 2:
        yield Finding(check="p2p", state="unknown", says="torch sees fewer than two cards")
    elif blocked:
        one, other = blocked[0]
        geforce = any("GeForce" in card.name for card in cards)
        fix = (
            "the driver refuses it on GeForce: plan for transfers through the host"
            if geforce
            else "turn off ACS and the IOMMU (below), or set NCCL_P2P_DISABLE=1 and plan for the host's way"
        )
        says = f"{len(blocked)} pairs can't read each other's memory, {one} and {other} first"
        yield Finding(check="p2p", state="warn", says=says, fix=fix)
    else:
        yield Finding(check="p2p", state="ok", says=f"all {len(cards)} cards read each other's memory")
    yield iommu_finding(machine)
    yield acs_finding(machine)


def iommu_finding(machine: Machine) -> Finding:
    """Whether an IOMMU translates the cards' transfers, which hangs NCCL or sends them through the host."""
    try:
        active = any((machine.root / "sys/class/iommu").iterdir())
    except FileNotFoundError:
        active = False
    except OSError:
        return Finding(check="iommu", state="unknown", says="/sys/class/iommu can't be read")
    flags = machine.read("proc/cmdline")
    if not active:
        return Finding(check="iommu", state="ok", says="off")
    groups = [
        machine.read(f"sys/bus/pci/devices/{place}/iommu_group/type") for place in machine.accelerators()
    ]
    told = [group for group in groups if group]
    if told:
        passes = all(group == "identity" for group in told)
    elif flags is None:
        return Finding(
            check="iommu", state="unknown", says="on; neither its groups nor /proc/cmdline can be read"
        )
    else:
        passes = "iommu=pt" in flags.split() or "iommu.passthrough=1" in flags.split()
    if passes:
        return Finding(check="iommu", state="ok", says="on, passing the cards' transfers through")
    return Finding(
        check="iommu",
        state="warn",
        says="on, translating the cards' transfers: between cards they may hang or go through the host",
        fix="boot with iommu=pt, or turn it off (amd_iommu=off, intel_iommu=off, or in the firmware)",
    )


def acs_finding(machine: Machine) -> Finding:
    """Whether PCIe bridges send transfers between cards up to the root, as ACS lets them."""
    if machine.lspci is None:
        return Finding(
            check="acs",
            state="unknown",
            says="lspci is not there to ask",
            fix="apt install pciutils, then again",
        )
    controls = re.findall(r"ACSCtl:(.*)", machine.lspci)
    redirected = [line for line in controls if "ReqRedir+" in line or "CmpltRedir+" in line]
    if redirected:
        return Finding(
            check="acs",
            state="warn",
            says=f"{len(redirected)} PCIe bridges send transfers between cards up to the root",
            fix="turn ACS off in the firmware, or with setpci as NCCL's troubleshooting page shows",
        )
    if controls:
        return Finding(check="acs", state="ok", says=f"off on all {len(controls)} bridges that have it")
    hidden = "access denied" in machine.lspci
    says = "lspci shows it to root alone" if hidden else "no PCIe bridge here has it"
    fix = "sudo lspci -vv | grep ACSCtl: ReqRedir+ is on" if hidden else ""
    return Finding(check="acs", state="unknown" if hidden else "ok", says=says, fix=fix)


def threads_finding(machine: Machine) -> Finding:
    """Whether torch computes with as many threads as there are cores for it."""
    threads, cores = machine.torch.threads, machine.cores
    asked = machine.environ.get("OMP_NUM_THREADS")
    said = f"{threads} OpenMP threads on {cores} cores" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    if threads > cores:
        return Finding(
            check="threads",
            state="warn",
            says=f"{said}: they take the cores from each other",
            fix=f"export OMP_NUM_THREADS={cores}, divided by the processes of this machine",
        )
    return Finding(check="threads", state="ok", says=said)


def disk_finding(machine: Machine, transformer_gb: float) -> Finding:
    """Whether the model's largest part fits where checkpoints are fetched to."""
    where = f"for checkpoints in {machine.checkpoints}"
    if machine.free_gb is None:
        return Finding(check="disk", state="unknown", says=f"no answer {where}")
    said = f"{machine.free_gb:.0f} GB free {where}"
    if machine.free_gb >= transformer_gb:
        return Finding(check="disk", state="ok", says=said)
    return Finding(
        check="disk",
        state="warn",
        says=f"{said}; the transformer alone is {transformer_gb:.0f} GB in bf16",
        fix="make room, or set HF_HOME to a larger disk",
    )
