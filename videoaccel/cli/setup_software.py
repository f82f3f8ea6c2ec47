"""Set-up checks of what is installed: torch, its driver, Triton, the packages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from videoaccel.cli.finding import Finding
from videoaccel.cli.machine import Machine
from videoaccel.kernels.ops import TRITON
from videoaccel.kernels.registry import Needs

DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""Least NVIDIA driver by CUDA's major version (CUDA Toolkit release notes, "minor version compatibility")."""
GET_TORCH = "https://pytorch.org/get-started/locally/"
TORCH_FOR = {
    "NVIDIA": f"install torch for CUDA: {GET_TORCH}",
    "AMD": f"install torch for ROCm: {GET_TORCH}",
    "Huawei": "install CANN, then pip install torch_npu",
    "Hygon": "install the torch that comes with DTK",
}
"""What to install for a maker's accelerators."""


def torch_finding(machine: Machine) -> Finding:
    """Whether torch was built for the accelerator that is there, and sees it."""
    build, on_bus = machine.torch, machine.on_bus()
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "no CUDA or ROCm"
    what = f"torch {build.version} ({kind})"
    if build.cards:
        names = ", ".join(dict.fromkeys(card.name for card in build.cards))
        return Finding(check="torch", state="ok", says=f"{what} sees {len(build.cards)}: {names}")
    if not on_bus:
        return Finding(check="torch", state="ok", says=f"{what}; this machine has no accelerator")
    maker = next(iter(on_bus.values()))
    says = f"{what} sees none of the {len(on_bus)} accelerators ({maker}) on the bus"
    return Finding(check="torch", state="warn", says=says, fix=_why_unseen(machine, maker))


def _why_unseen(machine: Machine, maker: str) -> str:
    """What to do about accelerators that are on the bus and that torch does not see."""
    build = machine.torch
    if not (build.cuda if maker == "NVIDIA" else build.hip):
        return TORCH_FOR[maker]
    hidden = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return "unset CUDA_VISIBLE_DEVICES, which hides them"
    if maker == "NVIDIA" and machine.read("proc/driver/nvidia/version") is None:
        return "install NVIDIA's driver and load it: modprobe nvidia"
    if maker == "NVIDIA" and not any(re.fullmatch(r"nvidia\d+", name) for name in machine.listed("dev")):
        return "give the container the devices: docker run --gpus all"
    return f"make {'nvidia-smi' if maker == 'NVIDIA' else 'rocm-smi'} list them first"


def arch_findings(machine: Machine) -> Iterator[Finding]:
    """Whether torch's own kernels are compiled for the cards: one that isn't fails at its first kernel."""
    build = machine.torch
    for name, arch in dict.fromkeys((card.name, card.arch) for card in build.cards):
        if arch is not None and build.archs and not runs_on(build.archs, arch):
            yield Finding(
                check="torch kernels",
                state="warn",
                says=f"torch {build.version} has none for {name} ({arch}), only {' '.join(build.archs)}",
                fix=f"install a torch for a newer CUDA: {GET_TORCH}",
            )


def runs_on(archs: tuple[str, ...], arch: str) -> bool:
    """Whether code for any of `archs` runs on a card of `arch`.

    Binaries (`sm_86`) run on a later minor version of their major one, PTX (`compute_90`) on anything later,
    and either with an `a` behind it on its own alone (CUDA C++ Programming Guide, "Compute Compatibility").
    """
    card = _version(arch.removeprefix("sm_"))
    for text in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", text)
        if match is None or card is None:
            continue
        code = _version(match[2])
        if code is None or code > card or (match[3] == "a" and code != card):
            continue
        if code[0] == card[0] or (match[1] == "compute" and not match[3]):
            return True
    return False


def _version(digits: str) -> tuple[int, int] | None:
    return (int(digits[:-1]), int(digits[-1])) if re.fullmatch(r"\d{2,3}", digits) else None


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
            says = "no driver says its version under /proc or /sys"
            yield Finding(check="driver", state="unknown", says=says)
        return
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", nvidia)
    if found is None:
        yield Finding(check="driver", state="unknown", says="/proc/driver/nvidia/version names no version")
        return
    driver, least = found[1], DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    says = f"NVIDIA driver {driver}"
    if not (cuda and least):
        yield Finding(check="driver", state="ok", says=says)
    elif Version(driver) >= Version(least):
        yield Finding(check="driver", state="ok", says=f"{says}, enough for CUDA {cuda}")
    elif machine.torch.cards:
        # CUDA's forward compatibility package does this on data centre cards.
        yield Finding(check="driver", state="ok", says=f"{says}, old for CUDA {cuda}, but torch sees cards")
    else:
        yield Finding(
            check="driver",
            state="warn",
            says=f"{says} is older than CUDA {cuda} of this torch takes",
            fix=f"install driver {least} or later, or a torch for an older CUDA: {GET_TORCH}",
        )


def triton_finding(machine: Machine) -> Finding:
    """Whether the fused kernels have their compiler."""
    lacks = Needs(packages=TRITON).missing_package(machine.packages)
    if lacks is None:
        name = "triton" if "triton" in machine.packages else "pytorch-triton-rocm"
        return Finding(check="triton", state="ok", says=f"{name} {machine.packages[name]}")
    says, _, fix = lacks.partition(": ")
    return Finding(check="triton", state="warn", says=f"the fused kernels: {says}", fix=fix)


def package_finding(machine: Machine) -> Finding:
    """Whether every package that this one requires is there, in a version that it takes."""
    lacking, wanted = [], []
    for text in machine.requires:
        requirement = Requirement(text)
        version = machine.packages.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{requirement} ({'not installed' if version is None else version})")
            wanted.append(f"'{requirement}'")
    if not lacking:
        return Finding(check="packages", state="ok", says=f"{len(machine.requires)}, as required")
    says, fix = f"not as required: {', '.join(lacking)}", f"pip install {' '.join(wanted)}"
    return Finding(check="packages", state="warn", says=says, fix=fix)
