"""Set-up checks of the host: variables that slow or change what runs, threads, shared memory, disk."""

from __future__ import annotations

from collections.abc import Iterator

from videoaccel.cli.finding import Finding
from videoaccel.cli.machine import Machine

SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "TRITON_INTERPRET": "Triton kernels run in its interpreter, thousands of times slower",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is asked of the driver",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing, and does not say so",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing, and does not say so",
    "HSA_OVERRIDE_GFX_VERSION": "kernels are compiled for another card than the one that is there",
}
"""Variables of debugging that outlive it, to what each does where it is set."""
SLOWING_BETWEEN = {
    "NCCL_P2P_DISABLE": "transfers between cards go through the host",
    "NCCL_SHM_DISABLE": "transfers through the host go through the network's code",
}
"""The same, for several cards."""
SHM_GB = 1.0
"""Least /dev/shm for several cards; containers get 0.064 unless they ask."""


def environment_findings(machine: Machine) -> Iterator[Finding]:
    """Variables that slow or change what runs."""
    rules = SLOWING | (SLOWING_BETWEEN if machine.count > 1 else {})
    on = [name for name in rules if is_on(machine.environ.get(name))]
    for name in on:
        says = f"{name}={machine.environ[name]}: {rules[name]}"
        yield Finding(check="environment", state="warn", says=says, fix=f"unset {name}")
    if not on:
        yield Finding(check="environment", state="ok", says="no variable is set that slows what runs")


def is_on(value: str | None) -> bool:
    """Whether a variable is set to something that the libraries take for yes."""
    return value is not None and value.strip().lower() not in ("", "0", "false", "off", "no")


def thread_finding(machine: Machine) -> Finding:
    """Whether torch computes with more threads than there are cores for it."""
    threads, cores = machine.torch.threads, machine.cores
    asked = machine.environ.get("OMP_NUM_THREADS")
    said = f"{threads} threads on {cores} cores" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    if threads > cores:
        return Finding(
            check="threads",
            state="warn",
            says=f"{said}: they take the cores from each other",
            fix=f"export OMP_NUM_THREADS={cores}, divided by the processes of this machine",
        )
    return Finding(check="threads", state="ok", says=said)


def shm_findings(machine: Machine) -> Iterator[Finding]:
    """Whether processes of several cards have the shared memory that NCCL passes data through."""
    if machine.count < 2 or machine.shm_gb is None:
        return
    said = f"/dev/shm has {machine.shm_gb:.2g} GB"
    if machine.shm_gb >= SHM_GB:
        yield Finding(check="shm", state="ok", says=said)
    else:
        fix = "docker run --ipc=host, or --shm-size=8g"
        yield Finding(check="shm", state="warn", says=f"{said}, too little for NCCL", fix=fix)


def disk_finding(machine: Machine, transformer_gb: float) -> Finding:
    """Whether the model's largest part fits where checkpoints are fetched to.

    Args:
        machine: see there.
        transformer_gb: decimal GB of that part.
    """
    where = f"for checkpoints in {machine.checkpoints}"
    if machine.free_gb is None:
        return Finding(check="disk", state="unknown", says=f"the disk {where} does not answer")
    said = f"{machine.free_gb:.0f} GB free {where}; the transformer alone is {transformer_gb:.0f} GB in bf16"
    if machine.free_gb >= transformer_gb:
        return Finding(check="disk", state="ok", says=said)
    return Finding(
        check="disk",
        state="warn",
        says=said,
        fix="make room, or set HF_HOME to a larger disk; nothing is to be done if it is there already",
    )
