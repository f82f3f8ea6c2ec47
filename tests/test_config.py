"""AccelConfig: strict keys and types, tiers and budgets, YAML in and out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoaccel.config import TIERS, AccelConfig, RiskBudget, Section, check_tier, served_tiers
from videoaccel.errors import UserError, nearest, unknown
from videoaccel.schema import from_plain, strict, to_plain


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Nested(Section):
    """A section as a later technique would declare it, with one field of each kind."""

    technique: ClassVar[str] = "somewhere.else:THING"

    rate: float = 0.5
    steps: int = 3
    on: bool = True
    label: str = "a"
    layers: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Wider(AccelConfig):
    """AccelConfig on the day after a section was added to it."""

    nested: Nested | None = None


fractions = st.floats(min_value=0, max_value=1, exclude_max=True, allow_nan=False)
budgets = st.none() | fractions | st.builds(RiskBudget, video=fractions, audio=fractions)
finite = st.floats(allow_nan=False, allow_infinity=False)
sections = st.builds(
    Nested,
    rate=finite,
    steps=st.integers(),
    on=st.booleans(),
    # Anything that YAML can carry: no lone surrogates, no control characters.
    label=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))),
    layers=st.lists(st.integers()).map(tuple),
    weights=st.none() | st.lists(finite).map(tuple),
)
configs = st.builds(
    Wider, tier=st.sampled_from(sorted(TIERS)), risk_budget=budgets, nested=st.none() | sections
)


@given(configs)
def test_yaml_round_trip(config: Wider) -> None:
    again = Wider.from_yaml(config.to_yaml())
    assert again == config
    assert again.to_yaml() == config.to_yaml()


@given(configs)
def test_dict_round_trip_holds_no_objects(config: Wider) -> None:
    values = config.to_dict()
    assert Wider.from_dict(values) == config

    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return type(value) in (str, int, float, bool)

    assert plain(values)


def test_yaml_from_a_file_and_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("tier: exact\nrisk_budget: {video: 1e-3, audio: 0.002}\n")
    assert AccelConfig.from_yaml(path).risk_budget == RiskBudget(video=0.001, audio=0.002)
    path.write_text("# nothing set\n")
    assert AccelConfig.from_yaml(path) == AccelConfig()
    with pytest.raises(UserError, match="cannot read config"):
        AccelConfig.from_yaml(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("teir: exact", "unknown key of AccelConfig 'teir': did you mean 'tier'?"),
        ("risk-budget: 0.1", "did you mean 'risk_budget'?"),
        ("nested: {ratee: 1}", "unknown key of Nested 'ratee': did you mean 'rate'?"),
        ("cache: {threshold: 0.1}", "unknown key of Wider 'cache'"),
        ("1: exact", "unknown key of Wider '1'"),
        ("tier: exat", "unknown tier 'exat': did you mean 'exact'?"),
        ("tier: 3", "AccelConfig.tier must be str, not 3"),
        ("risk_budget: lots", "risk_budget must be RiskBudget or float or nothing, not 'lots'"),
        ("risk_budget: yes", "not True"),
        ("risk_budget: {video: 0.1}", "RiskBudget needs audio"),
        ("risk_budget: .nan", "from 0 to below 1"),
        ("risk_budget: 1.0", "from 0 to below 1"),
        ("risk_budget: -0.1", "from 0 to below 1"),
        ("nested: 3", "nested must be Nested or nothing, not 3"),
        ("nested: {steps: 1.5}", "Nested.steps must be int, not 1.5"),
        ("nested: {layers: [1, x]}", "Nested.layers must be"),
        ("tier: exact\ntier: turbo", "'tier' is given twice"),
        ("[tier]", "must be a mapping"),
        ("config.yaml", "a file is given as a Path"),
        ("[" * 5000, "nested too deeply"),
        ("tier: [", "not valid YAML"),
        ("tier: !!python/name:os.system", "not valid YAML"),
    ],
)
def test_bad_yaml_is_one_line_that_names_the_fix(text: str, message: str) -> None:
    cls = Wider if "Wider" in message or "nested" in text.lower() else AccelConfig
    with pytest.raises(UserError) as caught:
        cls.from_yaml(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_python_is_as_strict_as_yaml() -> None:
    with pytest.raises(UserError, match="did you mean 'tier'"):
        AccelConfig(teir="exact")  # type: ignore[call-arg]
    with pytest.raises(UserError, match="must be str"):
        AccelConfig(tier=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        AccelConfig("exact")  # type: ignore[misc]
    with pytest.raises(UserError, match="unknown key"):
        dataclasses.replace(AccelConfig(), cache=1)  # type: ignore[call-arg]


def test_yaml_is_read_from_text_or_a_path_only() -> None:
    for source in (None, {"tier": "exact"}, 3):
        with pytest.raises(UserError, match=r"YAML text or a Path.*from_dict"):
            AccelConfig.from_yaml(source)  # type: ignore[arg-type]


def test_frozen_and_comparable() -> None:
    config = AccelConfig(risk_budget=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tier = "high"  # type: ignore[misc]
    assert config == AccelConfig(risk_budget=RiskBudget(video=0.0, audio=0.0))
    assert hash(config) == hash(AccelConfig(risk_budget=0.0))


def test_explicit_budget_beats_the_tiers() -> None:
    assert AccelConfig().budget() == RiskBudget(video=0.0, audio=0.0)
    assert AccelConfig(tier="lossless", risk_budget=0.02).budget() == RiskBudget(video=0.02, audio=0.02)
    apart = RiskBudget(video=0.02, audio=0.01)
    assert AccelConfig(tier="high", risk_budget=apart).budget() == apart


def test_an_uncalibrated_tier_has_no_budget_to_invent() -> None:
    config = AccelConfig(tier="high")
    assert not config.has_budget()
    with pytest.raises(UserError, match="give risk_budget="):
        config.budget()


def test_every_tier_is_named_and_only_served_ones_pass() -> None:
    assert list(TIERS) == ["exact", "lossless", "high", "balanced", "turbo"]
    for name in TIERS:
        if name in served_tiers():
            check_tier(name)
        else:
            with pytest.raises(UserError, match="this version, which serves: exact"):
                check_tier(name)
    with pytest.raises(UserError, match="did you mean 'balanced'"):
        check_tier("ballanced")


def test_sections_are_those_set_in_field_order() -> None:
    assert AccelConfig().sections() == {}
    assert Wider(nested=Nested(rate=1)).sections() == {"nested": Nested(rate=1.0)}


def test_a_section_that_names_no_technique_cannot_be_written() -> None:
    with pytest.raises(TypeError, match=r"technique must be 'package\.module:attribute'"):

        class Unread(Section):
            technique = "nothing"


def test_each_section_of_this_version_names_a_technique_that_exists() -> None:
    # Trap: a key that is accepted and read by nobody. Holds for every section that is ever added.
    import importlib
    import typing

    hints = typing.get_type_hints(AccelConfig)
    found = [
        member
        for hint in hints.values()
        for member in (typing.get_args(hint) or (hint,))
        if isinstance(member, type) and issubclass(member, Section)
    ]
    scalars = set(hints) - {"tier", "risk_budget"}
    assert len(scalars) == len(found), "a field beside tier and risk_budget must be a Section"
    for section in found:
        module, _, attribute = section.technique.partition(":")
        assert hasattr(importlib.import_module(module), attribute)


def test_nearest_name() -> None:
    assert nearest("Risk-Budget", ["tier", "risk_budget"]) == "risk_budget"
    assert nearest("zzz", ["tier", "risk_budget"]) is None
    assert str(unknown("tier", "zzz", ["a", "b"])) == "unknown tier 'zzz': known: a, b"
    assert "\n" not in str(UserError("two\nlines"))


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Choosing:
    mode: Literal["hold", "linear", 2] = "hold"
    modes: tuple[Literal["hold", "linear"], ...] = ()
    maybe: Literal["x"] | None = None


def test_a_literal_takes_its_own_values_and_no_look_alikes() -> None:
    made = Choosing(mode=2, modes=("linear", "hold"), maybe="x")
    assert from_plain(Choosing, to_plain(made)) == made
    for mode in ("holt", 2.0, True, 1, None):
        with pytest.raises(UserError):
            Choosing(mode=mode)
    with pytest.raises(UserError):
        Choosing(modes=("linear", "cubic"))
    with pytest.raises(UserError):
        Choosing(maybe="y")
    with pytest.raises(UserError, match="must be 'hold' or 'linear' or 2, not 'holt'"):
        Choosing(mode="holt")


def test_a_wrong_type_in_a_nested_mapping_is_named_in_words() -> None:
    with pytest.raises(UserError, match=r"KernelsConfig.pin must be a mapping to str, not \['flash'\]"):
        AccelConfig.from_yaml("tier: lossless\nkernels: {pin: [flash]}")
