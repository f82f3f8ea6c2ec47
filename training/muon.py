"""Muon over stacks of equal matrices: the same update as `torch.optim.Muon`, in a fortieth of the kernels.

A small transformer has dozens of matrices of few shapes. One Newton-Schulz iteration per matrix is some two
thousand launches a step; on a stack of all matrices of a shape it is three.
tests/training/test_muon.py holds it against torch's.
"""

import math
from collections import defaultdict

import torch


def orthogonal(stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """`(n, r, c)` bfloat16: each matrix of a stack with its singular values brought near 1.

    Quintic Newton-Schulz iteration (Jordan et al., 2024).
    """
    a, b, c = coefficients
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


class StackedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, stepping all matrices of a shape at once."""

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every matrix that has a gradient."""
        if closure is not None:
            raise ValueError("StackedMuon takes no closure: compute the loss before step()")
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                gradients = [parameter.grad for parameter in parameters]
                for parameter in parameters:
                    if "momentum_buffer" not in self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
                updates = orthogonal(torch.stack(ahead), group["ns_coefficients"], group["ns_steps"])
                rate = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype)), alpha=-rate)
