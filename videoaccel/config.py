"""What a user may ask for: a tier, a risk budget, and one nested section for each technique.

Every class here is strict (see `videoaccel.schema`), in Python and in YAML alike: a setting that nothing
reads is a fault that nobody sees.

**Adding a section** (docs/architecture.md has the whole recipe): write a strict frozen dataclass derived from
`Section` that names the technique reading it, and give `AccelConfig` one field of that type, default None. A
section that names no technique cannot be written. Field order is the order of installation.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml

from videoaccel.errors import UserError, unknown
from videoaccel.schema import fields_of, from_plain, strict, to_plain


@strict
@dataclass(frozen=True, kw_only=True)
class RiskBudget:
    """How far a clip may drift from the dense one, per stream.

    Attributes:
        video: upper estimate of the relative L2 error of the final video latent; 0.02 is 2 %.
        audio: the same for the audio latent. Its own number, because a joint decision loses the sound.

    Raises:
        UserError: a budget that is not a number in [0, 1).
    """

    video: float
    audio: float

    def __post_init__(self) -> None:
        for stream in ("video", "audio"):
            value = getattr(self, stream)
            if not (math.isfinite(value) and 0 <= value < 1):
                raise UserError(
                    f"a risk budget is a relative error from 0 to below 1 (0.02 is 2 %), not {value!r} "
                    f"for {stream}"
                )
            # 0 and 0.0 would compare equal and be written differently.
            object.__setattr__(self, stream, float(value))


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of a nested section: the settings of one technique.

    Attributes:
        technique: "package.module:attribute" of the `videoaccel.protocols.Technique` that reads it. A
            string, because this module lies below every technique and imports none.
    """

    technique: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reference = getattr(cls, "technique", "")
        module, _, attribute = reference.partition(":")
        if not (module and attribute):
            raise TypeError(f"{cls.__name__}.technique must be 'package.module:attribute', not {reference!r}")


@strict
@dataclass(frozen=True, kw_only=True)
class KernelsConfig(Section):
    """The same maths by other means; see docs/kernels.md.

    Attributes:
        fuse: the small ops between matrix products as one pass over memory each.
        fold: tables that depend on the noise level alone made once for a schedule, their projections kept in
            host memory.
        compile: the blocks compiled by torch, their small ops with them, in place of this package's kernels.
        precision: `model`, as the weights are, or `fp8` for the blocks' linears and what enters them. FP8 is
            another maths: the receipt says so at whatever tier.
        pin: op to the implementation to take, whatever selection finds better. One that can't run is refused.
    """

    technique: ClassVar[str] = "videoaccel.kernels.technique:KERNELS"

    fuse: bool = True
    fold: bool = True
    compile: bool = False
    precision: Literal["model", "fp8"] = "model"
    pin: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """What a tier's name promises.

    Attributes:
        promise: one line for tables and errors.
        budget: the risk a request may spend at this tier; None where it is not calibrated yet.
        served: whether this version can serve it.
        sections: what it installs where the config does not set that section.
    """

    promise: str
    budget: RiskBudget | None
    served: bool
    sections: Mapping[str, Section] = dataclasses.field(default_factory=dict)


_NO_RISK = RiskBudget(video=0.0, audio=0.0)

TIERS: Mapping[str, Tier] = types.MappingProxyType(
    {
        "exact": Tier(promise="the same operations as diffusers", budget=_NO_RISK, served=True),
        "lossless": Tier(
            promise="the same maths in the same precision: fused kernels, folded tables",
            budget=_NO_RISK,
            served=True,
            sections={"kernels": KernelsConfig()},
        ),
        "high": Tier(promise="a small risk budget", budget=None, served=False),
        "balanced": Tier(promise="a larger risk budget", budget=None, served=False),
        "turbo": Tier(promise="a few-step LoRA, and what budget is left", budget=None, served=False),
    }
)
"""Every tier, planned ones included, from the strictest to the fastest."""


def served_tiers() -> list[str]:
    """The tiers that this version can serve, in the order of `TIERS`."""
    return [name for name, tier in TIERS.items() if tier.served]


def check_tier(name: str) -> None:
    """Raise `UserError` unless `name` is a tier that this version serves."""
    if name not in TIERS:
        raise unknown("tier", name, TIERS)
    if not TIERS[name].served:
        raise UserError(
            f"tier {name!r} is planned and not in this version, which serves: {', '.join(served_tiers())}; "
            f"use {served_tiers()[0]!r}"
        )


@strict
@dataclass(frozen=True, kw_only=True)
class AccelConfig:
    """What to install on a pipeline.

    Attributes:
        tier: one of `TIERS`. A config may name a planned tier (it can be written, read and compared);
            installing it is refused.
        risk_budget: beats the tier's. One number stands for both streams; `RiskBudget` keeps them apart.
        kernels: None leaves it to the tier, as every section.

    Raises:
        UserError: an unknown key or tier, a wrong type, a budget outside [0, 1).
    """

    tier: str = "exact"
    risk_budget: RiskBudget | float | None = None
    kernels: KernelsConfig | None = None

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise unknown("tier", self.tier, TIERS)
        if self.tier == "exact" and self.kernels is not None:
            raise UserError("tier 'exact' runs diffusers' own operations: give tier 'lossless' with kernels")
        if self.risk_budget is not None and not isinstance(self.risk_budget, RiskBudget):
            both = RiskBudget(video=self.risk_budget, audio=self.risk_budget)
            object.__setattr__(self, "risk_budget", both)

    def budget(self) -> RiskBudget:
        """The budget in force: the explicit one, else the tier's.

        Raises:
            UserError: the tier has no calibrated budget in this version and none was given.
        """
        if isinstance(self.risk_budget, RiskBudget):
            return self.risk_budget
        budget = TIERS[self.tier].budget
        if budget is None:
            raise UserError(f"tier {self.tier!r} has no calibrated budget in this version: give risk_budget=")
        return budget

    def has_budget(self) -> bool:
        """Whether `budget` has an answer."""
        return self.risk_budget is not None or TIERS[self.tier].budget is not None

    def sections(self) -> dict[str, Section]:
        """The technique sections that are set, here or by the tier, by key, in the order of installation."""
        by_tier = TIERS[self.tier].sections
        values = {key: getattr(self, key) or by_tier.get(key) for key in fields_of(type(self))}
        return {key: value for key, value in values.items() if isinstance(value, Section)}

    def to_dict(self) -> dict[str, Any]:
        """Mappings, lists and scalars; keys left at None are left out."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises `UserError` on unknown keys and wrong types, at any depth."""
        config: Self = from_plain(cls, values)
        return config

    def to_yaml(self) -> str:
        """The config as YAML text, keys in the order of the fields."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_yaml(cls, source: str | Path, *, tier: str | None = None) -> Self:
        """Read YAML text (`str`) or a YAML file (`Path`); `tier` stands in for its own.

        Raises:
            UserError: the file can't be read, the text is no mapping, a key is unknown or given twice,
                or a value has the wrong type.
        """
        if not isinstance(source, str | Path):
            raise UserError(
                f"a config is read from YAML text or a Path, not {type(source).__name__}; a mapping goes to "
                "AccelConfig.from_dict"
            )
        if isinstance(source, Path):
            try:
                source = source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"cannot read config {str(source)!r}: {error}; give a YAML text file"
                ) from error
        try:
            values = yaml.load(source, Loader=_StrictLoader)
        except UserError:
            raise
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date, and the like
            raise UserError(
                f"config is not valid YAML: {error}; give a mapping such as 'tier: exact'"
            ) from error
        except RecursionError as error:
            raise UserError(
                "config is nested too deeply to be one; give a mapping such as 'tier: exact'"
            ) from error
        if isinstance(values, str):
            raise UserError(
                f"config {values!r} is no mapping such as 'tier: exact'; a file is given as a Path"
            )
        values = {} if values is None else values
        # Before the config is made: what a section may be depends on the tier.
        return cls.from_dict({**values, "tier": tier} if tier and isinstance(values, Mapping) else values)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads `1e-3` as a number.

    YAML 1.1, which PyYAML speaks, keeps the last of two equal keys without a word and takes `1e-3` for text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise UserError(f"config key {key!r} is given twice: keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
