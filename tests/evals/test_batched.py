"""The batched training forward against diffusers' and transformers' own, on small random networks."""

import numpy as np
import pytest
import torch
from PIL import Image

from evals.batched import make_layout, patches_of, text_forward, transformer_forward
from training.batches import draw_sigmas
from training.skeleton import IMAGE_PROCESSOR, TEXT_LAYER, TRANSFORMER, build_text_encoder, build_tokenizer

WIDTH = TRANSFORMER["in_channels"] * 4


@pytest.fixture(scope="module")
def networks():
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    small = {**TRANSFORMER, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 1, "ffn_dim": 96}
    transformer = MiniMaxH3Transformer3DModel(**small).eval()
    encoder = build_text_encoder(tokenizer).eval()
    # Norm weights start at one and biases at zero, which would hide a forgotten one.
    for parameter in [*transformer.parameters(), *encoder.parameters()]:
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return tokenizer, transformer, encoder


def presentation(tokenizer, pads: int) -> tuple[list[int], list[int]]:
    label = tokenizer("<Picture 1>: ", add_special_tokens=False)["input_ids"]
    start, pad, end = (
        tokenizer.convert_tokens_to_ids(f"<|{n}|>") for n in ("vision_start", "image_pad", "vision_end")
    )
    prompt = tokenizer("this object spins quickly", add_special_tokens=False)["input_ids"]
    ids = label + [start] + [pad] * pads + [end] + prompt
    return ids, [1] * len(label) + [0] * (pads + 2) + [1] * len(prompt)


@torch.no_grad()
def test_text_with_a_picture_equals_transformers(networks):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer, _, encoder = networks
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 1, 64, 64, 3), dtype=np.uint8))
    ids, _ = presentation(tokenizer, 4)
    got = text_forward(encoder, torch.tensor([ids] * 2), TEXT_LAYER, images, (4, 4))
    settings = {key: value for key, value in IMAGE_PROCESSOR.items() if key != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**settings)
    for index in range(2):
        vision = processor(images=[Image.fromarray(images[index, 0].numpy())], return_tensors="pt")
        assert torch.equal(vision["pixel_values"], patches_of(images[index])[0])
        tokens = torch.tensor([ids])
        kinds = (tokens == encoder.config.image_token_id).long()
        want = encoder.model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=kinds,
            use_cache=False,
            output_hidden_states=True,
            **vision,
        ).hidden_states[TEXT_LAYER]
        torch.testing.assert_close(got[index], want[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("conditions", [{}, {"reference_edge": 8}, {"anchors": ("first", "last")}])
@torch.no_grad()
def test_velocities_equal_diffusers(networks, conditions):
    """Each sample has its own noise levels; the stock forward takes one set a call."""
    tokenizer, transformer, _ = networks
    _, tags = presentation(tokenizer, 4)
    layout = make_layout(torch.tensor(tags), 2, 16, 37, torch.device("cpu"), **conditions)
    generator = torch.Generator().manual_seed(1)
    video = torch.randn(3, len(layout.video), WIDTH, generator=generator)
    audio = torch.randn(3, len(layout.audio), TRANSFORMER["audio_in_channels"], generator=generator)
    text = torch.randn(3, len(tags), TRANSFORMER["text_dim"], generator=generator)
    times = torch.tensor([[0.1, 0.3, 0.999], [0.5, 0.6, 0.999], [0.9, 0.95, 0.999]])
    got = transformer_forward(transformer, layout, video, audio, text, times)
    for index in range(3):
        want = transformer(
            hidden_states=video[index : index + 1],
            audio_hidden_states=audio[index : index + 1],
            encoder_hidden_states=text[index : index + 1],
            timestep=times[index],
            timestep_indices=layout.times.argmax(1),
            token_tags=layout.tags,
            position_ids=layout.position_ids,
            video_indices=layout.video,
            audio_indices=layout.audio,
            text_indices=layout.text,
        )
        torch.testing.assert_close(got[0][index], want.sample[0, layout.conditions :], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(got[1][index], want.audio_sample[0], atol=2e-5, rtol=1e-4)


def test_noise_levels_of_the_streams_are_tied_as_the_schedulers_tie_them():
    from diffusers import MiniMaxH3Scheduler

    video, audio = draw_sigmas(4096, torch.device("cpu"), torch.Generator().manual_seed(0))
    grids = []
    for shift in (12.0, 3.0):
        scheduler = MiniMaxH3Scheduler(shift=shift)
        scheduler.set_timesteps(50)
        grids.append(scheduler.sigmas.numpy())
    want = np.interp(video.numpy(), grids[0][::-1], grids[1][::-1])
    # Interpolating between 50 grid points costs a little where the curve bends.
    assert np.abs(want - audio.numpy()).max() < 0.02
    # Of ten, four follow the schedule, two lie on its forming part, four are even in sigma.
    # Below 0.5: 1 / 13 of those along the schedule, half of the even ones.
    assert abs(float((video < 0.5).float().mean()) - (0.4 / 13 + 0.2)) < 0.02
    # Above 0.9: 4 / 7 of those along the schedule, all on the forming part, a tenth of the even ones.
    assert abs(float((video > 0.9).float().mean()) - (0.4 * 4 / 7 + 0.2 + 0.04)) < 0.03
