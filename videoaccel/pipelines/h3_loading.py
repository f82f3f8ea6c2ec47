"""Loads a MiniMax-H3 checkpoint: a task's components with their weights, or the small files alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.components import Checkpoint, load_component, on_meta
from videoaccel.pipelines.facts import FACTS_FILE, ModelFacts


def load_h3(checkpoint: Checkpoint, tasks: Iterable[str], device: torch.device, dtype: torch.dtype) -> Any:
    """An `H3Pipeline` with the components of `tasks`; weights that two of them share are loaded once.

    Raises:
        UserError: as `Family.load`.
    """
    pipe = _empty(checkpoint)
    wanted = {
        spec.name
        for task in tasks
        for spec in pipe.blocks.get_workflow(task).expected_components
        if pipe.get_component_spec(spec.name).default_creation_method == "from_pretrained"
    }
    shared: dict[tuple[Any, ...], Any] = {}
    for name in sorted(wanted - {"processor"}):
        spec = pipe._component_specs[name]
        key = (spec.pretrained_model_name_or_path, spec.subfolder, spec.variant, spec.revision)
        if key not in shared:
            shared[key] = load_component(checkpoint, name, spec, device, dtype)
        pipe.register_components(**{name: shared[key]})
    # Set without register_components, which would look the class up in a library it does not come from.
    pipe.processor = _load_processor(checkpoint, pipe._component_specs["processor"], pipe.tokenizer)
    return pipe


def h3_shell(checkpoint: Checkpoint) -> Any:
    """See `Family.shell`: schedulers and tokenizer are real, transformer and video VAE on the meta device."""
    pipe = _empty(checkpoint)
    for name in ("tokenizer", "scheduler", "audio_scheduler"):
        spec = pipe._component_specs[name]
        part = load_component(checkpoint, name, spec, torch.device("cpu"), torch.float32)
        pipe.register_components(**{name: part})
    for name in ("transformer", "vae"):
        pipe.register_components(**{name: on_meta(checkpoint, name, pipe._component_specs[name])})
    return pipe


def _empty(checkpoint: Checkpoint) -> Any:
    """The pipeline with its facts and no component yet."""
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks

    from videoaccel.pipelines.h3_pipeline import H3Pipeline

    folder, facts = checkpoint.folder, checkpoint.facts
    _check_layer(folder, facts)
    return H3Pipeline(MiniMaxH3Blocks(), pretrained_model_name_or_path=str(folder), facts=facts)


def _check_layer(folder: Path, facts: ModelFacts) -> None:
    """UserError where the text encoder is too shallow for the layer that is to condition the transformer."""
    path = folder / "text_encoder" / "config.json"
    try:
        # Not there: an id whose encoder is still to be fetched, or a fault that loading reports.
        config: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        depth = config.get("text_config", {}).get("num_hidden_layers")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {error}; restore it from the checkpoint's source") from error
    # The last hidden state has been through the final norm and is no conditioning.
    if isinstance(depth, int) and facts.text_encoder_layer >= depth:
        where = folder / FACTS_FILE
        said = f"{where} gives" if where.is_file() else f"there is no {where}, so it is the released model's"
        raise UserError(
            f"text_encoder_layer must be below the text encoder's {depth} layers, and {said} "
            f"{facts.text_encoder_layer}; restore {FACTS_FILE} from the checkpoint's source"
        )


def _load_processor(checkpoint: Checkpoint, spec: Any, tokenizer: Any) -> Any:
    from videoaccel.pipelines.qwen_processor import QwenProcessor

    folder = checkpoint.folder / (spec.subfolder or "processor")
    if not folder.is_dir() and checkpoint.hub_id is not None:
        from huggingface_hub import snapshot_download

        root = snapshot_download(
            spec.pretrained_model_name_or_path, allow_patterns=[f"{spec.subfolder}/*.json"]
        )
        folder = Path(root) / (spec.subfolder or "processor")
    return QwenProcessor.from_folder(folder, tokenizer)
