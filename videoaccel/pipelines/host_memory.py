"""Tensors in host memory: where weights wait that the device does not need at each forward."""

from __future__ import annotations

from contextlib import ExitStack

import torch


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the device can read without a detour (pinned), or the tensor itself where it is there."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    # Waits for the copy: the buffer may be read before anything else is queued.
    return host.copy_(tensor)


def send_home(module: torch.nn.Module, undo: ExitStack) -> None:
    """Moves a module's parameters to host memory; `undo` brings them back, bit for bit."""
    for parameter in module.parameters():
        device = parameter.device
        if device.type == "cpu":
            continue
        parameter.data = in_host_memory(parameter.data)

        def back(parameter: torch.nn.Parameter = parameter, device: torch.device = device) -> None:
            parameter.data = parameter.data.to(device)

        undo.callback(back)
