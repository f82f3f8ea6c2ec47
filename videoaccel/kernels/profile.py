"""What selection and planning know of a device."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Vendor = Literal["nvidia", "amd", "ascend", "hygon", "cpu"]
P2P = Literal["yes", "no", "unknown"]

SHARED_MEMORY: Mapping[str, int] = types.MappingProxyType(
    {
        "sm_80": 163 * 1024,
        "sm_86": 99 * 1024,
        "sm_89": 99 * 1024,
        "sm_90": 227 * 1024,
        "sm_100": 227 * 1024,
        "sm_103": 227 * 1024,
        "sm_120": 99 * 1024,
        "gfx942": 64 * 1024,
    }
)
"""Shared memory that one block may use, bytes (CUDA C++ Programming Guide, "Compute Capabilities"; for CDNA 3
the LDS of a compute unit). Triton compiles a config over it without a word, so this table is the check."""


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One kind of device, as selection and planning see it.

    Peaks are dense, with float32 accumulation, as the maker states them: ceilings, not what a kernel reaches.

    Attributes:
        name: as in the catalogue, or as the driver says it.
        vendor: who made it.
        arch: compile target (`sm_90`, `gfx942`); the vendor's own word where Triton has none.
        memory_gb: decimal GB.
        bandwidth_gb_s: of that memory, decimal GB/s; None where nobody states it.
        bf16_tflops, fp8_tflops: matrix peaks; None where nobody states it, or it has no such units.
        shared_memory: bytes that one block may use; None where it is not a notion there.
        link: how it reaches its neighbours, in words.
        link_gb_s: one direction, decimal GB/s; None where nobody states it.
        p2p: whether cards of this kind read each other's memory without the host.
        off: ops that must run eager here, each with the reason.
        explicit: ops whose implementation must be one of those named here, and never another one.
        source: where the figures come from.
    """

    name: str
    vendor: Vendor
    arch: str
    memory_gb: float
    bandwidth_gb_s: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    shared_memory: int | None = None
    link: str = ""
    link_gb_s: float | None = None
    p2p: P2P = "unknown"
    off: Mapping[str, str] = field(default_factory=dict)
    explicit: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = ""

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability; None on other vendors' devices."""
        if not self.arch.startswith("sm_"):
            return None
        digits = self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])
