"""Several linears on one input as one matrix product, without a second copy of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch


def joint_weight(linears: Sequence[Any]) -> torch.Tensor | None:
    """The weights of bias-free linears as one `(sum of out, in)` view; None where they don't lie end to end.

    So they do after `join_weights`, until somebody moves, wraps or replaces one of them.
    """
    first = linears[0].weight if type(linears[0]) is torch.nn.Linear else None
    if first is None or not first.is_contiguous() or (torch.is_grad_enabled() and first.requires_grad):
        return None
    place, rows = first.storage_offset(), 0
    storage = first.untyped_storage().data_ptr()
    for linear in linears:
        weight = linear.weight if type(linear) is torch.nn.Linear else None
        if (
            weight is None
            or linear.bias is not None
            or weight.dtype != first.dtype
            or weight.shape[1] != first.shape[1]
            or not weight.is_contiguous()
            or weight.untyped_storage().data_ptr() != storage
            or weight.storage_offset() != place + rows * first.shape[1]
            # A LoRA, say, may hook in without a type of its own.
            or linear._forward_hooks
            or linear._forward_pre_hooks
            or "forward" in vars(linear)
        ):
            return None
        rows += weight.shape[0]
    return torch.as_strided(first.detach(), (rows, first.shape[1]), (first.shape[1], 1))


def join_weights(linears: Sequence[Any], undo: ExitStack) -> bool:
    """Lays the weights of plain linears end to end, so that one product serves them; says whether it could.

    The modules keep their parameters, whose values don't change.
    """
    if any(type(linear) is not torch.nn.Linear or linear.bias is not None for linear in linears):
        return False
    if len({(linear.weight.dtype, linear.weight.device, linear.in_features) for linear in linears}) > 1:
        return False

    def apart() -> None:
        # A weight made under inference mode could never be trained again.
        with torch.inference_mode(False):
            for linear in linears:
                linear.weight.data = linear.weight.data.clone()

    undo.callback(apart)
    with torch.inference_mode(False):
        joint = torch.cat([linear.weight.data for linear in linears])
    for linear, part in zip(
        linears, joint.split_with_sizes([linear.out_features for linear in linears]), strict=True
    ):
        linear.weight.data = part
    return True
