"""From command-line arguments to a Request: files read, limits checked, all before a model is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videoaccel.cli.values import Resolution, filled, resolution, seconds, whole
from videoaccel.config import TIERS, AccelConfig
from videoaccel.errors import UserError, unknown
from videoaccel.media import media_kind, read_audio, read_image, read_video
from videoaccel.media.intake import MediaLimits, existing_file
from videoaccel.pipelines.registry import DEFAULT_MODEL, FAMILIES, every_task

if TYPE_CHECKING:
    from videoaccel.pipelines.family import Family
    from videoaccel.pipelines.request import Plan, Reference, Request


def add_model_arguments(parser: argparse.ArgumentParser, *, task: str) -> None:
    """The flags that `generate` and `bench` share; `task` says in the help what happens without --task."""
    counted = ", ".join(f"{family.forwards} with {family.title}" for family in FAMILIES.values())
    parser.add_argument("--task", help=f"{', '.join(every_task())}; default: {task}")
    parser.add_argument(
        "--steps",
        type=whole(1),
        help=f"denoising steps as diffusers counts them: N are {counted.replace(' ', ' forwards ', 1)}; "
        "default: the model's own",
    )
    parser.add_argument("--seconds", type=seconds, help="length of the clip; default: the model's own")
    parser.add_argument(
        "--res", type=resolution, help="768p, or 1344x768 (width x height); default: the model's own"
    )
    parser.add_argument(
        "--model",
        type=filled,
        help=f"{DEFAULT_MODEL} (bundled), a folder in the diffusers layout, or a hub id owner/name; "
        f"default: {DEFAULT_MODEL}",
    )
    parser.add_argument(
        "--device", type=filled, help="cpu, cuda, cuda:1; default: the accelerator if there is one"
    )
    parser.add_argument(
        "--seed", type=whole(0), default=0, help="seed of the noise, the same on any machine; default: 0"
    )


def check_task(task: str | None) -> None:
    """Raises UserError for a task that no family has."""
    if task is not None and task not in every_task():
        raise unknown("task", task, every_task())


def check_files(args: argparse.Namespace) -> None:
    """Refuses missing files, unknown kinds, and combinations that no task takes; decodes nothing."""
    frames = [path for path in (args.first_frame, args.last_frame) if path]
    if args.reference and frames:
        raise UserError("--reference can't be combined with --first-frame or --last-frame: drop one of them")
    for path in args.reference:
        existing_file(path, MediaLimits())
        media_kind(path)
    for path in frames:
        existing_file(path, MediaLimits())


def check_outputs_spare_inputs(outputs: dict[str, str | None], inputs: Iterable[tuple[str, object]]) -> None:
    """Refuses an output that is one of the inputs, another output, or a file of a local model's folder.

    Args:
        outputs: flag to file, or None where it isn't given.
        inputs: flags with their files or folders, None where not given.

    Raises:
        UserError: writing would destroy what is read.
    """
    given = [(flag, str(path)) for flag, path in inputs if path]
    earlier: list[tuple[str, str]] = []
    for flag, path in outputs.items():
        if not path:
            continue
        for other, read in (*given, *earlier):
            if same_file(path, read):
                raise UserError(
                    f"{flag} {path} is the same file as {other} {read} and would overwrite it; "
                    f"give {flag} another name"
                )
            inside = Path(os.path.realpath(read)) in Path(os.path.realpath(path)).parents
            # Clips may lie in a model's folder; its json files are the model's own.
            if os.path.isdir(read) and inside and Path(path).suffix.lower() == ".json":
                raise UserError(f"{flag} {path} is in the folder of {other}; give {flag} a place outside it")
        earlier.append((flag, path))


def same_file(one: str, other: str) -> bool:
    """Whether two paths lead to one file, through links, other spellings or other names of it."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them doesn't exist
        return False


def read_config(path: str, tier: str | None = None) -> AccelConfig:
    """The config file that `--config` names; `tier` stands in for its own.

    Raises:
        UserError: as `AccelConfig.from_yaml`, in the words of the command line.
    """
    import yaml

    source = existing_file(path, MediaLimits())
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"--config {path} is not text; give a YAML file such as 'tier: exact'") from None
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        values = {}  # from_yaml says what is wrong
    if values is not None and not isinstance(values, dict):
        raise UserError(f"--config {path} holds no settings; write lines such as 'tier: exact'")
    try:
        return AccelConfig.from_yaml(text, tier=tier)
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error


def check_prompt(prompt: str) -> None:
    """Refuses an empty prompt, and bytes that are no text."""
    if not prompt.strip():
        raise UserError("the prompt is empty; describe the clip in a sentence")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid UTF-8; type it again in a UTF-8 terminal") from None


def read_reference(path: str) -> Reference:
    """A reference file, decoded.

    Raises:
        UserError: missing, broken, of no known kind, or too large.
    """
    import torch

    from videoaccel.pipelines.request import Reference

    kind = media_kind(path)
    if kind == "image":
        return Reference(kind="image", image=read_image(path))
    if kind == "audio":
        sound = read_audio(path)
        return Reference(kind="audio", audio=torch.from_numpy(sound.samples), sample_rate=sound.rate)
    video = read_video(path, limits=MediaLimits())
    return Reference(
        kind="video",
        frames=video.frames,
        fps=video.fps,
        audio=None if video.audio is None else torch.from_numpy(video.audio),
        sample_rate=video.rate,
    )


def read_request(args: argparse.Namespace) -> Request:
    """The request without its canvas, which may depend on the model; see `with_canvas`."""
    from videoaccel.pipelines.request import Request

    return Request(
        prompt=args.prompt,
        task=args.task,
        references=tuple(read_reference(path) for path in args.reference),
        first_frame=read_image(args.first_frame) if args.first_frame else None,
        last_frame=read_image(args.last_frame) if args.last_frame else None,
        seed=args.seed,
        steps=args.steps,
        seconds=args.seconds,
    )


def with_canvas(family: Family, pipe: Any, request: Request, res: Resolution | None) -> Request:
    """The request at the canvas that `--res` means for this model."""
    import dataclasses

    if res is None:
        return request
    if res.short_edge is not None:
        height, width = family.canvas(pipe, res.short_edge)
        return dataclasses.replace(request, height=height, width=width)
    return dataclasses.replace(request, height=res.height, width=res.width)


def canvas_note(request: Request, res: Resolution | None) -> tuple[str, ...]:
    """Says so where a short edge was moved to the model's grid."""
    if res is None or res.short_edge is None or request.height is None or request.width is None:
        return ()
    if min(request.height, request.width) == res.short_edge:
        return ()
    return (f"{res} became {request.width}x{request.height}, the nearest canvas on the model's grid.",)


def quiet_libraries() -> None:
    """Keeps the loading bars and deprecation notes of the libraries out of this command's own output."""
    import warnings

    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*weight_norm.*", category=FutureWarning)


def preflight(model: str, request: Request, res: Resolution | None) -> Plan | None:
    """Checks a request against a model's small files, before its weights are read.

    Returns:
        The plan, or None for a family that can't be asked without its weights (they check on start).

    Raises:
        UserError: as `Family.resolve` and `loading.load`.
    """
    from videoaccel.pipelines.family import family_of
    from videoaccel.pipelines.loading import load_shell

    shell = load_shell(model)
    if shell is None:
        return None
    family = family_of(shell)
    return family.resolve(shell, with_canvas(family, shell, request, res))


def check_tiers(tiers: Sequence[str]) -> None:
    """Raises UserError for a tier that is unknown or not in this version."""
    from videoaccel.config import check_tier

    for tier in tiers:
        check_tier(tier)


def tier_help() -> str:
    """The tiers and which of them this version serves."""
    return ", ".join(name if tier.served else f"{name} (planned)" for name, tier in TIERS.items())
