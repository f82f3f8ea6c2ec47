"""accelerate() and remove(): all or nothing, and bit-identical afterwards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
import torch

import videoaccel
from videoaccel.config import AccelConfig, Section, served_tiers
from videoaccel.errors import UserError
from videoaccel.install import accelerate
from videoaccel.pipelines.request import Request
from videoaccel.schema import strict


class Meddle:
    """Does to a pipeline what techniques do: a hook, a weight, a replaced method, a replaced block, a new
    attribute. Raises after `fail_after` of them."""

    risky = False
    per_request = False

    def spends(self, section: Any) -> bool:
        return self.risky

    def begin(self, run: Any, recorder: Any, section: Any) -> None:
        return None

    def install(self, pipe: Any, family: Any, config: AccelConfig, section: Any, undo: ExitStack) -> None:
        (component, *_) = family.components(pipe, family.tasks[0])
        stack = family.stack(pipe, component)
        block = stack.blocks[0]
        weight = next(block.parameters())

        def restore(attributes: dict[str, Any], key: str) -> None:
            if key in attributes:  # put there by another technique, below this one
                undo.callback(attributes.__setitem__, key, attributes[key])
            else:
                undo.callback(attributes.pop, key)

        def hook() -> None:
            handle = block.register_forward_hook(lambda module, args, output: output)
            undo.callback(handle.remove)

        def scale() -> None:
            before = weight.detach().clone()
            undo.callback(weight.data.copy_, before)
            weight.data.mul_(section.gain)

        def method() -> None:
            restore(vars(block), "forward")
            block.forward = block.forward

        def swap() -> None:
            last = stack.blocks[-1]
            undo.callback(stack.blocks.__setitem__, len(stack.blocks) - 1, last)
            stack.blocks[len(stack.blocks) - 1] = copy.deepcopy(last)

        def attribute() -> None:
            restore(vars(pipe), "meddled")
            vars(pipe)["meddled"] = True

        for done, change in enumerate((hook, scale, method, swap, attribute)):
            if done == section.fail_after:
                raise RuntimeError(f"failed after {done}")
            change()


class Spender(Meddle):
    risky = True


MEDDLE, SPENDER, NOT_A_TECHNIQUE = Meddle(), Spender(), object()


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeddleSection(Section):
    technique: ClassVar[str] = f"{__name__}:MEDDLE"

    gain: float = 3.0
    fail_after: int = 99


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpenderSection(MeddleSection):
    technique: ClassVar[str] = f"{__name__}:SPENDER"


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsentSection(Section):
    technique: ClassVar[str] = "videoaccel.no_such_module:X"


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongSection(Section):
    technique: ClassVar[str] = f"{__name__}:NOT_A_TECHNIQUE"


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AccelConfig):
    first: MeddleSection | None = None
    second: SpenderSection | None = None
    absent: AbsentSection | None = None
    wrong: WrongSection | None = None


def snapshot(pipe: Any) -> dict[str, Any]:
    """Everything install may touch: attributes by identity, modules, hooks, and the bits of every tensor."""
    seen: dict[str, Any] = {f"pipe.{key}": id(value) for key, value in vars(pipe).items()}
    components = {key: value for key, value in vars(pipe).items() if isinstance(value, torch.nn.Module)}
    assert components, "a snapshot that sees no module can't tell anything"
    for name, component in components.items():
        for path, module in component.named_modules():
            for key, value in vars(module).items():
                # Hooks, buffers, parameters and children live in dicts: their contents count, not the dict.
                seen[f"{name}.{path}.{key}"] = (
                    {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
                )
        for path, tensor in component.state_dict().items():
            bits = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            seen[f"{name}.{path}:bits"] = (tensor.dtype, bits)
    return seen


def run(pipe: Any) -> torch.Tensor:
    """Latents of a two-step Wan clip, `(1, 16, 2, 2, 2)`."""
    generator = torch.Generator().manual_seed(3)
    embeds = torch.randn(2, 1, 4, 32, generator=generator)
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt_embeds=embeds[0],
        negative_prompt_embeds=embeds[1],
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=2,
        output_type="latent",
        generator=generator,
    ).frames


def test_exact_changes_nothing_and_remove_leaves_no_trace(build_pipe: Callable[..., Any]) -> None:
    pipe = build_pipe()
    before = snapshot(pipe)
    handle = accelerate(pipe)
    installed = snapshot(pipe)
    assert handle.techniques == ()
    assert {key: installed[key] for key in before} == before
    handle.remove()
    assert snapshot(pipe) == before
    handle.remove()
    assert snapshot(pipe) == before


def test_exact_clip_equals_stock_diffusers(build_wan: Callable[..., Any]) -> None:
    stock = run(build_wan())
    pipe = build_wan()
    with accelerate(pipe, AccelConfig(tier="exact")):
        assert torch.equal(run(pipe), stock)
    assert torch.equal(run(pipe), stock)


def test_remove_takes_off_everything_a_technique_did(build_pipe: Callable[..., Any]) -> None:
    pipe = build_pipe()
    before = snapshot(pipe)
    handle = accelerate(pipe, Config(first=MeddleSection(), second=SpenderSection(), risk_budget=0.1))
    assert handle.techniques == ("first", "second")
    installed = snapshot(pipe)
    changed = {key for key, value in before.items() if installed.get(key) != value}
    assert any("_forward_hooks" in key for key in changed), "the technique did meddle"
    assert any(":bits" in key for key in changed)
    handle.remove()
    assert snapshot(pipe) == before


def test_clip_after_remove_equals_one_of_an_untouched_pipeline(build_wan: Callable[..., Any]) -> None:
    stock = run(build_wan())
    pipe = build_wan()
    handle = accelerate(pipe, Config(first=MeddleSection()))
    assert not torch.equal(run(pipe), stock)
    handle.remove()
    assert torch.equal(run(pipe), stock)


@pytest.mark.parametrize("fail_after", range(5))
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_failure_half_way_installs_nothing(
    build_pipe: Callable[..., Any], fail_after: int, place: str
) -> None:
    pipe = build_pipe()
    before = snapshot(pipe)
    sections: dict[str, Any] = {"first": MeddleSection(), "second": SpenderSection()}
    sections[place] = dataclasses.replace(sections[place], fail_after=fail_after)
    with pytest.raises(RuntimeError, match=f"failed after {fail_after}"):
        accelerate(pipe, Config(**sections))
    assert snapshot(pipe) == before
    accelerate(pipe, Config(first=MeddleSection())).remove()
    assert snapshot(pipe) == before


def test_the_exception_of_the_block_takes_it_off_too(build_pipe: Callable[..., Any]) -> None:
    pipe = build_pipe()
    before = snapshot(pipe)
    with pytest.raises(KeyError), accelerate(pipe, Config(first=MeddleSection())):
        raise KeyError
    assert snapshot(pipe) == before


def test_installing_twice_names_the_fix(build_pipe: Callable[..., Any]) -> None:
    pipe = build_pipe()
    handle = accelerate(pipe, Config(first=MeddleSection()))
    installed = snapshot(pipe)
    for config in (AccelConfig(), Config(first=MeddleSection())):
        with pytest.raises(UserError, match=r"call pipe\.videoaccel_handle\.remove\(\) first"):
            accelerate(pipe, config)
    assert snapshot(pipe) == installed
    assert pipe.videoaccel_handle is handle
    pipe.videoaccel_handle.remove()
    accelerate(pipe).remove()
    assert not hasattr(pipe, "videoaccel_handle")


def test_two_pipelines_are_independent(build_pipe: Callable[..., Any]) -> None:
    one, two = build_pipe(1), build_pipe(2)
    before_one, before_two = snapshot(one), snapshot(two)
    handle_one = accelerate(one, Config(first=MeddleSection()))
    assert snapshot(two) == before_two
    handle_two = accelerate(two, Config(first=MeddleSection(gain=5.0)))
    installed_two = snapshot(two)
    handle_one.remove()
    assert snapshot(one) == before_one
    assert snapshot(two) == installed_two
    handle_two.remove()
    assert snapshot(two) == before_two


def test_a_shared_transformer_carries_one_handle(build_wan: Callable[..., Any]) -> None:
    pipe = build_wan()
    twin = type(pipe)(**pipe.components)
    before = snapshot(twin)
    # At `exact` nothing sits on the transformer, so both may be installed.
    with accelerate(pipe), accelerate(twin):
        pass
    handle = accelerate(pipe, Config(first=MeddleSection()))
    # Nor is the twin's transformer the stock one now, which is what `exact` would promise.
    for config in (Config(first=MeddleSection()), AccelConfig()):
        with pytest.raises(UserError, match="shared with a pipeline that is accelerated already"):
            accelerate(twin, config)
    handle.remove()
    accelerate(twin, Config(first=MeddleSection())).remove()
    assert snapshot(twin) == before


@pytest.mark.parametrize("tier", ["high", "balanced", "turbo"])
def test_planned_tiers_are_refused(build_wan: Callable[..., Any], tier: str) -> None:
    pipe = build_wan()
    before = snapshot(pipe)
    with pytest.raises(UserError, match=f"'{tier}' is planned .* serves: {', '.join(served_tiers())}"):
        accelerate(pipe, AccelConfig(tier=tier))
    assert snapshot(pipe) == before


def test_a_budget_that_nothing_spends_is_refused(build_wan: Callable[..., Any]) -> None:
    pipe = build_wan()
    before = snapshot(pipe)
    for config in (AccelConfig(risk_budget=0.02), Config(first=MeddleSection(), risk_budget=0.02)):
        with pytest.raises(UserError, match="spends risk_budget"):
            accelerate(pipe, config)
    assert snapshot(pipe) == before
    accelerate(pipe, AccelConfig(risk_budget=0.0)).remove()


def test_a_section_whose_technique_is_missing_is_refused(build_wan: Callable[..., Any]) -> None:
    pipe = build_wan()
    before = snapshot(pipe)
    with pytest.raises(UserError, match="section 'absent' can't be installed here"):
        accelerate(pipe, Config(first=MeddleSection(), absent=AbsentSection()))
    with pytest.raises(TypeError, match="is not a Technique"):
        accelerate(pipe, Config(wrong=WrongSection()))
    assert snapshot(pipe) == before


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("exact", r"not str; give AccelConfig\(tier='exact'\)$"),
        ("turbo", r"give AccelConfig\(tier='turbo'\)$"),
        ("exat", r"give AccelConfig\(tier='exact'\)$"),
        ({"tier": "exact"}, r"not dict; give AccelConfig\(tier='exact'\), or AccelConfig\.from_dict"),
        (AccelConfig, "not type"),
    ],
)
def test_a_config_of_another_kind_names_the_right_one(
    build_wan: Callable[..., Any], config: Any, line: str
) -> None:
    pipe = build_wan()
    before = snapshot(pipe)
    with pytest.raises(UserError, match=line):
        accelerate(pipe, config)
    assert snapshot(pipe) == before
    with accelerate(pipe) as handle:
        with pytest.raises(UserError, match=line):
            handle.run(Request(prompt="a boat"), config=config)
        with pytest.raises(UserError, match=r"must be a Request, not str"):
            handle.run("a boat")  # type: ignore[arg-type]


def test_a_pipeline_of_no_family_is_refused() -> None:
    with pytest.raises(UserError, match="supported"):
        accelerate(torch.nn.Linear(1, 1))


def test_public_names_resolve() -> None:
    for name in videoaccel.__all__:
        assert getattr(videoaccel, name).__name__ == name
    assert videoaccel.accelerate is accelerate
    with pytest.raises(AttributeError):
        _ = videoaccel.acelerate
