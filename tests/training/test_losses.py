"""The teacher's guidance in closed form, and which errors show in a cartoon."""

import copy

import pytest
import torch

from evals.batched import block_forward
from training.batches import Batcher, add_noise, blank_prompts, predict
from training.cartoon import SCALE
from training.dit import load_networks
from training.losses import Drawn, Teacher, drawn_error
from training.skeleton import build_tokenizer


@torch.no_grad()
def test_a_teacher_is_led_to_the_prompt_and_away_from_its_younger_self(numbered):
    torch.manual_seed(0)
    networks = load_networks(None, torch.device("cpu"))
    for parameter in networks.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))  # fresh heads answer zero to everything
    younger = copy.deepcopy(networks)
    for parameter in younger["transformer"].parameters():
        parameter.mul_(0.9)
    batcher = Batcher(numbered, build_tokenizer()).short()
    batch = batcher.draw("t2va", 2)
    noisy = add_noise(batch, (torch.tensor([0.9, 0.4]), torch.tensor([0.7, 0.2])))
    everyone = torch.ones(2, dtype=torch.bool)
    blank_ids = blank_prompts(batch, everyone, batcher.blank)
    told = predict(networks, batch, batch.token_ids, noisy, block_forward)
    untold = predict(networks, batch, blank_ids, noisy, block_forward)
    worse = predict(younger, batch, batch.token_ids, noisy, block_forward)

    plain = Teacher(networks=networks, guidance=(4.0, 2.0))
    video, audio = plain.velocities(batch, noisy, batcher.blank, block_forward)
    assert not torch.allclose(told[0], untold[0], atol=1e-3)
    torch.testing.assert_close(video, 4 * told[0] - 3 * untold[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(audio, 2 * told[1] - untold[1], atol=1e-4, rtol=1e-4)

    led = Teacher(networks=networks, guidance=(4.0, 2.0), worse=younger, away=1.5)
    led_video, led_audio = led.velocities(batch, noisy, batcher.blank, block_forward)
    torch.testing.assert_close(led_video - video, 1.5 * (told[0] - worse[0]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(led_audio, audio)


def test_only_errors_that_the_reading_sees_are_drawn():
    reading = torch.zeros(4, 2)
    reading[0, 0] = 2.0
    want = torch.zeros(3, 5, 4)
    seen, unseen = want.clone(), want.clone()
    seen[..., 0], unseen[..., 1:] = 0.1, 0.1
    assert not drawn_error(unseen, want, reading).any()
    # One of two numbers is off by 0.2 everywhere: a mean square of 0.02.
    torch.testing.assert_close(drawn_error(seen, want, reading), torch.full((3,), 0.02 / SCALE))


def test_noise_levels_of_large_and_of_small_errors_count_alike():
    # Errors of 1 at one level and of 0.1 at another, for good: squares of 1 and 0.01.
    drawn = Drawn(torch.eye(4))
    sigma = torch.tensor([1.0, 0.5, 1.0, 0.5])
    assert len(drawn.places(sigma).unique()) == 2
    got = torch.stack([torch.full((3, 4), size) for size in (1.0, 0.1, 1.0, 0.1)]).requires_grad_()
    for _ in range(3):
        parts = drawn(got, torch.zeros_like(got), sigma)
        assert float(parts["drawn_evenly"]) == pytest.approx(1.0)
        assert float(parts["drawn"]) == pytest.approx((1.0 + 0.01) / 2 / SCALE)
    parts["drawn_evenly"].backward()
    # The gradient of a square over its own mean is two over the error, spread over 4 clips of 12 numbers.
    for clip, size in zip(got.grad, (1.0, 0.1, 1.0, 0.1), strict=True):
        torch.testing.assert_close(clip, torch.full((3, 4), 2 / size / 48))


def test_a_level_remembers_and_others_are_left_alone():
    drawn = Drawn(torch.eye(2), memory=0.75)
    for size in (2.0, 4.0):
        drawn(torch.full((1, 1, 2), size), torch.zeros(1, 1, 2), torch.tensor([0.3]))
    place = drawn.places(torch.tensor([0.3]))
    assert float(drawn.means[place]) == pytest.approx((0.75 * 4 + 0.25 * 16) / SCALE)
    assert int((drawn.means > 0).sum()) == 1
