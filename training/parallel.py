"""One training run over several devices: each holds its own clips, and gradients are averaged.

`torchrun --standalone --nproc-per-node 2 -m training.dit ...`; without torchrun, one process and no traffic.
Weights start equal and see equal gradients and equal learning rates, so they stay equal.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist


class Ranks:
    """This process among those of the run."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)

    @property
    def first(self) -> bool:
        """Whether this is the process that logs and saves."""
        return self.rank == 0

    def share_of(self, count: int) -> int:
        """This process's part of a number of clips or of a batch."""
        return max(1, count // self.world)

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Meet the others, take rank 0's weights, and draw random numbers of one's own from here on.

        To be called once the data is made: that forks workers, and a fork beside a collective's threads can
        hang.
        """
        if self.world == 1:
            return
        # The clock is compared on the CPU: on the device it would stall every step.
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, 0)
        torch.manual_seed(torch.initial_seed() + 1_000_003 * self.rank)

    def agree(self, value: float) -> float:
        """The mean of a number over all processes."""
        if not dist.is_initialized():
            return value
        number = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(number)
        return float(number) / self.world

    def average(self, gradients: list[torch.Tensor]) -> None:
        """Replace gradients by their mean over all processes, in one message."""
        if not dist.is_initialized():
            return
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat /= self.world
        torch._foreach_copy_(gradients, list(torch._utils._unflatten_dense_tensors(flat, gradients)))

    def stop(self) -> None:
        """Wait for the others and part."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
