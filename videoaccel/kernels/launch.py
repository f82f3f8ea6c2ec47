"""One launch of a kernel as data: what runs it on a device is what the compile matrix compiles without one.

An implementation builds a `Launch` from its arguments and runs it. The compile matrix builds the same one
from meta tensors at full size and compiles it, so the two can't drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

HERE = "here"
"""The target of a launch on a device that has no compile target, as the interpreter's CPU."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one launch is cut.

    Attributes:
        num_warps: warps of a program (of 32 threads; 64 on AMD).
        num_stages: loads in flight of a pipelined loop; kernels without such a loop ignore it.
        blocks: the kernel's own block sizes, by the name of the constexpr they set.
    """

    num_warps: int
    num_stages: int = 1
    blocks: Mapping[str, int | bool] = field(default_factory=dict)

    def words(self) -> str:
        """The config in a few words, for tables."""
        parts = [f"{name}={value}" for name, value in self.blocks.items()]
        return " ".join([*parts, f"warps={self.num_warps}", f"stages={self.num_stages}"])


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel, its grid and everything it is called with.

    Attributes:
        kernel: what `triton.jit` made.
        grid: programs in each dimension.
        arguments: by parameter name, constexprs that don't come from `config` included.
        config: how it is cut.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    config: Config

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told besides the arguments.

        Fused multiply-add is asked for by name: it is one rounding fewer, and the default changes in Triton
        3.10.
        """
        return {
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
            "enable_fp_fusion": True,
        }

    def run(self) -> Mapping[str, Any]:
        """Queues the kernel, without a wait for the device, and returns the arguments, outputs among them.

        A grid without programs is no launch.
        """
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, **self.config.blocks, **self.options)
        return self.arguments


@functools.lru_cache(maxsize=64)
def target_of(device: torch.device) -> str:
    """The compile target of `device` (`sm_90`, `gfx942`), or `HERE`. Read once: it asks no running kernel."""
    if device.type != "cuda":
        return HERE
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def row_warps(block: int, target: str) -> int:
    """Warps for a program that holds `block` channels of one row in registers.

    32 channels a thread: two to four loads of 16 bytes in flight for each tensor read, and few enough float32
    registers (32 a tensor held) that several programs share a multiprocessor. AMD's warps are twice as wide.
    """
    width = 64 if target.startswith("gfx") else 32
    return min(16, max(1, block // (32 * width)))
