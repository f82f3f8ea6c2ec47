"""The set-up checks on sound and broken machines: small trees of what a kernel shows, and values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from videoaccel.cli.finding import Finding, grouped
from videoaccel.cli.machine import Machine, requirements, this_machine
from videoaccel.cli.setup_checks import setup_findings
from videoaccel.cli.setup_software import runs_on
from videoaccel.cli.torch_build import Card, TorchBuild

CARDS = ("0000:17:00.0", "0000:65:00.0")
SOUND = {
    "vendor": "0x10de",
    "class": "0x030200",
    "current_link_width": "16",
    "max_link_width": "16",
    "current_link_speed": "32.0 GT/s PCIe",
    "max_link_speed": "32.0 GT/s PCIe",
    "numa_node": "0",
    # Registers of 16 MiB, memory of 128 GiB, and an empty line as of a window that isn't there.
    "resource": "0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200\n"
    "0x0000006000000000 0x0000007fffffffff 0x000000000014220c\n"
    "0x0000000000000000 0x0000000000000000 0x0000000000000000",
}
DRIVER = "proc/driver/nvidia/version"
BLACKWELL = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A file system with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def bus(places: tuple[str, ...] = CARDS, **changed: str) -> dict[str, str]:
    """What the kernel shows of cards, sound except where said."""
    return {f"sys/bus/pci/devices/{p}/{n}": text for p in places for n, text in (SOUND | changed).items()}


def sound(root: Path, **changed: Any) -> Machine:
    """Two cards on which nothing is amiss; the tree is `root`'s."""
    cards = tuple(Card(name=BLACKWELL, arch="sm_120", bus=place) for place in CARDS)
    build = TorchBuild(version="2.11.0", cuda="13.0", archs=("sm_90", "sm_120"), cards=cards, threads=8)
    machine = Machine(
        torch=build,
        packages={"triton": "3.6.0", "torch": "2.11.0"},
        requires=("torch>=2.11",),
        root=root,
        cores=8,
        free_gb=500.0,
        shm_gb=16.0,
        lspci="\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-",
    )
    return dataclasses.replace(machine, **changed)


def with_torch(machine: Machine, **changed: Any) -> Machine:
    return dataclasses.replace(machine, torch=dataclasses.replace(machine.torch, **changed))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path, {DRIVER: "NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05", **bus()})


def amiss(machine: Machine, gb: float = 66.0) -> dict[str, Finding]:
    """Findings that are faults, by check."""
    return {found.check: found for found in setup_findings(machine, gb) if found.state == "warn"}


def found(machine: Machine, check: str) -> Finding:
    """The one finding of a check."""
    (only,) = (finding for finding in setup_findings(machine, 66.0) if finding.check == check)
    return only


def test_a_sound_machine_has_no_fault(root: Path) -> None:
    findings = setup_findings(sound(root), 66.0)
    assert {finding.state for finding in findings} == {"ok", "optional"}
    assert found(sound(root), "pcie").says == "16 lanes at 32 GT/s (all 2 cards)"
    assert found(sound(root), "bar").says == "a window of 128 GiB on its memory (all 2 cards)"


def test_every_fault_has_a_fix_and_all_are_single_lines(root: Path, tmp_path: Path) -> None:
    tree(root, bus(current_link_width="8", numa_node="1", resource="0x0 0xfffffff 0x0"))
    tree(root, {DRIVER: "Kernel Module  470.10.01", "sys/class/iommu/dmar0/x": "", "proc/cmdline": "quiet"})
    broken = sound(
        root,
        packages={},
        environ={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"},
        cores=4,
        free_gb=5.0,
        shm_gb=0.064,
        lspci="ACSCtl: SrcValid+ ReqRedir+ CmpltRedir+",
    )
    broken = with_torch(broken, archs=("sm_80",), unreachable=((0, 1), (1, 0)))
    faults = amiss(broken)
    assert set(faults) == {
        *("torch kernels", "triton", "packages", "pcie", "p2p", "bar", "iommu", "acs"),
        *("environment", "threads", "shm", "disk"),
    }
    # The driver is too old for the toolkit, but torch sees the cards: a compatibility package does that.
    assert found(broken, "driver").state == "ok"
    for finding in setup_findings(broken, 66.0):
        assert "\n" not in finding.says + finding.fix and finding.says
        assert finding.fix or finding.state != "warn", finding


@pytest.mark.parametrize(
    ("archs", "arch", "runs"),
    [
        (("sm_80", "sm_86"), "sm_89", True),
        (("sm_80",), "sm_90", False),
        (("sm_90a",), "sm_90", True),
        (("sm_100a",), "sm_103", False),
        (("sm_100f",), "sm_103", True),
        (("sm_100",), "sm_120", False),
        (("compute_90",), "sm_120", True),
        (("compute_90a",), "sm_120", False),
        (("sm_120",), "sm_100", False),
        (("sm_86",), "sm_80", False),
        ((), "sm_80", False),
        (("nonsense",), "sm_80", False),
    ],
)
def test_code_runs_where_cuda_says(archs: tuple[str, ...], arch: str, runs: bool) -> None:
    assert runs_on(archs, arch) is runs


class TestTorchThatSeesNoCard:
    """The fix is the first thing that is wrong, not a list of all that could be."""

    def fix(self, machine: Machine) -> str:
        return amiss(machine)["torch"].fix

    def test_built_without_cuda(self, root: Path) -> None:
        machine = with_torch(sound(root), cards=(), cuda=None)
        assert self.fix(machine).startswith("install torch for CUDA")
        assert "none of the 2 accelerators (NVIDIA)" in amiss(machine)["torch"].says

    def test_built_for_another_maker(self, tmp_path: Path) -> None:
        root = tree(tmp_path, bus(vendor="0x1002", **{"class": "0x120000"}))
        assert self.fix(with_torch(sound(root), cards=())).startswith("install torch for ROCm")

    def test_hidden(self, root: Path) -> None:
        machine = with_torch(sound(root, environ={"CUDA_VISIBLE_DEVICES": ""}), cards=())
        assert self.fix(machine).startswith("unset CUDA_VISIBLE_DEVICES")

    def test_no_driver(self, tmp_path: Path) -> None:
        machine = with_torch(sound(tree(tmp_path, bus())), cards=())
        assert self.fix(machine).startswith("install NVIDIA's driver")
        assert found(machine, "driver").state == "unknown"

    def test_container_without_devices(self, root: Path) -> None:
        machine = with_torch(sound(root), cards=())
        assert "--gpus all" in self.fix(machine)
        tree(root, {"dev/nvidia0": ""})
        assert "nvidia-smi" in self.fix(machine)

    def test_driver_too_old(self, root: Path) -> None:
        tree(root, {DRIVER: "Kernel Module  550.54.14"})
        assert "580" in amiss(with_torch(sound(root), cards=()))["driver"].fix
        assert found(with_torch(sound(root), cards=(), cuda="12.8"), "driver").state == "ok"


def test_a_desktop_picture_is_no_accelerator(tmp_path: Path) -> None:
    """The graphics of an AMD processor, and a server's own VGA, sit on the bus as well."""
    root = tree(tmp_path, bus(("0000:00:01.0",), vendor="0x1002", **{"class": "0x030000"}))
    tree(root, bus(("0000:00:02.0",), vendor="0x1a03", **{"class": "0x030000"}))
    machine = with_torch(sound(root), cards=())
    assert machine.on_bus() == {} and machine.count == 0
    assert found(machine, "torch").says.endswith("this machine has no accelerator")
    assert "pcie" not in {finding.check for finding in setup_findings(machine, 1.0)}


def test_one_narrow_card_is_named(root: Path) -> None:
    tree(root, bus(CARDS[1:], current_link_width="8"))
    states = {f.says: f.state for f in setup_findings(sound(root), 66.0) if f.check == "pcie"}
    assert states == {
        f"16 lanes at 32 GT/s ({CARDS[0]})": "ok",
        f"8 of 16 lanes ({CARDS[1]})": "warn",
    }


def test_a_slow_link_is_not_called_a_fault(root: Path) -> None:
    """A card at rest slows it down."""
    tree(root, bus(current_link_speed="2.5 GT/s PCIe"))
    finding = found(sound(root), "pcie")
    assert finding.state == "unknown" and "2.5 of 32 GT/s" in finding.says and "busy" in finding.fix


@pytest.mark.parametrize("width", ["63", "255", "0"])
def test_a_bus_of_a_virtual_machine_says_nothing(root: Path, width: str) -> None:
    tree(root, bus(current_link_width=width))
    assert found(sound(root), "pcie").state == "unknown"


def test_bus_files_that_are_missing_are_unknown(tmp_path: Path) -> None:
    assert found(sound(tmp_path), "pcie").state == "unknown"
    assert "bar" not in {finding.check for finding in setup_findings(sound(tmp_path), 1.0)}


def test_p2p_on_geforce_has_no_switch(root: Path) -> None:
    cards = tuple(Card(name="NVIDIA GeForce RTX 5090", arch="sm_120", bus=place) for place in CARDS)
    machine = with_torch(sound(root), cards=cards, unreachable=((0, 1), (1, 0)))
    assert "GeForce" in amiss(machine)["p2p"].fix and "ACS" not in amiss(machine)["p2p"].fix


def test_cards_of_two_processors_are_told_apart(root: Path) -> None:
    tree(root, bus(CARDS[1:], numa_node="1"))
    finding = found(sound(root), "numa")
    assert finding.state == "optional" and finding.says == f"node 0: {CARDS[0]}; node 1: {CARDS[1]}"
    tree(root, bus(numa_node="-1"))
    assert "numa" not in {f.check for f in setup_findings(sound(root), 1.0)}


class TestIommu:
    def on(self, root: Path, **files: str) -> Finding:
        tree(
            root, {"sys/class/iommu/ivhd0/x": "", **{name.replace("__", "/"): t for name, t in files.items()}}
        )
        return found(sound(root), "iommu")

    def test_off(self, root: Path) -> None:
        assert found(sound(root), "iommu").says == "off"

    def test_translates(self, root: Path) -> None:
        assert self.on(root, proc__cmdline="quiet").state == "warn"

    def test_passes_through_by_the_kernels_flags(self, root: Path) -> None:
        assert self.on(root, proc__cmdline="quiet iommu=pt").state == "ok"

    def test_the_cards_own_groups_are_believed_first(self, root: Path) -> None:
        tree(root, bus() | {f"sys/bus/pci/devices/{place}/iommu_group/type": "DMA-FQ" for place in CARDS})
        assert self.on(root, proc__cmdline="iommu=pt").state == "warn"
        tree(root, {f"sys/bus/pci/devices/{place}/iommu_group/type": "identity" for place in CARDS})
        assert self.on(root, proc__cmdline="quiet").state == "ok"

    def test_nothing_can_be_read(self, root: Path) -> None:
        assert self.on(root).state == "unknown"


@pytest.mark.parametrize(
    ("lspci", "state", "fix"),
    [
        (None, "unknown", "pciutils"),
        ("Capabilities: <access denied>", "unknown", "sudo lspci"),
        ("no such thing", "ok", ""),
        ("ACSCtl: SrcValid+ ReqRedir-\nACSCtl: SrcValid+ ReqRedir+", "warn", "turn ACS off"),
        ("ACSCtl: SrcValid+ ReqRedir- CmpltRedir-", "ok", ""),
    ],
)
def test_acs_is_read_where_it_may_be(root: Path, lspci: str | None, state: str, fix: str) -> None:
    finding = found(sound(root, lspci=lspci), "acs")
    assert finding.state == state and fix in finding.fix


def test_one_card_is_not_asked_about_others(tmp_path: Path) -> None:
    root = tree(tmp_path, {DRIVER: "Module  580.95.05", **bus(CARDS[:1])})
    machine = sound(root, environ={"NCCL_P2P_DISABLE": "1"}, shm_gb=0.064)
    machine = with_torch(machine, cards=machine.torch.cards[:1])
    assert amiss(machine) == {}
    assert not {"p2p", "acs", "iommu", "shm"} & {f.check for f in setup_findings(machine, 1.0)}


@pytest.mark.parametrize("value", ["0", "", "False", "off"])
def test_a_variable_that_says_no_is_fine(root: Path, value: str) -> None:
    assert amiss(sound(root, environ={"CUDA_LAUNCH_BLOCKING": value})) == {}


def test_a_variable_left_from_debugging_is_named_with_its_harm(root: Path) -> None:
    finding = amiss(sound(root, environ={"TRITON_INTERPRET": "1"}))["environment"]
    assert finding.says.startswith("TRITON_INTERPRET=1: ") and finding.fix == "unset TRITON_INTERPRET"


def test_packages_that_do_not_meet_the_requirements_are_named(root: Path) -> None:
    machine = sound(root, requires=("torch>=2.12", "PyYAML>=6.0"), packages={"torch": "2.11.0+cpu"})
    finding = amiss(machine)["packages"]
    assert finding.says == "not as required: torch>=2.12 (2.11.0+cpu), PyYAML>=6.0 (not installed)"
    assert finding.fix == "pip install 'torch>=2.12' 'PyYAML>=6.0'"


def test_an_old_triton_is_a_fault_and_either_name_will_do(root: Path) -> None:
    assert "triton>=3.6" in amiss(sound(root, packages={"torch": "2.11.0", "triton": "3.5.0"}))["triton"].says
    machine = sound(root, packages={"torch": "2.11.0", "pytorch-triton-rocm": "3.6.0"})
    assert found(machine, "triton").says == "pytorch-triton-rocm 3.6.0"


def test_backends_that_are_missing_are_no_fault(root: Path) -> None:
    finding = found(sound(root), "xfuser")
    assert finding.state == "optional" and finding.fix == "pip install xfuser"
    assert found(sound(root, packages={"xfuser": "0.7.0", "torch": "2.11.0"}), "xfuser").state == "ok"


@pytest.mark.parametrize(("free", "state"), [(None, "unknown"), (65.9, "warn"), (66.0, "ok")])
def test_disk_holds_the_transformer(root: Path, free: float | None, state: str) -> None:
    assert found(sound(root, free_gb=free), "disk").state == state


def test_equal_findings_are_one_line() -> None:
    ok, bad = (Finding(check="x", state=state, says=state) for state in ("ok", "warn"))
    said = [finding.says for finding in grouped([("a", ok), ("b", bad), ("c", ok)])]
    assert said == ["ok (a, c)", "warn (b)"]
    assert [finding.says for finding in grouped([("a", ok), ("b", ok)])] == ["ok (all 2 cards)"]


def test_this_machine_can_be_read() -> None:
    machine = this_machine()
    assert machine.torch.threads >= 1 and machine.cores >= 1 and "torch" in machine.packages
    assert any(text.startswith("torch>=") for text in machine.requires)
    assert not any("pytest" in text for text in machine.requires), "an extra's are not required"
    assert requirements("no-such-package") == ()
    assert setup_findings(machine, 66.0)
