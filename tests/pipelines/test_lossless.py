"""Tier `lossless` on the bundled model: the same clip, by ops that the receipt names."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from videoaccel.config import AccelConfig, KernelsConfig
from videoaccel.errors import UserError
from videoaccel.install import accelerate
from videoaccel.kernels import technique
from videoaccel.pipelines.h3_folded import FoldedAdaLN
from videoaccel.pipelines.request import Request
from videoaccel.receipt import Recorder

REQUEST = Request(prompt="a red ring slides left", steps=4, num_frames=22, seed=1)
OPS = [
    "attention",
    "norm_modulate",
    "gate_residual",
    "gate_residual_norm_modulate",
    "qk_norm_rope",
    "swiglu",
]


def latents(pipe: Any, config: AccelConfig, request: Request = REQUEST) -> tuple[dict[str, Any], Any]:
    with accelerate(pipe, config) as handle:
        clip, receipt = handle.run(request, decode=False)
    return dict(clip.latents), receipt


def test_the_clip_is_the_exact_one_and_the_receipt_says_what_ran(tiny: Any) -> None:
    exact, _ = latents(tiny, AccelConfig())
    got, receipt = latents(tiny, AccelConfig(tier="lossless"))
    again, _ = latents(tiny, AccelConfig())
    for stream, want in exact.items():
        # Float32 roundings of three forwards; the references are torch's own ops, so mostly none at all.
        assert float((got[stream] - want).norm() / want.norm()) < 1e-5
        assert torch.equal(again[stream], want)
    assert [(choice.op, choice.impl) for choice in receipt.kernels] == [(op, "eager") for op in OPS]
    assert receipt.tier_served == "lossless"
    assert receipt.notes == ()


def test_a_runs_tables_are_made_once_for_all_its_steps(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    prepare = FoldedAdaLN.prepare

    def counting(self: FoldedAdaLN, timesteps: Any) -> Any:
        asked.append(len(timesteps))
        return prepare(self, timesteps)

    monkeypatch.setattr(FoldedAdaLN, "prepare", counting)
    # Announced tables leave nothing to look up: that would wait for the device at every step.
    monkeypatch.setattr(FoldedAdaLN, "_looked_up", None)
    with accelerate(tiny, AccelConfig(tier="lossless")) as handle:
        for seed in (1, 2):
            handle.run(Request(prompt="a red ring", steps=4, num_frames=22, seed=seed), decode=False)
    assert asked == [3, 3]


def test_parts_can_be_left_out_and_pins_are_kept_or_refused(tiny: Any) -> None:
    _, receipt = latents(tiny, AccelConfig(tier="lossless", kernels=KernelsConfig(fuse=False)))
    assert receipt.kernels == ()
    pinned = KernelsConfig(pin={"swiglu": "eager"}, fold=False)
    _, receipt = latents(tiny, AccelConfig(tier="lossless", kernels=pinned))
    assert {choice.op: choice.why for choice in receipt.kernels}["swiglu"] == "pinned by the config"
    for pin, fault in (
        ({"swiglu": "triton"}, r"swiglu is pinned to triton, which runs on nvidia and amd, not on cpu"),
        ({"swiglu": "tritn"}, r"implementation of swiglu 'tritn'"),
        ({"swigloo": "eager"}, r"op to pin 'swigloo'"),
    ):
        with pytest.raises(UserError, match=fault):
            accelerate(tiny, AccelConfig(tier="lossless", kernels=KernelsConfig(pin=pin)))
        assert not hasattr(tiny, "videoaccel_handle")
    with pytest.raises(UserError, match="of no use without fuse"):
        config = KernelsConfig(fuse=False, pin={"swiglu": "eager"})
        accelerate(tiny, AccelConfig(tier="lossless", kernels=config))


def test_a_fall_below_the_devices_best_is_logged_once_and_in_every_receipt(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from videoaccel.kernels.catalogue import CATALOGUE

    # A card whose Triton is not installed, on which the eager ops run as well as here.
    monkeypatch.setattr(technique, "live_profile", lambda device: CATALOGUE["H200"])
    monkeypatch.setattr(technique, "installed_packages", lambda: {})
    config = KernelsConfig(pin={"attention": "eager"})
    with (
        caplog.at_level(logging.WARNING),
        accelerate(tiny, AccelConfig(tier="lossless", kernels=config)) as handle,
    ):
        receipts = [handle.run(REQUEST, decode=False)[1] for _ in range(2)]
    said = [record.getMessage() for record in caplog.records if "would run on" in record.getMessage()]
    assert len(said) == len(set(said)) == 5
    assert "pip install 'triton>=3.6'" in said[0]
    for receipt in receipts:
        assert receipt.warnings == tuple(said)


def test_the_receipt_names_the_attention_that_ran(tiny: Any) -> None:
    def attention(receipt: Any) -> tuple[str, str]:
        (choice,) = (choice for choice in receipt.kernels if choice.op == "attention")
        return choice.impl, choice.why

    kept = ("_native_math", "set on the transformer, where it stays")
    tiny.transformer.set_attention_backend("_native_math")
    try:
        _, receipt = latents(tiny, AccelConfig(tier="lossless"))
        assert attention(receipt) == kept
        assert receipt.notes == ("attention stays with _native_math, set on the transformer before",)
        pinned = KernelsConfig(pin={"attention": "eager"})
        with pytest.raises(UserError, match=r"but _native_math is set on the transformer"):
            accelerate(tiny, AccelConfig(tier="lossless", kernels=pinned))
    finally:
        tiny.transformer.reset_attention_backend()
    with accelerate(tiny, AccelConfig(tier="lossless")) as handle:
        assert attention(handle.run(REQUEST, decode=False)[1]) == ("eager", "the best for this device")
        tiny.transformer.set_attention_backend("_native_math")
        try:
            assert attention(handle.run(REQUEST, decode=False)[1]) == kept
        finally:
            tiny.transformer.reset_attention_backend()


@pytest.mark.parametrize("fold", [True, False])
def test_offloading_that_would_be_passed_by_is_refused_when_it_comes(tiny: Any, fold: bool) -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    config = AccelConfig(tier="lossless", kernels=KernelsConfig(fold=fold))
    fault = "is offloaded or hooked by itself"
    with accelerate(tiny, config) as handle:
        handle.run(REQUEST, decode=False)
        cpu_offload(tiny.transformer, execution_device="cpu")
        try:
            with pytest.raises(UserError, match=fault):
                handle.run(REQUEST, decode=False)
        finally:
            remove_hook_from_submodules(tiny.transformer)


def test_blocks_compile_once_for_a_shape_and_the_receipt_counts_it(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from videoaccel.kernels import compiling

    # Traced and run by torch: Inductor would take a C++ compiler and half a minute for the same count.
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    exact, _ = latents(tiny, AccelConfig())
    config = AccelConfig(tier="lossless", kernels=KernelsConfig(compile=True))
    with accelerate(tiny, config) as handle:
        counts = []
        for asked in (REQUEST, REQUEST, replace(REQUEST, num_frames=39)):
            clip, receipt = handle.run(asked, decode=False)
            counts.append(receipt.timings.compilations)
            assert (receipt.timings.compile_s > 0) == (counts[-1] > 0)
            if len(counts) == 1:
                video = clip.latents["video"]
                assert float((video - exact["video"]).norm() / exact["video"].norm()) < 1e-5
    # The first forward has a table row less than the others, as both streams start at one noise level.
    assert counts == [2, 0, 2]
    assert {choice.impl for choice in receipt.kernels if choice.op != "attention"} == {"inductor"}
    assert latents(tiny, AccelConfig(tier="lossless"))[1].timings.compilations == 0
    for wrong in ({"precision": "fp8"}, {"pin": {"swiglu": "eager"}}, {"fuse": False}):
        with pytest.raises(UserError, match=r"kernels\.compile"):
            accelerate(tiny, AccelConfig(tier="lossless", kernels=KernelsConfig(compile=True, **wrong)))


def test_a_transformer_that_was_replaced_is_refused(tiny: Any) -> None:
    own, other = tiny.transformer, copy.deepcopy(tiny.transformer)
    with accelerate(tiny, AccelConfig(tier="lossless")) as handle:
        tiny.transformer = other
        try:
            with pytest.raises(UserError, match=r"transformer was replaced since accelerate\(\)"):
                handle.run(REQUEST, decode=False)
        finally:
            tiny.transformer = own
        handle.run(REQUEST, decode=False)


def test_removal_under_inference_mode_leaves_weights_that_can_be_trained(tiny: Any) -> None:
    with torch.inference_mode():
        accelerate(tiny, AccelConfig(tier="lossless")).remove()
    assert not any(parameter.is_inference() for parameter in tiny.transformer.parameters())


def test_a_pipeline_that_moved_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerate(tiny, AccelConfig(tier="lossless")) as handle:
        monkeypatch.setattr(type(tiny), "_execution_device", torch.device("cuda"))
        with pytest.raises(UserError, match="chosen for cpu, and the pipeline is on cuda now"):
            technique.KERNELS.begin(
                handle.family.start(tiny, REQUEST), Recorder(handle.config), KernelsConfig()
            )


def test_the_tables_are_in_the_receipts_memory(tiny: Any) -> None:
    _, receipt = latents(tiny, AccelConfig(tier="lossless"))
    config = tiny.transformer.config
    # Distinct noise levels of three forwards: both streams start at pure noise, and part from there on.
    levels = 1 + 2 + 2
    # Of each, in every block, six tables for three modalities, float32.
    assert receipt.memory.state == levels * config.num_layers * 3 * 6 * config.hidden_size * 4


def test_exact_takes_no_kernels() -> None:
    with pytest.raises(UserError, match="tier 'exact' runs diffusers' own operations"):
        AccelConfig(kernels=KernelsConfig())
    plain = AccelConfig(tier="lossless", kernels=KernelsConfig(pin={"swiglu": "eager"}))
    assert AccelConfig.from_yaml(plain.to_yaml()) == plain
    # What the tier installs by itself is not written into the config.
    assert AccelConfig(tier="lossless").to_dict() == {"tier": "lossless"}
    assert AccelConfig(tier="lossless").sections() == {"kernels": KernelsConfig()}


def test_wan_takes_none_yet(build_tiny_wan: Any) -> None:
    with pytest.raises(UserError, match="takes no kernels yet; use tier 'exact'"):
        accelerate(build_tiny_wan(), AccelConfig(tier="lossless"))
