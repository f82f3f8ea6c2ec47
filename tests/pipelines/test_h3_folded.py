"""Folded AdaLN tables are the projections' own bits, whatever is done to the projections meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.pipelines.test_h3_fused import inputs
from videoaccel.errors import UserError
from videoaccel.pipelines import h3_folded
from videoaccel.pipelines.h3_folded import FoldedAdaLN


@pytest.fixture
def stock(tiny: Any) -> Any:
    return copy.deepcopy(tiny.transformer).eval()


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Counter:
    """Counts the projections' matrix products."""

    def __init__(self, transformer: Any) -> None:
        self.count = 0
        for block in transformer.transformer_blocks:
            block.adaln_proj.linear.register_forward_hook(self._seen)

    def _seen(self, *_: Any) -> None:
        self.count += 1


def same(got: Any, want: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def test_announced_or_looked_up_the_forward_is_bit_exact_and_projects_once(
    stock: Any, undo: ExitStack
) -> None:
    given = inputs(stock)
    want = stock(**given)
    other = {**given, "timestep": given["timestep"] / 2}
    want_other = stock(**other)
    counter = Counter(stock)
    folded = FoldedAdaLN(stock, undo)
    blocks = len(stock.transformer_blocks)
    tables, _ = folded.prepare([given["timestep"], other["timestep"]])
    assert counter.count == 2 * blocks
    with folded.using(tables):
        assert same(stock(**given), want)
        # Announced tables are taken as they are: that is what spares the wait for the embedding.
        assert not same(stock(**other), want_other)
    assert same(stock(**other), want_other)
    assert same(stock(**given), want)
    assert counter.count == 2 * blocks
    undo.close()
    assert same(stock(**given), want)
    assert counter.count == 3 * blocks


@torch.no_grad()
def test_a_loaded_merged_and_removed_lora_is_honoured(stock: Any, undo: ExitStack) -> None:
    from peft import LoraConfig

    given = inputs(stock)
    plain = stock(**given)
    reference = copy.deepcopy(stock)
    FoldedAdaLN(stock, undo)
    assert same(stock(**given), plain)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["adaln_proj.linear"], init_lora_weights=False)
    outputs = []
    for model in (reference, stock):
        torch.manual_seed(3)
        model.add_adapter(config)
        adapted = model(**given)
        halved = model(**given, attention_kwargs={"scale": 0.5})
        model.fuse_lora()
        merged = model(**given)
        model.unload_lora()
        kept = model(**given)
        outputs.append((adapted, halved, merged, kept))
    for got, want in zip(outputs[1], outputs[0], strict=True):
        assert same(got, want)
        assert not same(got, plain)


@torch.no_grad()
def test_the_oldest_tables_go_first(stock: Any, undo: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(stock)
    folded = FoldedAdaLN(stock, undo)
    steps = [torch.tensor([value]) for value in (0.1, 0.2, 0.3)]
    (one,) = folded.prepare(steps[:1])
    monkeypatch.setattr(h3_folded, "HELD_BYTES", 2 * one.nbytes)
    folded.prepare(steps)
    made = counter.count
    folded.prepare(steps[1:])
    assert counter.count == made
    folded.prepare(steps[:1])
    assert counter.count == made + len(stock.transformer_blocks)


def test_a_projection_of_another_kind_is_refused(stock: Any, undo: ExitStack) -> None:
    stock.transformer_blocks[3].adaln_proj.linear = torch.nn.Sequential(
        stock.transformer_blocks[3].adaln_proj.linear
    )
    with pytest.raises(UserError, match="AdaLN projection is a Sequential"):
        FoldedAdaLN(stock, undo)


@pytest.mark.parametrize("shape", [(4608, 32), (96768, 2688), (4608,)])
def test_the_sample_of_a_weight_is_from_all_over_it(shape: tuple[int, ...]) -> None:
    columns = shape[-1] if len(shape) > 1 else 1
    places = h3_folded._sample(torch.arange(torch.Size(shape).numel()).view(shape))
    assert 32 <= len(places) <= 64
    assert len(set((places % columns).tolist())) >= min(columns, 16)
    # And no quarter of the rows is left out.
    assert len(set((4 * (places // columns) // shape[0]).tolist())) == 4
