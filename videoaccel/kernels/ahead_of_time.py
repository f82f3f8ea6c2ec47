"""Compiles a `Launch` for a target that need not be in the machine, and says what it takes of that target.

Triton's compiler, assembler and object dump come in its wheel, so none of this asks for a device or a driver.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from videoaccel.kernels.launch import Launch

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
ALIGNED = [["tt.divisibility", 16]]
"""What a launch on a device finds for pointers that torch allocates, and for sizes that are multiples of
16."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiled kernel takes.

    Attributes:
        shared: bytes of shared memory a program.
        registers: a thread; None where the compiler doesn't say.
        spill_bytes: of registers that a thread keeps in memory instead; None where the compiler doesn't say.
    """

    shared: int
    registers: int | None
    spill_bytes: int | None


def gpu_target(name: str) -> GPUTarget:
    """Triton's word for `sm_90` or `gfx942`."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64)


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compiles what a device of `target` would compile for this launch.

    Args:
        launch: its tensors may be on `meta`; they are taken to be aligned to 16 bytes, as torch's allocations
        are.
        target: `sm_90`, `gfx942`, ...

    Raises:
        RuntimeError: Triton was imported as an interpreter, which has no compiler.
        Exception: what Triton's compiler raises.
    """
    if not isinstance(launch.kernel, triton.runtime.JITFunction):
        raise RuntimeError("Triton interprets kernels here: unset TRITON_INTERPRET before it is imported")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    given = {**launch.arguments, **launch.config.blocks}
    for parameter in launch.kernel.params:
        value, place = given[parameter.name], (parameter.num,)
        if (
            parameter.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
        ):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            attributes[place] = ALIGNED
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[place] = ALIGNED
    source = triton.compiler.ASTSource(launch.kernel, signature, constants, attributes)
    kernel = triton.compile(source, target=gpu_target(target), options=dict(launch.options))
    binary = kernel.asm.get("cubin")
    registers, spilled = (None, None) if binary is None else resources(binary)
    if binary is None and "amdgcn" in kernel.asm:
        registers, spilled = amd_resources(kernel.asm["amdgcn"])
    return Compiled(shared=int(kernel.metadata.shared), registers=registers, spill_bytes=spilled)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and its bytes of stack, which kernels without arrays use for spills alone."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(cubin)
        shown = subprocess.run(
            [str(tool), "--dump-resource-usage", path], capture_output=True, text=True, check=True
        )
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown.stdout))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


def amd_resources(assembly: str) -> tuple[int | None, int | None]:
    """Vector registers of a thread and its bytes of scratch, as the assembler's notes state them."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return (
        int(registers.group(1)) if registers else None,
        int(scratch.group(1)) if scratch else None,
    )
