"""The libraries' own caches on the stock pipeline: what the restated peers are held to.

As shipped, none of them works on MiniMax-H3. Its block is not in diffusers' registry, and its loop never says
which step it is at. cache-dit 1.5.3 puts a forward without a signature in place; the loop takes the names of
the layout's tensors from the signature, and so passes none of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock

from evals.sampling import unpatchify
from videoaccel.forward import ForwardCall
from videoaccel.pipelines.request import StepInfo, Streams


def register_block() -> None:
    """Tells diffusers what MiniMax-H3's block takes and returns; for the whole process, and again is fine."""
    TransformerBlockRegistry.register(
        MiniMaxH3TransformerBlock,
        TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None),
    )


class InCacheContext:
    """A controller that runs each forward where diffusers' caches can see the step, and notes what they did.

    Args:
        transformer: the one that runs, with its cache enabled.

    Attributes:
        ran: of each step so far, whether the last block ran.
    """

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self.ran: list[bool] = []
        self._calls = 0

    def _count(self, *_: Any) -> None:
        self._calls += 1

    def velocity(self, call: ForwardCall) -> Streams:
        """One forward of the hooked transformer."""
        before = self._calls
        # The attention, which no cache hooks here: a skipped block is called, and does not call it.
        attention = self._transformer.transformer_blocks[-1].attn
        handle = attention.register_forward_pre_hook(self._count)
        place = {
            "step_index": call.step.index,
            "sigma": call.step.sigma["video"],
            "num_inference_steps": call.plan.forwards,
        }
        try:
            with self._transformer.cache_context("cond", **place):
                return call.dense()
        finally:
            handle.remove()
            self.ran.append(self._calls > before)

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        """None."""
        return None


def raw_vision(frames: int, edge: int) -> Callable[..., list[torch.Tensor]]:
    """SeaCache's `raw_vision_callback` for a clip without conditions.

    Args:
        frames, edge: of the latent.
    """

    def callback(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        return [unpatchify(kwargs["hidden_states"][0], frames, edge)]

    return callback


@contextmanager
def cache_dit_enabled(transformer: Any, cache_config: Any, calibrator_config: Any = None) -> Iterator[None]:
    """Runs cache-dit's DBCache on a MiniMax-H3 transformer while the context is open.

    Args:
        transformer: the one to cache; its `_cached_steps` are the steps that skipped, once a run is over.
        cache_config: a `DBCacheConfig` with `num_inference_steps`, the forwards of a run.
        calibrator_config: for example a `TaylorSeerCalibratorConfig`.

    Raises:
        ImportError: cache-dit, which is no requirement of this project, is not installed.
    """
    cache_dit = importlib.import_module("cache_dit")
    signature = inspect.signature(transformer.forward)
    adapter = cache_dit.BlockAdapter(
        transformer=transformer,
        blocks=transformer.transformer_blocks,
        forward_pattern=cache_dit.ForwardPattern.Pattern_3,
    )
    cache_dit.enable_cache(adapter, cache_config=cache_config, calibrator_config=calibrator_config)
    transformer.forward.__signature__ = signature
    try:
        yield
    finally:
        cache_dit.disable_cache(adapter)
