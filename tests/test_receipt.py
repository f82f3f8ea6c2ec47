"""Receipt and Recorder: JSON in and out, what adds up, and that nothing outlives a request."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoaccel.config import AccelConfig, RiskBudget
from videoaccel.errors import UserError
from videoaccel.files import replacing, write_text
from videoaccel.receipt import (
    Forwards,
    KernelChoice,
    Memory,
    Receipt,
    Recorder,
    Rejected,
    Timings,
    recording,
)

names = st.text(st.characters(codec="utf-8"), max_size=8)
counts = st.integers(min_value=0, max_value=2**60)
seconds = st.floats(min_value=0, max_value=1e9)
receipts = st.builds(
    Receipt,
    tier_asked=names,
    tier_served=names,
    budget=st.none() | st.builds(RiskBudget, video=st.just(0.25), audio=st.just(0.0)),
    spend=st.dictionaries(names, seconds, max_size=2),
    binding_limit=st.none() | names,
    model=names,
    weights=names,
    family=names,
    task=names,
    device=names,
    width=counts,
    height=counts,
    frames=counts,
    fps=seconds,
    seed=st.integers(),
    rows=st.dictionaries(names, counts, max_size=3),
    steps=counts,
    forwards=st.builds(Forwards, dense=counts, reused=counts),
    memory=st.builds(Memory, state=counts, peak_allocated=st.none() | counts),
    timings=st.builds(Timings, encode_s=seconds, step_s=st.lists(seconds, max_size=3).map(tuple)),
    kernels=st.lists(
        st.builds(
            KernelChoice,
            op=names,
            impl=names,
            why=names,
            rejected=st.lists(st.builds(Rejected, impl=names, why=names), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    notes=st.lists(names, max_size=2).map(tuple),
    warnings=st.lists(names, max_size=2).map(tuple),
)

FACTS = {
    "model": "tiny-h3",
    "weights": "pretrained",
    "family": "minimax_h3",
    "task": "t2va",
    "device": "cpu",
    "width": 160,
    "height": 128,
    "frames": 39,
    "fps": 24.0,
    "seed": 7,
    "rows": {"text": 12, "audio": 65, "video": 480},
    "steps": 3,
}


@given(receipts)
def test_json_round_trip(receipt: Receipt) -> None:
    again = Receipt.from_json(receipt.to_json())
    assert again == receipt
    assert again.to_json() == receipt.to_json()


def test_recorder_adds_up() -> None:
    with recording(AccelConfig()) as recorder:
        recorder.describe(**FACTS)
        recorder.step(0.5, dense=2)
        recorder.step(0.25, dense=1, reused=1)
        recorder.add_seconds("denoise", 0.75)
        recorder.add_seconds("decode", 0.5)
        recorder.add_seconds("decode", 0.25)
        recorder.spend("video", 0.25)
        recorder.spend("video", 0.5)
        recorder.hold(100)
        recorder.hold(40)
        recorder.kernel(KernelChoice(op="attention", impl="a", why="first"))
        recorder.kernel(KernelChoice(op="attention", impl="b", why="second"))
        recorder.note("said once")
        recorder.note("said once")
        recorder.warn("act on this")
        receipt = recorder.receipt()
    assert receipt.tier_asked == receipt.tier_served == "exact"
    assert receipt.budget == RiskBudget(video=0.0, audio=0.0)
    assert receipt.forwards == Forwards(dense=3, reused=1)
    assert receipt.forwards.run == 3
    assert receipt.timings == Timings(denoise_s=0.75, decode_s=0.75, step_s=(0.5, 0.25))
    assert receipt.timings.total_s == 1.5
    assert receipt.spend == {"video": 0.75}
    assert receipt.memory.state == 100
    assert [choice.impl for choice in receipt.kernels] == ["b"]
    assert receipt.notes == ("said once",)
    assert receipt.warnings == ("act on this",)
    assert receipt.rows == FACTS["rows"]


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -0.1])
def test_a_cost_that_cannot_be_summed_is_refused(cost: float) -> None:
    recorder = Recorder(AccelConfig())
    recorder.spend("audio", 0.25)
    with pytest.raises(ValueError, match="finite"):
        recorder.spend("audio", cost)
    recorder.describe(**FACTS)
    assert recorder.receipt().spend == {"audio": 0.25}


def test_a_planned_tier_without_a_budget_leaves_it_out_of_the_json() -> None:
    recorder = Recorder(AccelConfig(tier="high"))
    recorder.describe(**FACTS)
    assert "budget" not in json.loads(recorder.receipt().to_json())


def test_a_receipt_with_a_gap_is_refused() -> None:
    with pytest.raises(UserError, match=r"Receipt needs .*width"):
        Recorder(AccelConfig()).receipt()
    with pytest.raises(TypeError, match="no field 'widht'"):
        Recorder(AccelConfig()).describe(widht=3)
    with pytest.raises(TypeError, match="no kind 'dens'"):
        Recorder(AccelConfig()).step(0.1, dens=1)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_outlives_the_request(error: type[BaseException] | None) -> None:
    class State:
        pass

    order: list[str] = []
    state = State()
    seen = weakref.ref(state)

    def run(held: State) -> None:
        with recording(AccelConfig()) as recorder:
            recorder.on_end(lambda: order.append("first registered"))
            recorder.on_end(lambda kept=held: order.append(type(kept).__name__))
            if error:
                raise error

    if error is None:
        run(state)
    else:
        with pytest.raises(error):
            run(state)
    del state
    gc.collect()
    assert order == ["State", "first registered"]
    assert seen() is None


def test_other_formats_and_broken_text_are_refused() -> None:
    recorder = Recorder(AccelConfig())
    recorder.describe(**FACTS)
    values = recorder.receipt().to_dict()
    with pytest.raises(UserError, match="format 1, not 99"):
        Receipt.from_dict(values | {"format": 99})
    with pytest.raises(UserError, match="did you mean 'frames'"):
        Receipt.from_dict(values | {"framse": 99})
    with pytest.raises(UserError, match="width must be int"):
        Receipt.from_dict(values | {"width": "wide"})
    for text in ("{", "[]", "3"):
        with pytest.raises(UserError):
            Receipt.from_json(text)


def test_save_is_whole_or_not_at_all(tmp_path: Path) -> None:
    recorder = Recorder(AccelConfig())
    recorder.describe(**FACTS)
    receipt = recorder.receipt()
    path = tmp_path / "receipt.json"
    receipt.save(path)
    assert Receipt.from_json(path.read_text(encoding="utf-8")) == receipt
    with pytest.raises(UserError, match="make it first"):
        receipt.save(tmp_path / "nowhere" / "receipt.json")
    with pytest.raises(UserError, match="it is a folder"):
        receipt.save(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["receipt.json"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        assert temporary.suffix == ".mp4"
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["clip.mp4"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_folder_that_takes_no_files_is_one_line() -> None:
    # /proc refuses new files to root as well, where permission bits would not.
    with pytest.raises(UserError, match=r"cannot write '/proc/x\.json': .*; choose a folder"):
        write_text("/proc/x.json", "{}")
