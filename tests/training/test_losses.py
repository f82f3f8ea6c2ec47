"""The teacher's guidance in closed form, and which errors show in a cartoon."""

import copy

import torch

from evals.batched import block_forward
from training.batches import Batcher, add_noise, blank_prompts, predict
from training.cartoon import SCALE
from training.dit import load_networks
from training.losses import Teacher, drawn_error
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
    assert drawn_error(unseen, want, reading) == 0
    # One of two numbers is off by 0.2 everywhere: a mean square of 0.02.
    torch.testing.assert_close(drawn_error(seen, want, reading), torch.tensor(0.02 / SCALE))
