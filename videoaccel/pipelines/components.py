"""One component of a checkpoint: where its files come from, and whether its weights are its config's."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.facts import ModelFacts
from videoaccel.pipelines.run import is_out_of_memory

# A decoder's output head is tied to its embeddings, or left out of a checkpoint that only encodes.
_HEAD = "lm_head.weight"
_LIBRARIES = ("diffusers", "transformers")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where a checkpoint is, and what its small files say.

    Attributes:
        folder: its folder; of a hub id, the snapshot in the hub's cache.
        hub_id: `owner/name` where it was asked for by that; None for a folder, which nothing is fetched for.
        index: the pipeline index: its class, and each component's library and class.
        facts: those of `videoaccel.json` beside it, or the stock ones where there is none.
    """

    folder: Path
    hub_id: str | None
    index: Mapping[str, Any]
    facts: ModelFacts

    @property
    def class_name(self) -> str:
        """Name of the diffusers pipeline class that it is a checkpoint of."""
        return str(self.index.get("_class_name"))


def load_component(
    checkpoint: Checkpoint, name: str, spec: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """A component as its diffusers spec says, on `device`.

    Raises:
        UserError: it is not in the folder, can't be read, or its weights are not those of its config.
    """
    source = source_of(checkpoint, name, spec)
    kind = spec.type_hint
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        try:
            return spec.load(local_files_only=checkpoint.hub_id is None)
        except Exception as error:
            raise unreadable(checkpoint, name, error) from error
    fields = {"subfolder": spec.subfolder, "variant": spec.variant, "revision": spec.revision}
    options = {key: value for key, value in fields.items() if value is not None}
    model = load_model(checkpoint, name, kind, str(source), dtype, **options)
    # What `ComponentSpec.load` marks its components with: the pipeline reads where they came from off it.
    model._diffusers_load_id = spec.load_id
    return model.to(device)


def load_model(
    checkpoint: Checkpoint, name: str, kind: Any, source: str, dtype: torch.dtype, **options: Any
) -> torch.nn.Module:
    """A diffusers or transformers model, all of whose weights were read and all of which were used.

    Raises:
        UserError: it can't be read, or its weights are not those of its config.
    """
    # It lists every name, in pages, of what is told in one line below.
    log = logging.getLogger("diffusers.models.modeling_utils")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        model, info = kind.from_pretrained(
            source,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=checkpoint.hub_id is None,
            **options,
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(
                f"component {name} of {checkpoint.folder} does not fit in memory; use a larger machine"
            ) from error
        raise unreadable(checkpoint, name, error) from error
    finally:
        log.setLevel(before)
    # Both libraries warn here and go on: weights left out, or made up, would serve another model.
    for key, what in (
        ("missing_keys", "lack"),
        ("unexpected_keys", "hold weights that its config has no place for:"),
        ("mismatched_keys", "have other shapes than its config says:"),
    ):
        names = [entry if isinstance(entry, str) else entry[0] for entry in info.get(key) or ()]
        wrong = sorted(entry for entry in names if entry != _HEAD)
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise UserError(
                f"the weights of component {name} of {checkpoint.folder} {what} {wrong[0]}{more}; "
                "its config.json and its weights must come from one checkpoint: copy both again"
            )
    whole: torch.nn.Module = model.eval()
    return whole


def model_classes(checkpoint: Checkpoint) -> dict[str, Any]:
    """The components of a checkpoint that hold weights, as its index names them.

    Raises:
        UserError: a local folder lacks one, or its class is not in the library installed here.
    """
    found: dict[str, Any] = {}
    for name, value in checkpoint.index.items():
        # What a pipeline was saved without is [null, null].
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2 or None in value:
            continue
        library, class_name = value
        kind = getattr(importlib.import_module(library), class_name, None) if library in _LIBRARIES else None
        if kind is None:
            raise UserError(
                f"component {name} of {checkpoint.folder} is a {library} {class_name}, which is not "
                "installed here; upgrade the library, or check the checkpoint's index"
            )
        if checkpoint.hub_id is None and not (checkpoint.folder / name).is_dir():
            raise UserError(f"{checkpoint.folder} lacks component {name}; copy the whole checkpoint")
        if issubclass(kind, torch.nn.Module):
            found[name] = kind
    return found


def source_of(checkpoint: Checkpoint, name: str, spec: Any) -> str:
    """The folder or hub id that a component is read from; of a local folder always the folder itself.

    Raises:
        UserError: a local folder lacks it. Its index may name a hub id, which nobody asked for.
    """
    folder, subfolder, named = checkpoint.folder, spec.subfolder or name, spec.pretrained_model_name_or_path
    if (folder / subfolder).is_dir() and str(named) == str(folder):
        return str(folder)
    if checkpoint.hub_id is None or named is None:
        raise UserError(f"{folder} lacks component {name} (folder {subfolder}); copy the whole checkpoint")
    return str(named)


def unreadable(checkpoint: Checkpoint, name: str, error: Exception) -> UserError:
    """The one line for a component whose files a library refused."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(
        f"cannot load component {name} of {checkpoint.folder}: {reason[0][:300]}; "
        "check that its folder is whole, or download the checkpoint again"
    )


def on_meta(checkpoint: Checkpoint, name: str, spec: Any) -> torch.nn.Module:
    """A model of the sizes its config gives, with no memory behind it.

    Raises:
        UserError: its config is not there or can't be read.
    """
    subfolder = spec.subfolder or name
    try:
        here = (checkpoint.folder / subfolder / "config.json").is_file()
        source = str(checkpoint.folder) if here else source_of(checkpoint, name, spec)
        config = spec.type_hint.load_config(
            source, subfolder=subfolder, local_files_only=checkpoint.hub_id is None
        )
        with torch.device("meta"):
            model: torch.nn.Module = spec.type_hint.from_config(config)
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"cannot read the config of {name} in {checkpoint.folder}; copy the whole checkpoint"
        ) from error
    return model
