"""Clips through the bundled codecs, batched, against diffusers' calls one by one."""

import numpy as np
import torch

from evals.adherence import truth
from evals.reconstruction import reconstruct
from evals.world.spec import draw_clip
from videoaccel.pipelines.loading import load


def test_a_batch_is_coded_as_its_clips_alone():
    pipe = load("tiny-h3", device="cpu", dtype=torch.float32)
    clips = [truth(draw_clip(seed, frames=22)) for seed in (1, 2)]
    mean, std = (np.array(v, np.float32) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for (frames, wave), got in zip(
        clips, reconstruct(pipe, clips, torch.device("cpu"), batch=2), strict=True
    ):
        pixels = torch.from_numpy((frames.astype(np.float32) / 255 - mean) / std).permute(3, 0, 1, 2)[None]
        with torch.no_grad():
            want = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mode()).sample[0]
            sound = pipe.audio_vae(torch.from_numpy(wave)[:, None]).sample[:, 0, : wave.shape[1]]
        want = np.clip(want.permute(1, 2, 3, 0).numpy() * std + mean, 0, 1) * 255
        # One grey level: rounding of a value that sits at a half.
        assert np.abs(got[0].astype(np.float32) - want).max() <= 0.51
        np.testing.assert_allclose(got[1], sound.numpy(), atol=1e-5)
