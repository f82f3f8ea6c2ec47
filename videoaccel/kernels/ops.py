"""The ops, each with its implementations, best first: the table that selection and `doctor` read.

An entry names functions by their import path, so that nothing is imported until it is chosen.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

import torch

from videoaccel.kernels.registry import EAGER, Implementation, Needs, Op

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
TRITON = ("triton>=3.6 | pytorch-triton-rocm>=3.6",)


def _eager(where: str) -> Implementation:
    return Implementation(name=EAGER, where=f"videoaccel.kernels.{where}", note="torch's own ops")


def _triton(where: str, *, capability: tuple[int, int] = (8, 0), **sizes: int) -> Implementation:
    return Implementation(
        name="triton",
        where=f"videoaccel.kernels.{where}",
        needs=Needs(
            vendors=("nvidia", "amd"),
            capability=capability,
            dtypes=FLOATS,
            at_most=sizes,
            packages=TRITON,
        ),
        note="one pass over memory, float32 inside",
    )


def _linear_triton(name: str) -> Implementation:
    return Implementation(
        name="triton",
        where=f"videoaccel.kernels.linear_fp8_triton:{name}",
        needs=Needs(
            vendors=("nvidia", "amd"),
            capability=(8, 9),
            dtypes=FLOATS,
            multiples={"in_features": 16},
            packages=TRITON,
        ),
        note="any number of output channels, float32 sums of each 128 terms",
    )


_ATTENTION = Op(
    name="attention",
    what="dense softmax attention over the whole packed sequence",
    implementations=(
        Implementation(
            name="cudnn",
            where="videoaccel.kernels.attention:cudnn",
            needs=Needs(
                vendors=("nvidia",),
                capability=(8, 0),
                dtypes=HALF,
                multiples={"head_dim": 8},
                at_most={"head_dim": 128},
            ),
            note="cuDNN's fused attention; the fastest dense one measured on Hopper",
        ),
        Implementation(
            name="flash",
            where="videoaccel.kernels.attention:flash",
            needs=Needs(
                vendors=("nvidia", "amd"),
                capability=(8, 0),
                dtypes=HALF,
                multiples={"head_dim": 8},
                at_most={"head_dim": 256},
            ),
            note="FlashAttention-2, in torch",
        ),
        Implementation(
            name="efficient",
            where="videoaccel.kernels.attention:efficient",
            needs=Needs(vendors=("nvidia", "amd"), dtypes=FLOATS, multiples={"head_dim": 4}),
            note="memory-efficient attention, in torch; takes float32",
        ),
        Implementation(name=EAGER, where="videoaccel.kernels.attention:eager", note="torch's own choice"),
    ),
)

_ALL = (
    _ATTENTION,
    Op(
        name="norm_modulate",
        what="RMSNorm, then AdaLN's scale and shift by row index",
        implementations=(
            _triton("modulation_triton:norm_modulate", width=16384),
            _eager("modulation:norm_modulate_reference"),
        ),
    ),
    Op(
        name="gate_residual",
        what="AdaLN's gate by row index, then the residual",
        implementations=(
            _triton("modulation_triton:gate_residual", width=16384),
            _eager("modulation:gate_residual_reference"),
        ),
    ),
    Op(
        name="gate_residual_norm_modulate",
        what="gate and residual, and the norm and modulation that follow, in one pass",
        implementations=(
            _triton("modulation_triton:gate_residual_norm_modulate", width=16384),
            _eager("modulation:gate_residual_norm_modulate_reference"),
        ),
    ),
    Op(
        name="qk_norm_rope",
        what="RMSNorm of queries and keys by head, then the 3-axis rotary embedding",
        implementations=(
            _triton("qk_norm_rope_triton:qk_norm_rope", head_dim=256),
            _eager("qk_norm_rope:qk_norm_rope_reference"),
        ),
    ),
    Op(
        name="swiglu",
        what="the gated half of a SwiGLU feed-forward",
        implementations=(_triton("swiglu_triton:swiglu"), _eager("swiglu:swiglu_reference")),
    ),
    Op(
        name="quantize_fp8",
        what="rows to FP8, with a scale a row or a block of 128 channels",
        implementations=(
            _triton("quantize_fp8_triton:quantize_fp8", capability=(8, 9), width=16384),
            _eager("quantize_fp8:quantize_fp8_reference"),
        ),
    ),
    Op(
        name="linear_fp8",
        what="a linear layer on FP8 codes, with a scale a row on either side",
        implementations=(
            Implementation(
                name="scaled_mm",
                where="videoaccel.kernels.linear_fp8:linear_fp8_scaled_mm",
                needs=Needs(
                    vendors=("nvidia",),
                    capability=(8, 9),
                    dtypes=HALF,
                    multiples={"in_features": 16, "out_features": 16},
                ),
                note="torch's own product, scales by row in its epilogue",
            ),
            _linear_triton("linear_fp8"),
            _eager("linear_fp8:linear_fp8_reference"),
        ),
    ),
    Op(
        name="linear_fp8_block",
        what="a linear layer on FP8 codes, with a scale for 128 channels and for 128 x 128 of the weight",
        implementations=(
            _linear_triton("linear_fp8_block"),
            _eager("linear_fp8_block:linear_fp8_block_reference"),
        ),
    ),
)

OPS: Mapping[str, Op] = types.MappingProxyType({op.name: op for op in _ALL})
"""Every op by name."""
