"""Dense attention through one named backend of torch, which raises where that backend can't run.

`torch.nn.functional.scaled_dot_product_attention` left to itself falls back, in the end to a kernel that
writes the whole score matrix, and says nothing. All functions take `(B, L, H, D)` and return the same shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def _through(
    backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    with sdpa_kernel(backend):
        return eager(query, key, value)


def cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """cuDNN's fused attention. Raises `RuntimeError` where it can't run."""
    return _through(SDPBackend.CUDNN_ATTENTION, query, key, value)


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's own flash attention (Dao, 2023, FlashAttention-2). Raises `RuntimeError` where it can't run."""
    return _through(SDPBackend.FLASH_ATTENTION, query, key, value)


def efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's memory-efficient attention (from xFormers). Raises `RuntimeError` where it can't run."""
    return _through(SDPBackend.EFFICIENT_ATTENTION, query, key, value)


def eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's own choice, which on a CPU is a fused kernel too, and elsewhere may be the score matrix."""
    # Views, not copies: the backends read the strides.
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
