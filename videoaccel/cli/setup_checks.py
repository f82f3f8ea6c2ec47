"""The set-up checks of `doctor`: one line each, and what to do about it. None of them changes anything."""

from __future__ import annotations

from videoaccel.cli.backends import backend_findings
from videoaccel.cli.finding import Finding
from videoaccel.cli.machine import Machine
from videoaccel.cli.setup_bus import bus_findings
from videoaccel.cli.setup_host import disk_finding, environment_findings, shm_findings, thread_finding
from videoaccel.cli.setup_software import (
    arch_findings,
    driver_findings,
    package_finding,
    torch_finding,
    triton_finding,
)


def setup_findings(machine: Machine, transformer_gb: float) -> list[Finding]:
    """Every check of a machine, in the order to read them.

    Args:
        machine: see there.
        transformer_gb: decimal GB of the model's transformer, for the disk.
    """
    return [
        torch_finding(machine),
        *arch_findings(machine),
        *driver_findings(machine),
        triton_finding(machine),
        package_finding(machine),
        *bus_findings(machine),
        *environment_findings(machine),
        thread_finding(machine),
        *shm_findings(machine),
        disk_finding(machine, transformer_gb),
        *backend_findings(machine.packages),
    ]
