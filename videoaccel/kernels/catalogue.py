"""The devices that selection, planning and the compile matrix know without having them.

How to read an entry: peaks are dense and with float32 accumulation, so half of what a datasheet states with
sparsity, and half again on GeForce cards, whose tensor cores run at half rate with a float32 accumulator.
Memory is what the driver reports, in decimal GB: a "141 GB" H200 has 143,771 MiB, which are 150.8 GB. Links
count one direction, over all of a card's links. A figure that its maker does not state is None, never an
estimate; the one exception, RTX 6000D, says so. `source` has the addresses.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from videoaccel.kernels.profile import P2P, SHARED_MEMORY, DeviceProfile, Vendor

_PCIE4 = ("PCIe 4.0 x16", 31.5)
_PCIE5 = ("PCIe 5.0 x16", 63.0)

_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_RTX_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_RTX_PRO = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
    "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)
_HOPPER = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
_HGX = "https://www.nvidia.com/en-us/data-center/hgx/"
_NO_GEFORCE_P2P = "P2P: https://forums.developer.nvidia.com/t/standard-nvidia-cuda-tests-fail-with-dual-rtx-4090-linux-box/233202"

_UNFUSED = (
    "norm_modulate",
    "gate_residual",
    "gate_residual_norm_modulate",
    "qk_norm_rope",
    "swiglu",
    "shared_expert_fusion",
)
"""Fusions that are not to be looked for on accelerators that run neither CUDA nor upstream Triton."""


def _mib(mebibytes: float) -> float:
    """Decimal GB."""
    return round(mebibytes * 1.048576e-3, 2)


def _gpu(
    name: str,
    arch: str,
    *,
    mib: int,
    bandwidth: float | None,
    bf16: float | None,
    fp8: float | None,
    link: tuple[str, float],
    p2p: P2P,
    source: str,
    vendor: Vendor = "nvidia",
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        vendor=vendor,
        arch=arch,
        memory_gb=_mib(mib),
        bandwidth_gb_s=bandwidth,
        bf16_tflops=bf16,
        fp8_tflops=fp8,
        shared_memory=SHARED_MEMORY[arch],
        link=link[0],
        link_gb_s=link[1],
        p2p=p2p,
        source=source,
    )


def _domestic(
    name: str, vendor: Vendor, arch: str, *, memory_gb: float, sparse: str, source: str, **figures: float
) -> DeviceProfile:
    """An accelerator with its own software: its own sparse attention and no other, and no fusions of ours."""
    off = dict.fromkeys(_UNFUSED, "no kernel is written for it there, and Triton does not compile for it")
    return DeviceProfile(
        name=name,
        vendor=vendor,
        arch=arch,
        memory_gb=memory_gb,
        bandwidth_gb_s=figures.get("bandwidth"),
        bf16_tflops=figures.get("bf16"),
        off=types.MappingProxyType(off),
        explicit=types.MappingProxyType({"sparse_attention": (sparse,)}),
        source=source,
    )


_ALL = (
    # Its maker publishes no figures. Memory is the driver's; bandwidth is that of a 448-bit bus of 28 Gbit/s
    # chips. The peaks are measured: cuBLASLt reached 150.5 in bf16 and 287.9 in FP8 on one card, and others
    # found 143 and 144 in bf16. So the matrix units run at under a third of RTX PRO 6000's rate, with 5/6 of
    # its cores.
    _gpu(
        "RTX 6000D",
        "sm_120",
        mib=85_651,
        bandwidth=1568.0,
        bf16=150.5,
        fp8=287.9,
        link=_PCIE5,
        p2p="yes",
        source="measured, not the maker's: peaks https://github.com/xzwgit/gpu-flops-bench (nvidia/results/"
        "20260815T120216Z), second report https://github.com/zzc0721/torch-performance-test-data/issues/158; "
        "bus https://i2hard.ru/publications/49441/?lang=ru",
    ),
    _gpu(
        "RTX PRO 6000",
        "sm_120",
        mib=97_887,
        bandwidth=1792.0,
        bf16=503.8,
        fp8=1007.6,
        link=_PCIE5,
        p2p="yes",
        source=f"{_RTX_PRO} (Workstation Edition)",
    ),
    # Its memory is slower than the Workstation Edition's. Its page gives "1 PFLOPS" of bf16 without saying
    # whether that is dense, and its datasheet gives none.
    _gpu(
        "RTX PRO 6000 Server",
        "sm_120",
        mib=97_887,
        bandwidth=1597.0,
        bf16=None,
        fp8=None,
        link=_PCIE5,
        p2p="yes",
        source="https://www.nvidia.com/en-us/data-center/rtx-pro-6000-blackwell-server-edition/",
    ),
    _gpu(
        "RTX 5090",
        "sm_120",
        mib=32_607,
        bandwidth=1792.0,
        bf16=209.5,
        fp8=419.0,
        link=_PCIE5,
        p2p="no",
        source=f"{_RTX_BLACKWELL}; {_NO_GEFORCE_P2P}",
    ),
    _gpu(
        "RTX 4090",
        "sm_89",
        mib=24_564,
        bandwidth=1008.0,
        bf16=165.2,
        fp8=330.3,
        link=_PCIE4,
        p2p="no",
        source=f"{_ADA}; {_NO_GEFORCE_P2P}",
    ),
    _gpu(
        "L40S",
        "sm_89",
        mib=46_068,
        bandwidth=864.0,
        bf16=362.05,
        fp8=733.0,
        link=_PCIE4,
        p2p="yes",
        source="https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
    ),
    _gpu(
        "A100",
        "sm_80",
        mib=81_920,
        bandwidth=2039.0,
        bf16=312.0,
        fp8=None,
        link=("NVLink 3", 300.0),
        p2p="yes",
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-nvidia-us-2188504-web.pdf (80 GB SXM)",
    ),
    _gpu(
        "A100 PCIe",
        "sm_80",
        mib=81_920,
        bandwidth=1935.0,
        bf16=312.0,
        fp8=None,
        link=_PCIE4,
        p2p="yes",
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-nvidia-us-2188504-web.pdf (80 GB PCIe, without a bridge)",
    ),
    _gpu(
        "H100",
        "sm_90",
        mib=81_559,
        bandwidth=3350.0,
        bf16=989.4,
        fp8=1978.9,
        link=("NVLink 4", 450.0),
        p2p="yes",
        source=f"{_HOPPER} (SXM5)",
    ),
    _gpu(
        "H200",
        "sm_90",
        mib=143_771,
        bandwidth=4800.0,
        bf16=989.4,
        fp8=1978.9,
        link=("NVLink 4", 450.0),
        p2p="yes",
        source=f"https://www.nvidia.com/en-us/data-center/h200/ (SXM); peaks, of the same chip: {_HOPPER}",
    ),
    _gpu(
        "B200",
        "sm_100",
        mib=183_359,
        bandwidth=8000.0,
        bf16=2250.0,
        fp8=4500.0,
        link=("NVLink 5", 900.0),
        p2p="yes",
        source=f"{_HGX} (HGX B200: 8 cards have 36 and 72 PFLOPS with sparsity)",
    ),
    _gpu(
        "B300",
        "sm_103",
        mib=275_040,
        bandwidth=8000.0,
        bf16=2250.0,
        fp8=4500.0,
        link=("NVLink 5", 900.0),
        p2p="yes",
        source=f"{_HGX} (HGX B300: 8 cards have 36 and 72 PFLOPS with sparsity)",
    ),
    _gpu(
        "MI300X",
        "gfx942",
        mib=196_592,
        bandwidth=5300.0,
        bf16=1307.4,
        fp8=2614.9,
        link=("Infinity Fabric, 64 GB/s to each of seven neighbours", 448.0),
        p2p="yes",
        source="https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
        "amd-instinct-mi300x-data-sheet.pdf",
        vendor="amd",
    ),
    # The 910B2 of Atlas A2 servers; other 910B variants have fewer cores. No FP8 units.
    _domestic(
        "Ascend 910B",
        "ascend",
        "ascend910b",
        memory_gb=_mib(64 * 1024),
        bandwidth=1600.0,
        bf16=353.0,
        sparse="cann",
        source="https://gitcode.com/cann/ops-nn/blob/master/docs/zh/develop/"
        "cross_platform_migration_guide.md (Atlas A2: 64 GB, 1.6 TB/s, 353 TFLOPS)",
    ),
    # Hygon publishes neither bandwidth nor peaks, and what others print differs.
    _domestic(
        "Hygon K100-AI",
        "hygon",
        "gfx928",
        memory_gb=64.0,
        sparse="dtk",
        source="https://www.hygon.cn/product/accelerator; memory "
        "https://docs.gpustack.ai/0.5/tutorials/running-inference-with-hygon-dcus/",
    ),
)

CATALOGUE: Mapping[str, DeviceProfile] = types.MappingProxyType({device.name: device for device in _ALL})
"""Name to profile."""

DRIVER_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "NVIDIA RTX 6000D": "RTX 6000D",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Server",
        "NVIDIA GeForce RTX 5090": "RTX 5090",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA L40S": "L40S",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA A100 80GB PCIe": "A100 PCIe",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA B200": "B200",
        "NVIDIA B300 SXM6 AC": "B300",
        "AMD Instinct MI300X": "MI300X",
        "AMD Instinct MI300X OAM": "MI300X",
        "Ascend910B2": "Ascend 910B",
        "K100_AI": "Hygon K100-AI",
    }
)
"""What a driver calls a card, to its entry. Whole names only: an H100 PCIe or a 4090 D is another card."""
