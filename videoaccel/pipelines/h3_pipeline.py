"""The stock MiniMax-H3 modular pipeline, with the facts of the checkpoint at hand served from its folder."""

from __future__ import annotations

from typing import Any

from diffusers import MiniMaxH3ModularPipeline

from videoaccel.pipelines.facts import ModelFacts


class H3Pipeline(MiniMaxH3ModularPipeline):  # type: ignore[misc]
    """`MiniMaxH3ModularPipeline` reads three facts from `model_facts` that the stock class hard-codes.

    Blocks, components and call are the stock ones; with the default facts this class is the stock class.
    """

    def __init__(self, *args: Any, facts: ModelFacts | None = None, **kwargs: Any) -> None:
        self.model_facts = facts or ModelFacts()
        super().__init__(*args, **kwargs)

    @property
    def min_duration(self) -> float:
        """Shortest clip, s."""
        return self.model_facts.min_seconds

    @property
    def max_duration(self) -> float:
        """Longest clip, s."""
        return self.model_facts.max_seconds

    @property
    def text_encoder_layer(self) -> int:
        """Index of the text encoder's hidden state that conditions the transformer."""
        return self.model_facts.text_encoder_layer
