"""The catalogue is complete and agrees with itself; cards are found by name and by what their driver says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from videoaccel.errors import UserError
from videoaccel.kernels.catalogue import CATALOGUE, DRIVER_NAMES
from videoaccel.kernels.devices import cpu_profile, device_named, live_profile, profile_of
from videoaccel.kernels.ops import OPS
from videoaccel.kernels.profile import SHARED_MEMORY, DeviceProfile

DEVICES = list(CATALOGUE.values())


def each(devices: list[DeviceProfile]) -> Any:
    return pytest.mark.parametrize("device", devices, ids=lambda device: device.name)


def test_the_cards_that_the_project_promises_are_there() -> None:
    wanted = "RTX 6000D, RTX PRO 6000, RTX 5090, RTX 4090, L40S, A100, H100, H200, B200, B300, MI300X"
    assert set(wanted.split(", ")) | {"Ascend 910B", "Hygon K100-AI"} <= set(CATALOGUE)
    assert all(name == device.name for name, device in CATALOGUE.items())
    assert set(DRIVER_NAMES.values()) == set(CATALOGUE)


@each(DEVICES)
def test_an_entry_is_consistent_and_has_its_sources(device: DeviceProfile) -> None:
    assert re.search(r"https://\S+", device.source)
    assert 20 < device.memory_gb < 300
    for figure in (device.bandwidth_gb_s, device.bf16_tflops, device.fp8_tflops, device.link_gb_s):
        assert figure is None or figure > 0
    if device.vendor in ("nvidia", "amd"):
        assert device.shared_memory == SHARED_MEMORY[device.arch]
        assert device.link and device.bandwidth_gb_s is not None and device.p2p != "unknown"
    capability = device.capability
    assert (capability is not None) == (device.vendor == "nvidia")
    # Twice the rate at half the bytes, on every maker's units; before sm_89 there are none.
    if device.fp8_tflops is not None:
        assert device.bf16_tflops is not None
        assert device.fp8_tflops / device.bf16_tflops == pytest.approx(2, rel=0.05)
        assert capability is None or capability >= (8, 9)


def test_peaks_are_dense_with_float32_accumulation() -> None:
    """Half of the figures with sparsity; GeForce cards at half of their float16-accumulation rate."""
    peaks = {name: device.bf16_tflops for name, device in CATALOGUE.items()}
    assert (peaks["H200"], peaks["B200"], peaks["L40S"]) == (989.4, 4500 / 2, 362.05)
    assert peaks["RTX 4090"] == pytest.approx(660.6 / 4, rel=1e-3)
    assert peaks["RTX 5090"] == pytest.approx(838 / 4)
    # A workstation card of the same chip runs at full rate, with 188 of its multiprocessors to 170.
    assert peaks["RTX PRO 6000"] is not None and peaks["RTX PRO 6000"] > 2 * 209.5


def test_memory_is_what_drivers_report() -> None:
    for name, mebibytes in {"H200": 143_771, "RTX 4090": 24_564, "RTX 6000D": 85_651}.items():
        assert CATALOGUE[name].memory_gb == pytest.approx(mebibytes * 2**20 / 1e9, abs=0.01)


def test_domestic_accelerators_name_their_sparse_attention_and_have_no_fusions() -> None:
    domestic = [device for device in DEVICES if device.vendor in ("ascend", "hygon")]
    assert len(domestic) == 2
    fused = set(OPS) - {"attention"} - {name for name in OPS if "linear" in name or "quantize" in name}
    for device in domestic:
        assert device.explicit["sparse_attention"]
        assert fused | {"shared_expert_fusion"} <= set(device.off)
    assert not any(device.off or device.explicit for device in DEVICES if device not in domestic)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("RTX PRO 6000", "RTX PRO 6000"),
        ("rtxpro6000", "RTX PRO 6000"),
        ("  nvidia RTX-6000D ", "RTX 6000D"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("nvidia rtx pro 6000 blackwell server edition", "RTX PRO 6000 Server"),
        ("GeForce RTX 5090", "RTX 5090"),
        ("a100-pcie", "A100 PCIe"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Ascend910B2", "Ascend 910B"),
        ("hygon k100_ai", "Hygon K100-AI"),
    ],
)
def test_a_device_is_found_whatever_its_case_and_spacing(asked: str, found: str) -> None:
    assert device_named(asked).name == found


@pytest.mark.parametrize(("asked", "near"), [("RTX PRO 600", "RTX PRO 6000"), ("H20O", "H200")])
def test_a_name_that_is_not_there_gets_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(UserError, match=f"unknown device '{asked}': did you mean '{near}'.*MI300X"):
        device_named(asked)
    for nothing in ("", "H100 PCIe", "RTX 4090 D"):
        with pytest.raises(UserError, match="known: RTX 6000D"):
            device_named(nothing)


def properties(name: str, **more: Any) -> SimpleNamespace:
    given: dict[str, Any] = {"name": name, "total_memory": 150_000_000_000, "major": 9, "minor": 0}
    given["shared_memory_per_block_optin"] = 232_448
    return SimpleNamespace(**{**given, **more})


def test_a_known_card_gets_the_catalogues_figures_and_its_own_memory() -> None:
    live, entry = profile_of(properties("NVIDIA H200"), p2p=True), CATALOGUE["H200"]
    assert (live.name, live.arch, live.memory_gb) == ("NVIDIA H200", "sm_90", 150.0)
    assert (live.shared_memory, live.p2p) == (232_448, "yes")
    assert (live.bf16_tflops, live.bandwidth_gb_s) == (entry.bf16_tflops, entry.bandwidth_gb_s)
    assert live.source.startswith("the driver") and entry.source in live.source


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 D", "x"])
def test_a_card_that_only_sounds_alike_gets_no_figures(name: str) -> None:
    live = profile_of(properties(name, major=12, minor=0, shared_memory_per_block_optin=101_376))
    assert (live.arch, live.capability, live.shared_memory) == ("sm_120", (12, 0), 99 * 1024)
    assert live.bf16_tflops is None and live.bandwidth_gb_s is None and "not in the catalogue" in live.source


def test_a_rocm_card_says_its_target() -> None:
    card = properties("AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    card.shared_memory_per_block_optin = 0
    card.shared_memory_per_block = 65_536
    live = profile_of(card, hip=True, p2p=False)
    assert (live.vendor, live.arch, live.shared_memory, live.p2p) == ("amd", "gfx942", 65_536, "no")
    assert live.capability is None and live.fp8_tflops == 2614.9
    # Hygon's torch is a ROCm build as well; the catalogue says whose card it is, and what is off on it.
    other = profile_of(properties("K100_AI", gcnArchName="gfx928"), hip=True)
    assert other.vendor == "hygon" and "swiglu" in other.off


def test_another_backend_says_its_name_and_memory() -> None:
    live = profile_of(SimpleNamespace(name="Ascend910B2", total_memory=65_452 * 2**20), vendor="ascend")
    assert (live.vendor, live.arch, live.bandwidth_gb_s) == ("ascend", "ascend910b", 1600.0)


def test_a_cpu_is_a_device_without_peaks() -> None:
    live = live_profile("cpu")
    assert live == cpu_profile() and live.capability is None and live.bf16_tflops is None
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="torch finds no device 'cuda'"):
            live_profile("cuda")


@pytest.mark.gpu
def test_the_card_in_the_machine_agrees_with_its_entry() -> None:
    live = live_profile("cuda")
    assert live.shared_memory == SHARED_MEMORY[live.arch]
    if live.name in DRIVER_NAMES:
        entry = CATALOGUE[DRIVER_NAMES[live.name]]
        assert live.arch == entry.arch and live.memory_gb == pytest.approx(entry.memory_gb, rel=0.02)
