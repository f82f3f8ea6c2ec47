"""The adherence evaluation on clips whose answers are known."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evals import adherence
from evals.adherence import Evaluation, clip_psnr, held_out_clips, judge_clips, shares, truth
from evals.world.spec import is_held_out


def test_prompts_hold_no_combination_that_was_trained_on():
    specs = held_out_clips(200, 39)
    assert all(is_held_out(item.color, item.shape, item.motion) for spec in specs for item in spec.objects)
    two = sum(len(spec.objects) == 2 for spec in specs) / len(specs)
    # 40 % is asked for; three standard deviations of 200 draws.
    assert abs(two - 0.4) < 3 * math.sqrt(0.4 * 0.6 / 200)
    assert len({spec.caption() for spec in specs}) > 150


def test_shares_leave_out_clips_that_a_flag_does_not_apply_to():
    rows = [{"color": True, "sound": None}, {"color": False, "sound": True}, {"color": True, "sound": None}]
    assert shares(rows, ["color", "sound"]) == {"color": pytest.approx(200 / 3), "sound": 100.0}
    assert shares([{"sound": None}], ["sound"]) == {}


def test_psnr_of_a_known_offset():
    clip = np.full((4, 8, 8, 3), 100, np.uint8)
    assert clip_psnr(clip, clip + 5) == pytest.approx(20 * math.log10(255 / 5))


def test_the_worlds_own_clips_are_judged_right_and_swapped_ones_wrong():
    specs = held_out_clips(4, 39)
    clips = [truth(spec) for spec in specs]
    rows = judge_clips(clips, specs)
    assert [row["all"] for row in rows] == [True] * 4
    swapped = judge_clips(clips[:1], specs[1:2])
    assert specs[0].caption() != specs[1].caption()
    assert not swapped[0]["all"]


@pytest.mark.parametrize("quick", [True, False])
def test_the_result_says_what_its_counts_of_forwards_are(quick, tmp_path, monkeypatch):
    """Every question is skipped; what would be sampled is noted down."""
    sampled = []
    monkeypatch.setattr(adherence, "open_run", lambda *_: (None, torch.device("cpu")))
    monkeypatch.setattr(adherence, "Sampler", lambda *_, **__: None)
    for question in ("verifier", "dense_clips", "references", "keyframes"):
        monkeypatch.setattr(Evaluation, question, lambda *_: None)
    monkeypatch.setattr(Evaluation, "fewer_steps", lambda _, forwards, *__: sampled.append(forwards))
    out = tmp_path / "r.json"
    assert adherence.main(["--out", str(out), *(["--quick"] if quick else [])]) == 0
    config = json.loads(out.read_text())["config"]
    assert (
        config["forwards"] == 49
        and config["plain_forwards"] == sampled == [25, 12, 8, 4][: 2 if quick else 4]
    )
    assert "Dense clips take 49 forwards (50 steps)" in config["counted"]
    assert "25 are 26 steps" in config["counted"] and "4 are 5 steps" in config["counted"]


def test_the_verifiers_own_ceiling_is_told_of_speed_and_sound_too(monkeypatch):
    rows = [
        {**dict.fromkeys(adherence.FLAGS, True), "speed": right, "sound": sound, "sharpness": 0.1}
        for right, sound in ((True, None), (False, True), (True, False), (True, True))
    ]
    monkeypatch.setattr(adherence, "judge_clips", lambda *_: rows)
    monkeypatch.setattr(adherence, "truths", lambda *_: [])
    evaluation = Evaluation(SimpleNamespace(device=torch.device("cpu")), 4)
    evaluation.verifier(39)
    evaluation.verifier(124, "_124")
    for suffix in ("", "_124"):
        assert evaluation.metrics[f"verifier_accuracy{suffix}"] == 100.0
        assert evaluation.metrics[f"verifier_speed{suffix}"] == 75.0
        assert evaluation.metrics[f"verifier_sound{suffix}"] == pytest.approx(200 / 3)
