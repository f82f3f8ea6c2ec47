"""MiniMax-H3's AdaLN tables, made once for a schedule, with the projections that make them off the device.

A block's modulation depends on the noise levels of the step and on nothing else: not on the prompt, the seed
or the sample. The projections hold 13.0 of the full model's 33.1 billion parameters and are read anew at
every forward for tables of a few rows. So the tables of all steps are made block by block, one projection on
the device at a time, and kept in host memory; a step's are uploaded when it begins (some 30 MB at full size).
They are made by the projection itself, from embeddings of the shape that the forward passes: its own bits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.host_memory import send_home
from videoaccel.pipelines.swap import swap_forward

HELD_BYTES = 6_000_000_000
"""Host memory for tables; the oldest go first. A schedule of 50 steps takes some 1.5 GB at full size."""
_SAMPLED = 32  # elements of each parameter that tell a changed one from what it was

Key = tuple[bytes, bytes]


class FoldedAdaLN:
    """The folded projections of one transformer.

    Args:
        transformer: a `MiniMaxH3Transformer3DModel`.
        undo: receives the inverse: the projections back on the device, bit for bit.

    Raises:
        UserError: a projection is neither a `torch.nn.Linear` nor one that PEFT wraps.
    """

    def __init__(self, transformer: Any, undo: ExitStack) -> None:
        self._blocks = [block.adaln_proj for block in transformer.transformer_blocks]
        self._time_proj, self._time_embedder = transformer.time_proj, transformer.time_embedder
        self._held: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._here = threading.local()
        for projection in self._blocks:
            _check(projection.linear)
        for index, projection in enumerate(self._blocks):
            send_home(projection.linear, undo)
            swap_forward(projection, self._forward_of(index), undo)

    def embeddings(self, timesteps: torch.Tensor) -> torch.Tensor:
        """`(N,)` timesteps to their `(N, E)` embedding, as the transformer's forward makes it."""
        dtype = next(self._time_embedder.parameters()).dtype
        embedded: torch.Tensor = self._time_embedder(self._time_proj(timesteps).to(dtype))
        return embedded

    @torch.no_grad()
    def prepare(self, timesteps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tables of every step, `(blocks, 3 N, 6 D)` in host memory; what is known is not made again.

        Args:
            timesteps: per step, the distinct ones `(N,)` on the transformer's device, in its order.
        """
        return self._tables([self.embeddings(step) for step in timesteps])

    @contextmanager
    def using(self, tables: torch.Tensor) -> Iterator[None]:
        """Within it, this thread's forwards read `tables` whatever embedding they are passed."""
        device = next(self._time_embedder.parameters()).device
        self._here.tables = tables.to(device, non_blocking=True)
        try:
            yield
        finally:
            self._here.tables = None

    def _forward_of(self, index: int) -> Any:
        def forward(temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tables: torch.Tensor | None = getattr(self._here, "tables", None)
            if tables is None:
                tables = self._looked_up(temb)
            return tables[index].chunk(6, dim=-1)

        return forward

    @torch.no_grad()
    def _looked_up(self, temb: torch.Tensor) -> torch.Tensor:
        """The tables of an embedding that nobody announced; a forward passes every block the same tensor."""
        last = getattr(self._here, "last", None)
        if last is None or last[0] is not temb:
            (tables,) = self._tables([temb])
            last = self._here.last = (temb, tables.to(temb.device, non_blocking=True))
        found: torch.Tensor = last[1]
        return found

    def _tables(self, tembs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weights = b"".join(_fingerprint(projection.linear) for projection in self._blocks)
        # One copy to the host for all of them.
        sizes = [temb.numel() for temb in tembs]
        flat = torch.split(torch.cat([temb.flatten() for temb in tembs]).cpu(), sizes)
        keys: list[Key] = [(row.view(torch.uint8).numpy().tobytes(), weights) for row in flat]
        with self._lock:
            missing = {key: temb for key, temb in zip(keys, tembs, strict=True) if key not in self._held}
            self._held.update(zip(missing, self._make(list(missing.values())), strict=True))
            found = [self._held[key] for key in keys]
            for key in keys:
                self._held.move_to_end(key)
            while sum(held.nbytes for held in self._held.values()) > HELD_BYTES and len(self._held) > 1:
                self._held.popitem(last=False)
        return found

    def _make(self, tembs: list[torch.Tensor]) -> list[torch.Tensor]:
        rows: list[list[torch.Tensor]] = [[] for _ in tembs]
        for projection in self._blocks:
            with _on_device(projection.linear, tembs[0].device if tembs else None):
                made = []
                for temb in tembs:
                    # What the stock forward does: the activation at the embedding's own precision.
                    given = torch.nn.functional.silu(temb).to(_dtype_of(projection.linear))
                    made.append(projection.linear(given).view(-1, 6 * projection.hidden_size))
            # A block at a time: of all of them the tables are a gigabyte on the device.
            for step, table in zip(rows, made, strict=True):
                step.append(table.cpu())
        return [_pinned(torch.stack(step), tembs[0].device) for step in rows]


def _check(linear: torch.nn.Module) -> None:
    if type(linear) is not torch.nn.Linear and not hasattr(linear, "active_adapters"):
        raise UserError(
            f"an AdaLN projection is a {type(linear).__name__}, whose tables can't be made ahead: leave "
            "folding off (kernels.fold: false), or give the checkpoint unquantised"
        )


def _dtype_of(linear: Any) -> torch.dtype:
    parameter: torch.nn.Parameter = next(linear.parameters())
    return parameter.dtype


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


@contextmanager
def _on_device(linear: torch.nn.Module, device: torch.device | None) -> Iterator[None]:
    parameters = list(linear.parameters())
    home = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(device, non_blocking=True)
        yield
    finally:
        for parameter, data in zip(parameters, home, strict=True):
            parameter.data = data


def _fingerprint(linear: Any) -> bytes:
    """What a projection computes, as far as anybody changes it: its weights, and a LoRA's and its scale.

    A change in place counts up a version, and a new tensor is at another address. A LoRA is merged into
    `.data`, which does neither, so weights are sampled too: what is merged is dense, and reading 26 GB at
    each request would cost what is saved.
    """
    parts = [type(linear).__name__.encode()]
    for name in ("active_adapters", "disable_adapters", "merged_adapters", "scaling"):
        parts.append(repr(getattr(linear, name, None)).encode())
    for name, parameter in linear.named_parameters():
        sample = _sample(parameter.data)
        place = f"{name} {parameter._version} {parameter.data_ptr()}".encode()
        parts.append(place + sample.float().cpu().numpy().tobytes())
    return b"|".join(parts)


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Elements of a weight from all over it: a step that divides its rows would meet one column only."""
    flat = weight.flatten()
    return flat[:: max(1, int(flat.numel() / 1.618 / _SAMPLED)) | 1]
