"""Loads a Wan checkpoint through diffusers' own pipeline classes, its models' weights checked."""

from __future__ import annotations

from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.components import Checkpoint, load_model, model_classes
from videoaccel.pipelines.wan_facts import PIPELINES


def load_wan(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, task: str | None) -> Any:
    """A `WanPipeline` or `WanImageToVideoPipeline`, whole.

    Raises:
        UserError: as `Family.load`.
    """
    import diffusers

    class_name = checkpoint.class_name
    served = next(name for name, known in PIPELINES.items() if known == class_name)
    if task not in (None, served):
        raise UserError(
            f"{checkpoint.folder} is a {class_name} and serves {served}, not {task}; load another checkpoint"
        )
    source = str(checkpoint.folder) if checkpoint.hub_id is None else checkpoint.hub_id
    models = {
        name: load_model(checkpoint, name, kind, source, dtype, subfolder=name)
        for name, kind in model_classes(checkpoint).items()
    }
    local = checkpoint.hub_id is None
    try:
        pipe = getattr(diffusers, class_name).from_pretrained(
            source, dtype=dtype, local_files_only=local, **models
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"cannot load {checkpoint.folder}: {reason[0][:300]}; check that the checkpoint is whole"
        ) from error
    return pipe.to(device)
