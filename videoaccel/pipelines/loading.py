"""Loads a pipeline: the bundled model, a folder or a hub id, by one code path for all three."""

from __future__ import annotations

import contextlib
import importlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from videoaccel.errors import UserError, unknown
from videoaccel.pipelines.components import Place, load_component, load_model, on_meta
from videoaccel.pipelines.facts import FACTS_FILE, ModelFacts, read_facts
from videoaccel.pipelines.family import family_named

BUNDLED = ("tiny-h3",)
_INDEXES = ("modular_model_index.json", "model_index.json")
_LIBRARIES = ("diffusers", "transformers")
_WAN_CLASSES = {"t2v": "WanPipeline", "i2v": "WanImageToVideoPipeline"}


def bundled_folder(name: str) -> Path:
    """Folder of a model that ships in the package.

    Raises:
        UserError: no such bundled model.
    """
    folder = Path(str(resources.files("videoaccel"))) / "assets" / name
    if name not in BUNDLED or not folder.is_dir():
        raise UserError(
            f"no bundled model {name!r}; bundled: {', '.join(BUNDLED)} (reinstall if its files are gone)"
        )
    return folder


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        return found if found is not None else torch.device("cpu")
    return torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU, where bf16 is some 60 times slower; bfloat16 on an accelerator."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load(
    model: str | Path = "tiny-h3",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    task: str | None = None,
) -> Any:
    """A pipeline ready to run. Random weights come from `random_weights.build_random_h3` instead.

    Args:
        model: a bundled name (`tiny-h3`), a folder in the diffusers layout, or a hub id `owner/name`.
        device: where it runs; None is `default_device()`.
        dtype: precision of the weights; None is `default_dtype(device)`.
        task: loads only the components of this task; None loads those of every task (weights that two
            components share are loaded once).

    Returns:
        The pipeline: `H3Pipeline`, or diffusers' `WanPipeline` / `WanImageToVideoPipeline`.

    Raises:
        UserError: no such model, not a diffusers folder, unreachable, a component missing, an unknown task.
    """
    target = check_device(device)
    kind = dtype or default_dtype(target)
    place = _place_of(model)
    index = _read_index(place.folder)
    class_name = str(index.get("_class_name"))
    if class_name == "MiniMaxH3ModularPipeline":
        return _load_h3(place, _facts(place.folder, "minimax_h3"), target, kind, task)
    if class_name in _WAN_CLASSES.values():
        _facts(place.folder, "wan")
        return _load_wan(place, index, class_name, target, kind, task)
    raise UserError(
        f"{model} holds a {class_name}; supported: MiniMaxH3ModularPipeline, WanPipeline, "
        "WanImageToVideoPipeline"
    )


def load_shell(model: str | Path = "tiny-h3") -> Any:
    """An H3 pipeline from a model's small files only, to check requests against before any weight is read.

    Schedulers and tokenizer are real; transformer and video VAE are on the meta device, for their sizes.
    `Family.resolve`, `canvas`, `schedules` and `steps` answer as on the loaded pipeline; nothing runs.

    Returns:
        The pipeline, or None for a family whose requests are checked on the loaded pipeline only (Wan).

    Raises:
        UserError: as `load`.
    """
    place = _place_of(model)
    folder = place.folder
    index = _read_index(folder)
    if index.get("_class_name") != "MiniMaxH3ModularPipeline":
        return None
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks

    from videoaccel.pipelines.h3_pipeline import H3Pipeline

    facts = _facts(folder, "minimax_h3")
    _check_layer(folder, facts)
    pipe = H3Pipeline(MiniMaxH3Blocks(), pretrained_model_name_or_path=str(folder), facts=facts)
    for name in ("tokenizer", "scheduler", "audio_scheduler"):
        spec = pipe._component_specs[name]
        part = load_component(place, name, spec, torch.device("cpu"), torch.float32)
        pipe.register_components(**{name: part})
    for name in ("transformer", "vae"):
        pipe.register_components(**{name: on_meta(place, name, pipe._component_specs[name])})
    return pipe


def check_device(device: str | torch.device | None) -> torch.device:
    """The device a name means.

    Raises:
        UserError: not a device, or not one of this machine's.
    """
    if device is None:
        return default_device()
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise UserError(f"device {device!r} cannot be used here; try --device {default_device()}") from error
    # Others exist to torch and compute nothing: `meta` has shapes only.
    if place.type not in ("cpu", default_device().type):
        raise UserError(
            f"device {str(device)!r} holds no numbers to compute with; try --device {default_device()}"
        )
    return place


def _place_of(model: str | Path) -> Place:
    """Where a model is; the small files of a hub id are fetched through the hub's own cache."""
    if str(model) in BUNDLED:
        return Place(folder=bundled_folder(str(model)))
    path = Path(model).expanduser()
    if path.is_dir():
        return Place(folder=path)
    name = str(model)
    if path.exists():
        raise UserError(f"{name} is a file; give the folder that holds {_INDEXES[0]}")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(
            f"no model {name!r}: not bundled ({', '.join(BUNDLED)}), not a folder, not a hub id owner/name"
        )
    return Place(folder=_hub_snapshot(name), hub_id=name)


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    # Only the small files here: components fetch their own weights, and only the task's.
    for index in _INDEXES:
        try:
            found = Path(hf_hub_download(name, index)).parent
        except LocalEntryNotFoundError as error:
            raise UserError(
                f"cannot reach the hub for {name} and it is not cached; download it, give its folder"
            ) from error
        except EntryNotFoundError:
            continue
        except RepositoryNotFoundError as error:
            raise UserError(
                f"no model {name!r} on the hub (or it is private); check the name, or log in"
            ) from error
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise UserError(f"cannot fetch {name}: {error}; download it and give its folder") from error
        with contextlib.suppress(EntryNotFoundError, HfHubHTTPError, OSError):
            hf_hub_download(name, FACTS_FILE)
        return found
    raise UserError(f"{name} on the hub is not in the diffusers layout: no {' or '.join(_INDEXES)}")


def _read_index(folder: Path) -> dict[str, Any]:
    for name in _INDEXES:
        path = folder / name
        if path.is_file():
            try:
                index: Any = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(
                    f"cannot read {path}: {error}; restore it from the checkpoint's source"
                ) from error
            if isinstance(index, dict):
                return index
    raise UserError(
        f"{folder} is not in the diffusers layout: no {' or '.join(_INDEXES)}; point at the folder that "
        "holds it"
    )


def _facts(folder: Path, family: str) -> ModelFacts:
    """The facts beside a checkpoint; UserError where they are those of another family's."""
    path = folder / FACTS_FILE
    facts = read_facts(path)
    if path.is_file() and facts.family != family:
        raise UserError(
            f"{path} is of family {facts.family!r} and the model beside it of {family!r}; restore "
            f"{FACTS_FILE} from the checkpoint's source"
        )
    return facts


def _load_h3(
    place: Place, facts: ModelFacts, device: torch.device, dtype: torch.dtype, task: str | None
) -> Any:
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks

    from videoaccel.pipelines.h3_pipeline import H3Pipeline

    tasks = family_named("minimax_h3").tasks
    if task is not None and task not in tasks:
        raise unknown("task", task, tasks)
    _check_layer(place.folder, facts)
    pipe = H3Pipeline(MiniMaxH3Blocks(), pretrained_model_name_or_path=str(place.folder), facts=facts)
    wanted = {
        spec.name
        for name in ([task] if task else tasks)
        for spec in pipe.blocks.get_workflow(name).expected_components
        if pipe.get_component_spec(spec.name).default_creation_method == "from_pretrained"
    }
    shared: dict[tuple[Any, ...], Any] = {}
    for name in sorted(wanted - {"processor"}):
        spec = pipe._component_specs[name]
        key = (spec.pretrained_model_name_or_path, spec.subfolder, spec.variant, spec.revision)
        if key not in shared:
            shared[key] = load_component(place, name, spec, device, dtype)
        pipe.register_components(**{name: shared[key]})
    # Set without register_components, which would look the class up in a library it does not come from.
    pipe.processor = _load_processor(place, pipe._component_specs["processor"], pipe.tokenizer)
    return pipe


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


def _load_processor(place: Place, spec: Any, tokenizer: Any) -> Any:
    from videoaccel.pipelines.qwen_processor import QwenProcessor

    folder = place.folder / (spec.subfolder or "processor")
    if not folder.is_dir() and place.hub_id is not None:
        from huggingface_hub import snapshot_download

        root = snapshot_download(
            spec.pretrained_model_name_or_path, allow_patterns=[f"{spec.subfolder}/*.json"]
        )
        folder = Path(root) / (spec.subfolder or "processor")
    return QwenProcessor.from_folder(folder, tokenizer)


def _load_wan(
    place: Place,
    index: dict[str, Any],
    class_name: str,
    device: torch.device,
    dtype: torch.dtype,
    task: str | None,
) -> Any:
    import diffusers

    served = next(name for name, known in _WAN_CLASSES.items() if known == class_name)
    if task is not None and task not in _WAN_CLASSES:
        raise unknown("task", task, _WAN_CLASSES)
    if task not in (None, served):
        raise UserError(
            f"{place.folder} is a {class_name} and serves {served}, not {task}; load another checkpoint"
        )
    source = str(place.folder) if place.hub_id is None else place.hub_id
    models = {
        name: load_model(place, name, kind, source, dtype, subfolder=name)
        for name, kind in _model_classes(place, index).items()
    }
    local = place.hub_id is None
    try:
        pipe = getattr(diffusers, class_name).from_pretrained(
            source, dtype=dtype, local_files_only=local, **models
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"cannot load {place.folder}: {reason[0][:300]}; check that the checkpoint is whole"
        ) from error
    return pipe.to(device)


def _model_classes(place: Place, index: dict[str, Any]) -> dict[str, Any]:
    """The components of a pipeline index that hold weights, by name.

    Raises:
        UserError: a local folder lacks one, or its class is not in the library installed here.
    """
    found: dict[str, Any] = {}
    for name, value in index.items():
        # What a pipeline was saved without is [null, null].
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2 or None in value:
            continue
        library, class_name = value
        kind = getattr(importlib.import_module(library), class_name, None) if library in _LIBRARIES else None
        if kind is None:
            raise UserError(
                f"component {name} of {place.folder} is a {library} {class_name}, which is not installed "
                "here; upgrade the library, or check the checkpoint's index"
            )
        if place.hub_id is None and not (place.folder / name).is_dir():
            raise UserError(f"{place.folder} lacks component {name}; copy the whole checkpoint")
        if issubclass(kind, torch.nn.Module):
            found[name] = kind
    return found
