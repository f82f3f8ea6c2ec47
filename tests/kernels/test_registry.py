"""Selection: what is chosen, what is rejected and why, what counts as a fallback, what is never replaced."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from videoaccel.errors import UserError
from videoaccel.kernels.profile import DeviceProfile
from videoaccel.kernels.registry import (
    EAGER,
    Choice,
    Implementation,
    Needs,
    Op,
    installed_packages,
    select,
)

CARD = DeviceProfile(name="card", vendor="nvidia", arch="sm_90", memory_gb=80.0, shared_memory=227 * 1024)
SMALL = DeviceProfile(name="small", vendor="nvidia", arch="sm_89", memory_gb=24.0, shared_memory=99 * 1024)
HOST = DeviceProfile(name="host", vendor="cpu", arch="cpu", memory_gb=16.0)
BF16 = torch.bfloat16


def impl(name: str, **needs: object) -> Implementation:
    return Implementation(name=name, where=f"nowhere:{name}", needs=Needs(**needs))  # type: ignore[arg-type]


def op(*implementations: Implementation) -> Op:
    return Op(name="op", what="a test", implementations=(*implementations, impl(EAGER)))


def chosen(
    one: Op, device: DeviceProfile = CARD, sizes: dict[str, int] | None = None, **more: object
) -> Choice:
    return select(one, sizes or {}, BF16, device, **{"packages": {}, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"vendors": ("amd",)}, "runs on amd, not on nvidia"),
        ({"archs": ("sm_100",)}, "is written for sm_100, not for sm_90"),
        ({"capability": (10, 0)}, "needs compute capability 10.0, not sm_90"),
        ({"shared_memory": 228 * 1024}, "needs 228 KB of shared memory a block, not 227 KB"),
        ({"dtypes": (torch.float32,)}, "takes float32, not bfloat16"),
        ({"choices": {"n": (64, 128)}}, "takes n 64, 128, not 96"),
        ({"multiples": {"n": 64}}, "needs n to be a multiple of 64, not 96"),
        ({"at_most": {"n": 64}}, "takes n up to 64, not 96"),
        ({"packages": ("fast>=2",)}, "needs fast>=2, which is not installed: pip install 'fast>=2'"),
    ],
)
def test_each_need_rejects_with_its_reason(needs: dict[str, object], reason: str) -> None:
    choice = chosen(op(impl("fast", **needs)), sizes={"n": 96})
    assert choice.impl.name == EAGER
    assert [(r.impl, r.why) for r in choice.rejected] == [("fast", reason)]


def test_the_first_that_runs_is_taken_and_later_ones_are_not_judged() -> None:
    choice = chosen(op(impl("a", archs=("sm_100",)), impl("b"), impl("c", packages=("absent",))))
    assert (choice.impl.name, choice.why) == ("b", "the best for this device")
    assert [r.impl for r in choice.rejected] == ["a"] and choice.fallback is None


def test_only_what_the_device_could_run_counts_as_a_fallback() -> None:
    """Nothing better exists for a card that lacks the hardware: that is no fault to report."""
    hardware = chosen(op(impl("a", capability=(10, 0))))
    assert hardware.fallback is None and hardware.why == "the best for this device"
    package = chosen(op(impl("a", capability=(10, 0)), impl("b", packages=("fast>=2",)), impl("c")))
    assert package.impl.name == "c" and package.why == "the best of what is left"
    assert package.fallback is not None and "pip install 'fast>=2'" in package.fallback
    assert "b would run on card" in package.fallback
    # The best one that could run is the one to report.
    two = chosen(op(impl("b", packages=("fast",)), impl("c", packages=("other",))))
    assert two.fallback is not None and "b would run" in two.fallback


@pytest.mark.parametrize(
    ("installed", "lacks"),
    [
        ({"triton": "3.6.0"}, None),
        ({"triton": "3.9.0+git1"}, None),
        ({"triton": "4.0.0.dev1"}, None),
        ({"pytorch-triton-rocm": "3.6.0"}, None),
        ({"triton": "3.5", "pytorch-triton-rocm": "3.6"}, None),
        ({"triton": "3.5"}, "needs triton>=3.6, not 3.5: pip install 'triton>=3.6'"),
        ({}, "needs triton>=3.6, which is not installed: pip install 'triton>=3.6'"),
    ],
)
def test_either_package_of_an_alternative_will_do(installed: dict[str, str], lacks: str | None) -> None:
    needs = Needs(packages=("triton>=3.6 | pytorch-triton-rocm>=3.6",))
    assert needs.missing_package(installed) == lacks


def test_package_names_are_compared_as_indexes_do() -> None:
    """A wheel may spell its own name with underscores and capitals; a requirement need not."""
    needs = Needs(packages=("Flash_Attn.3>=1",))
    assert needs.missing_package({"flash-attn-3": "1.0"}) is None
    found = installed_packages()
    assert "torch" in found and "typing-extensions" in found
    assert all(name == name.lower() and "_" not in name for name in found)


def test_a_size_that_is_asked_about_must_be_given() -> None:
    with pytest.raises(ValueError, match="needs the size 'n'; given: m"):
        chosen(op(impl("a", at_most={"n": 4})), sizes={"m": 1})


def test_a_pinned_implementation_is_taken_over_better_ones_or_refused() -> None:
    two = op(impl("a"), impl("b", packages=("fast",)))
    choice = chosen(two, pinned=EAGER)
    assert (choice.impl.name, choice.why, choice.fallback) == (EAGER, "pinned by the config", None)
    with pytest.raises(UserError, match="op is pinned to b, which needs fast, which is not installed"):
        chosen(two, pinned="b")
    with pytest.raises(UserError, match=r"unknown implementation of op 'c'.*known: a, b, eager"):
        chosen(two, pinned="c")


def test_an_op_that_is_off_runs_eager_and_nothing_can_be_pinned_there() -> None:
    device = dataclasses.replace(CARD, off={"op": "wrong results"})
    one = op(impl("a"), impl("b"))
    choice = chosen(one, device)
    assert choice.impl.name == EAGER and choice.fallback is None
    assert [r.impl for r in choice.rejected] == ["a", "b"] and "wrong results" in choice.why
    assert chosen(one, device, pinned=EAGER).impl.name == EAGER
    with pytest.raises(UserError, match="a, which is off on card: wrong results"):
        chosen(one, device, pinned="a")


def test_where_an_implementation_is_named_no_other_is_taken() -> None:
    device = dataclasses.replace(CARD, explicit={"op": ("own",)})
    choice = chosen(op(impl("a"), impl("own")), device)
    assert choice.impl.name == "own" and choice.fallback is None
    assert choice.rejected[0].why == "is not named for card, which takes own"
    with pytest.raises(UserError, match="no implementation of op is left on card: own needs x"):
        chosen(op(impl("own", packages=("x",))), device)
    with pytest.raises(UserError, match="a, which is not named for card"):
        chosen(op(impl("a"), impl("own")), device, pinned="a")


def test_an_op_ends_with_a_free_eager_implementation() -> None:
    for implementations in ((), (impl("a"),), (impl(EAGER), impl("a")), (impl(EAGER, archs=("sm_90",)),)):
        with pytest.raises(ValueError, match="at the end a free eager"):
            Op(name="op", what="", implementations=implementations)
    with pytest.raises(ValueError, match="distinct"):
        op(impl("a"), impl("a"))


def test_an_implementation_is_imported_when_it_is_loaded() -> None:
    found = Implementation(name="sqrt", where="math:sqrt").load()
    assert found(9.0) == 3.0
    with pytest.raises(ModuleNotFoundError):
        impl("a").load()


def test_a_choice_is_what_a_receipt_keeps() -> None:
    record = chosen(op(impl("a", archs=("sm_100",)))).record()
    assert (record.op, record.impl, record.rejected[0].impl) == ("op", EAGER, "a")


NEEDS = st.builds(
    Needs,
    vendors=st.sampled_from([(), ("nvidia",), ("amd",)]),
    capability=st.sampled_from([None, (8, 0), (9, 0), (12, 0)]),
    shared_memory=st.sampled_from([0, 100 * 1024, 200 * 1024]),
    dtypes=st.sampled_from([(), (BF16,), (torch.float32,)]),
    at_most=st.sampled_from([{}, {"n": 64}]),
    packages=st.sampled_from([(), ("fast>=2",)]),
)


@given(
    needs=st.lists(NEEDS, max_size=5),
    device=st.sampled_from([CARD, SMALL, HOST]),
    n=st.sampled_from([32, 96]),
    packages=st.sampled_from([{}, {"fast": "1"}, {"fast": "2"}]),
)
def test_selection_takes_the_first_that_lacks_nothing_and_explains_the_rest(
    needs: list[Needs], device: DeviceProfile, n: int, packages: dict[str, str]
) -> None:
    names = [f"i{index}" for index in range(len(needs))]
    one = op(*(Implementation(name=name, where="", needs=n) for name, n in zip(names, needs, strict=True)))
    lacks = {
        name: need.missing_on(device) or need.missing_in({"n": n}, BF16, packages)
        for name, need in zip(names, needs, strict=True)
    }
    expected = next((name for name in names if lacks[name] is None), EAGER)
    choice = select(one, {"n": n}, BF16, device, packages=packages)
    assert choice.impl.name == expected
    better = names[: names.index(expected)] if expected in names else names
    assert [(r.impl, r.why) for r in choice.rejected] == [(name, lacks[name]) for name in better]
    could = any(needs[names.index(name)].missing_on(device) is None for name in better)
    assert (choice.fallback is not None) == could
    # What is chosen fits.
    assert choice.impl.needs.shared_memory <= (device.shared_memory or 0)
