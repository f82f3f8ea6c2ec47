"""One component of a checkpoint: where its files come from, and whether its weights are its config's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.run import is_out_of_memory

# A decoder's output head is tied to its embeddings, or left out of a checkpoint that only encodes.
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a checkpoint is.

    Attributes:
        folder: its folder; of a hub id, the snapshot in the hub's cache.
        hub_id: `owner/name` where it was asked for by that; None for a folder, which nothing is fetched for.
    """

    folder: Path
    hub_id: str | None = None


def load_component(place: Place, name: str, spec: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A component as its diffusers spec says, on `device`.

    Raises:
        UserError: it is not in the folder, can't be read, or its weights are not those of its config.
    """
    source = source_of(place, name, spec)
    kind = spec.type_hint
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        try:
            return spec.load(local_files_only=place.hub_id is None)
        except Exception as error:
            raise unreadable(place, name, error) from error
    fields = {"subfolder": spec.subfolder, "variant": spec.variant, "revision": spec.revision}
    options = {key: value for key, value in fields.items() if value is not None}
    model = load_model(place, name, kind, str(source), dtype, **options)
    # What `ComponentSpec.load` marks its components with: the pipeline reads where they came from off it.
    model._diffusers_load_id = spec.load_id
    return model.to(device)


def load_model(
    place: Place, name: str, kind: Any, source: str, dtype: torch.dtype, **options: Any
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
            source, dtype=dtype, output_loading_info=True, local_files_only=place.hub_id is None, **options
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(
                f"component {name} of {place.folder} does not fit in memory; use a larger machine"
            ) from error
        raise unreadable(place, name, error) from error
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
                f"the weights of component {name} of {place.folder} {what} {wrong[0]}{more}; "
                "its config.json and its weights must come from one checkpoint: copy both again"
            )
    whole: torch.nn.Module = model.eval()
    return whole


def source_of(place: Place, name: str, spec: Any) -> str:
    """The folder or hub id that a component is read from; of a local folder always the folder itself.

    Raises:
        UserError: a local folder lacks it. Its index may name a hub id, which nobody asked for.
    """
    subfolder = spec.subfolder or name
    if (place.folder / subfolder).is_dir() and str(spec.pretrained_model_name_or_path) == str(place.folder):
        return str(place.folder)
    if place.hub_id is None or spec.pretrained_model_name_or_path is None:
        raise UserError(
            f"{place.folder} lacks component {name} (folder {subfolder}); copy the whole checkpoint"
        )
    return str(spec.pretrained_model_name_or_path)


def unreadable(place: Place, name: str, error: Exception) -> UserError:
    """The one line for a component whose files a library refused."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(
        f"cannot load component {name} of {place.folder}: {reason[0][:300]}; "
        "check that its folder is whole, or download the checkpoint again"
    )


def on_meta(place: Place, name: str, spec: Any) -> torch.nn.Module:
    """A model of the sizes its config gives, with no memory behind it.

    Raises:
        UserError: its config is not there or can't be read.
    """
    subfolder = spec.subfolder or name
    try:
        here = (place.folder / subfolder / "config.json").is_file()
        source = str(place.folder) if here else source_of(place, name, spec)
        config = spec.type_hint.load_config(
            source, subfolder=subfolder, local_files_only=place.hub_id is None
        )
        with torch.device("meta"):
            model: torch.nn.Module = spec.type_hint.from_config(config)
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"cannot read the config of {name} in {place.folder}; copy the whole checkpoint"
        ) from error
    return model
