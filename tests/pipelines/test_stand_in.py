"""The stand-in passes for the transformer with everything but its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from videoaccel.pipelines.family import family_of
from videoaccel.pipelines.stand_in import looped


def test_a_pipeline_with_stand_ins_runs_where_its_transformer_is(build_pipe: Callable[..., Any]) -> None:
    pipe = build_pipe()
    task = family_of(pipe).tasks[0]
    (name,) = family_of(pipe).components(pipe, task)
    model = getattr(pipe, name).to("meta")
    calls: list[tuple[Any, str, dict[str, Any]]] = []

    def forward(*call: Any) -> tuple[str, ...]:
        calls.append(call)
        return ("answer",)

    view = looped(pipe, (name, "transformer_of_no_pipeline"), forward)
    stood_in = getattr(view, name)
    assert stood_in is not model and getattr(pipe, name) is model
    assert isinstance(stood_in, torch.nn.Module) and stood_in.config is model.config
    assert view.components[name] is stood_in
    # A pipeline takes its device from its modules, and its transformer comes first.
    assert view._execution_device == pipe._execution_device == torch.device("meta")
    assert stood_in(hidden_states=1) == ("answer",)
    with stood_in.cache_context("uncond"):
        stood_in(hidden_states=2)
    assert calls == [(model, "cond", {"hidden_states": 1}), (model, "uncond", {"hidden_states": 2})]
