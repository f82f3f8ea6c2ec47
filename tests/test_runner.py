"""One request end to end on the second family: the runner knows no model's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from videoaccel.errors import UserError
from videoaccel.install import accelerate
from videoaccel.media import read_video
from videoaccel.pipelines.request import Cancelled, Request
from videoaccel.receipt import receipt_of
from videoaccel.runner import noise_digest, run_request


def test_a_family_without_sound_makes_a_silent_clip(build_wan: Callable[..., Any], tmp_path: Path) -> None:
    pipe = build_wan()
    embeds = torch.randn(1, 512, 32, generator=torch.Generator().manual_seed(0))
    request = Request(prompt="a boat", height=32, width=48, num_frames=5, steps=2, seed=3, guidance=1.0)
    with accelerate(pipe, model="tiny", weights="random") as handle:
        outcome = run_request(handle, request, out=tmp_path / "a.mp4", prompt_embeds=embeds)
    video = read_video(tmp_path / "a.mp4")
    assert video.frames.shape == (5, 32, 48, 3) and video.audio is None
    receipt = outcome.receipt
    # Wan makes N forwards of N steps a guidance branch, where H3 makes N-1.
    assert (receipt.model, receipt.weights, receipt.status) == ("tiny", "random", "completed")
    assert (receipt.family, receipt.steps, receipt.forwards.dense) == ("wan", 2, 2)
    # The embeddings were given, so no encode stage is booked.
    assert receipt.timings.encode_s == 0.0 and receipt.timings.decode_s > 0
    assert receipt.timings.mux_s > 0
    assert len(noise_digest(outcome.clip)) == 64


def test_cancel_stops_before_the_next_step_and_writes_nothing(
    build_wan: Callable[..., Any], tmp_path: Path
) -> None:
    done: list[int] = []
    request = Request(prompt="a boat", height=32, width=32, num_frames=5, steps=4, guidance=1.0)
    with accelerate(build_wan()) as handle, pytest.raises(Cancelled, match="2 of 4") as caught:
        run_request(
            handle,
            request,
            out=tmp_path / "a.mp4",
            prompt_embeds=torch.zeros(1, 512, 32),
            on_progress=lambda progress: done.append(progress.done if progress.stage == "denoise" else 0),
            cancel=lambda: max(done, default=0) == 2,
        )
    assert max(done) == 2 and list(tmp_path.iterdir()) == []
    receipt = receipt_of(caught.value)
    assert receipt is not None and receipt is handle.receipt
    assert (receipt.status, receipt.error) == ("cancelled", "Cancelled after 2 of 4 steps.")
    assert receipt.forwards.dense == len(receipt.timings.step_s) == 2
    assert receipt.timings.mux_s == 0 and receipt.rows["video"] > 0
    assert "cancelled: t2v" in handle.summary()


def test_an_output_that_cannot_be_written_leaves_nothing(
    build_wan: Callable[..., Any], tmp_path: Path
) -> None:
    pipe = build_wan()
    request = Request(prompt="a boat", height=32, width=32, num_frames=5, steps=2, guidance=1.0)
    with accelerate(pipe) as handle, pytest.raises(UserError, match="absent") as caught:
        run_request(
            handle,
            request,
            out=tmp_path / "absent" / "a.mp4",
            prompt_embeds=torch.zeros(1, 512, 32),
        )
    assert list(tmp_path.iterdir()) == []
    receipt = receipt_of(caught.value)
    assert receipt is not None and receipt.status == "failed" and "absent" in str(receipt.error)
