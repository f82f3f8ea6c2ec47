"""Facts of a checkpoint that its diffusers config has no place for, read from `videoaccel.json` beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from videoaccel.errors import UserError, unknown

FACTS_FILE = "videoaccel.json"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The defaults are those of the released MiniMax-H3, which ships no such file.

    Attributes:
        family: key in `videoaccel.pipelines.family.FAMILIES`; loading refuses one that isn't the model's.
        text_encoder_layer: which hidden state of the text encoder conditions the transformer.
        min_seconds, max_seconds: lengths the model generates, s.
        default_frames: frames of a request that names no length.
        default_steps: steps of a request that names none.
        canvas: default `(height, width)` in pixels; None derives it from the pipeline's own canvas rule.
        max_pixels: largest canvas, height times width; the stock one is four times the released canvas.
        max_prompt_tokens: longest prompt the model was trained on; None for no limit but the tokenizer's.
        trained: False for weights that were never trained, whose clips show nothing; receipts say so.
    """

    family: str = "minimax_h3"
    text_encoder_layer: int = 50
    min_seconds: float = 5.0
    max_seconds: float = 15.0
    default_frames: int = 124
    default_steps: int = 50
    canvas: tuple[int, int] | None = None
    max_pixels: int = 4 * 1344 * 768
    max_prompt_tokens: int | None = None
    trained: bool = True


def read_facts(path: Path | None) -> ModelFacts:
    """The facts in a file, or the stock ones where there is no file.

    Raises:
        UserError: the file is not valid JSON, has an unknown key or a value of the wrong kind.
    """
    if path is None or not path.is_file():
        return ModelFacts()
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; restore it from the checkpoint's source") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold one JSON object, got {type(raw).__name__}")
    known = {field.name: field.default for field in fields(ModelFacts)}
    for key, value in raw.items():
        if key not in known:
            raise unknown(f"key in {path}", key, known)
        if not _fits(key, value):
            raise UserError(
                f"{path}: {key} cannot be {value!r}; see ModelFacts in videoaccel/pipelines/facts.py"
            )
    if isinstance(raw.get("canvas"), list):
        raw["canvas"] = tuple(raw["canvas"])
    return ModelFacts(**raw)


def _fits(key: str, value: object) -> bool:
    def positive(number: object, kinds: tuple[type, ...] = (int,)) -> bool:
        return isinstance(number, kinds) and not isinstance(number, bool) and number > 0  # type: ignore[operator]

    if key == "family":
        return isinstance(value, str)
    if key == "trained":
        return isinstance(value, bool)
    if key == "canvas":
        return value is None or (isinstance(value, list) and len(value) == 2 and all(map(positive, value)))
    if key == "max_prompt_tokens":
        return value is None or positive(value)
    return positive(value, (int, float) if key.endswith("seconds") else (int,))
