"""Set-up checks of how the cards are connected: PCIe lanes, P2P, and what commonly stands in its way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from videoaccel.cli.finding import Finding, grouped
from videoaccel.cli.machine import Machine

SMALL_BAR = 256 << 20
"""The window on a card's memory, bytes, that firmware without resizable BAR gives."""


def bus_findings(machine: Machine) -> Iterator[Finding]:
    """All of them; between cards only where there are two."""
    yield from grouped((place, link_finding(machine, place)) for place in machine.accelerators())
    if machine.count < 2:
        return
    yield peer_finding(machine)
    yield from grouped(
        (place, finding)
        for place in machine.accelerators()
        if (finding := window_finding(machine, place)) is not None
    )
    yield iommu_finding(machine)
    yield acs_finding(machine)
    yield from node_findings(machine)


def link_finding(machine: Machine, place: str) -> Finding:
    """Whether a card has the PCIe lanes and speed that it could have."""
    names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
    width, widest, speed, fastest = (machine.of_card(place, name) for name in names)
    if not (width and widest and speed and fastest) or width in ("0", "63", "255"):
        return Finding(check="pcie", state="unknown", says="the bus does not say how it is connected")
    if int(width) < int(widest):
        return Finding(
            check="pcie",
            state="warn",
            says=f"{width} of {widest} lanes",
            fix="move it to a slot with all lanes, or look for a riser, bifurcation or lane sharing",
        )
    if _rate(speed) < _rate(fastest):
        # A card at rest slows its link down: this alone is no fault.
        says = f"{width} lanes at {_rate(speed):g} of {_rate(fastest):g} GT/s, as at rest"
        return Finding(
            check="pcie", state="unknown", says=says, fix="run doctor again while the card is busy"
        )
    return Finding(check="pcie", state="ok", says=f"{width} lanes at {_rate(speed):g} GT/s")


def _rate(speed: str) -> float:
    """GT/s of "32.0 GT/s PCIe"; 0 for words."""
    number = re.match(r"[\d.]+", speed)
    return float(number[0]) if number else 0.0


def peer_finding(machine: Machine) -> Finding:
    """Whether cards read each other's memory."""
    cards, blocked = machine.torch.cards, machine.torch.unreachable
    if len(cards) < 2:
        return Finding(check="p2p", state="unknown", says="torch sees fewer than two cards")
    if not blocked:
        return Finding(check="p2p", state="ok", says=f"all {len(cards)} cards read each other's memory")
    one, other = blocked[0]
    says = f"{len(blocked)} pairs can't read each other's memory, {one} and {other} first"
    if any("GeForce" in card.name for card in cards):
        fix = "the driver refuses it on GeForce: plan for transfers through the host"
    else:
        fix = "turn off ACS and the IOMMU (below), or plan for transfers through the host"
    return Finding(check="p2p", state="warn", says=says, fix=fix)


def window_finding(machine: Machine, place: str) -> Finding | None:
    """Whether other cards see all of a card's memory over PCIe; None where the bus doesn't say."""
    sizes = []
    for line in (machine.of_card(place, "resource") or "").splitlines():
        match = re.match(r"(0x[0-9a-f]+) (0x[0-9a-f]+) ", line)
        if match is not None and int(match[2], 16):
            sizes.append(int(match[2], 16) - int(match[1], 16) + 1)
    if not sizes:
        return None
    window = max(sizes)
    if window > SMALL_BAR:
        return Finding(check="bar", state="ok", says=f"a window of {window >> 30} GiB on its memory")
    return Finding(
        check="bar",
        state="warn",
        says=f"a window of {window >> 20} MiB on its memory, too small for other cards to read it",
        fix="turn on above 4G decoding and resizable BAR in the firmware",
    )


def iommu_finding(machine: Machine) -> Finding:
    """Whether an IOMMU translates the cards' transfers, which hangs NCCL or sends them through the host."""
    if not machine.listed("sys/class/iommu"):
        return Finding(check="iommu", state="ok", says="off")
    kinds = [machine.of_card(place, "iommu_group/type") for place in machine.accelerators()]
    told = [kind for kind in kinds if kind]
    flags = machine.read("proc/cmdline")
    if told:
        passes = all(kind == "identity" for kind in told)
    elif flags is None:
        says = "on; neither its groups nor /proc/cmdline can be read"
        return Finding(check="iommu", state="unknown", says=says)
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
        says, fix = "lspci is not there to ask", "apt install pciutils, then again"
        return Finding(check="acs", state="unknown", says=says, fix=fix)
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
    if "access denied" in machine.lspci:
        fix = "sudo lspci -vv | grep ACSCtl: where it says ReqRedir+, turn ACS off in the firmware"
        return Finding(check="acs", state="unknown", says="lspci shows it to root alone", fix=fix)
    return Finding(check="acs", state="ok", says="no PCIe bridge here has it")


def node_findings(machine: Machine) -> Iterator[Finding]:
    """Whether the cards hang on several processors: what they send each other crosses the link between."""
    nodes: dict[str, list[str]] = {}
    for place in machine.accelerators():
        nodes.setdefault(machine.of_card(place, "numa_node") or "-1", []).append(place)
    if len(nodes) < 2 or "-1" in nodes:
        return
    says = "; ".join(f"node {node}: {', '.join(places)}" for node, places in sorted(nodes.items()))
    fix = "give each instance cards of one node (CUDA_VISIBLE_DEVICES)"
    yield Finding(check="numa", state="optional", says=says, fix=fix)
