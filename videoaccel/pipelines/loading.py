"""Loads a pipeline: the bundled model, a folder or a hub id, by one code path for all three."""

from __future__ import annotations

import contextlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from videoaccel.errors import UserError, unknown
from videoaccel.pipelines.components import Checkpoint
from videoaccel.pipelines.facts import FACTS_FILE, ModelFacts, read_facts
from videoaccel.pipelines.family import FAMILIES, Family, family_served_by
from videoaccel.pipelines.registry import BUNDLED, DEFAULT_MODEL

_INDEXES = ("modular_model_index.json", "model_index.json")


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
    model: str | Path = DEFAULT_MODEL,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    task: str | None = None,
) -> Any:
    """A pipeline ready to run. Random weights come from `Family.full_size` instead.

    Args:
        model: a bundled name (`tiny-h3`), a folder in the diffusers layout, or a hub id `owner/name`.
        device: where it runs; None is `default_device()`.
        dtype: precision of the weights; None is `default_dtype(device)`.
        task: loads only the components of this task; None loads those of every task (weights that two
            components share are loaded once).

    Returns:
        The pipeline: of a class that the model's family serves.

    Raises:
        UserError: no such model, not a diffusers folder, unreachable, a component missing, an unknown task.
    """
    target = check_device(device)
    family, checkpoint = _found(model)
    if task is not None and task not in family.tasks:
        raise unknown("task", task, family.tasks)
    return family.load(checkpoint, device=target, dtype=dtype or default_dtype(target), task=task)


def load_shell(model: str | Path = DEFAULT_MODEL) -> Any:
    """A pipeline from a model's small files only, to check requests against before any weight is read.

    Returns:
        See `Family.shell`; None for a family whose requests are checked on the loaded pipeline only.

    Raises:
        UserError: as `load`.
    """
    family, checkpoint = _found(model)
    return family.shell(checkpoint)


def family_for(model: str | Path = DEFAULT_MODEL) -> Family:
    """The family that serves a model, by its small files.

    Raises:
        UserError: no such model, not a diffusers folder, unreachable, or no family serves it.
    """
    return _found(model)[0]


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
    except (RuntimeError, AssertionError, TypeError, NotImplementedError, ImportError) as error:
        raise UserError(f"device {device!r} cannot be used here; try --device {default_device()}") from error
    # Others exist to torch and compute nothing: `meta` has shapes only.
    if place.type not in ("cpu", default_device().type):
        raise UserError(
            f"device {str(device)!r} holds no numbers to compute with; try --device {default_device()}"
        )
    return place


def _found(model: str | Path) -> tuple[Family, Checkpoint]:
    """A model and the family that serves it."""
    folder, hub_id = _place_of(model)
    index = _read_index(folder)
    family = family_served_by(str(index.get("_class_name")))
    if family is None:
        served = ", ".join(name for entry in FAMILIES.values() for name in entry.pipeline_classes)
        raise UserError(f"{model} holds a {index.get('_class_name')}; supported: {served}")
    return family, Checkpoint(folder=folder, hub_id=hub_id, index=index, facts=_facts(folder, family.name))


def _place_of(model: str | Path) -> tuple[Path, str | None]:
    """A model's folder, and its hub id if it is one; its small files are fetched to the hub's own cache."""
    if str(model) in BUNDLED:
        return bundled_folder(str(model)), None
    path = Path(model).expanduser()
    if path.is_dir():
        return path, None
    name = str(model)
    if path.exists():
        raise UserError(f"{name} is a file; give the folder that holds {_INDEXES[0]}")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(
            f"no model {name!r}: not bundled ({', '.join(BUNDLED)}), not a folder, not a hub id owner/name"
        )
    return _hub_snapshot(name), name


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
