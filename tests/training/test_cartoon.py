"""The cartoon of a hand-made clip, in closed form."""

import torch

from training.cartoon import CHANNELS, MOMENTS, cartoon, covered_rows, readout, row_weights


def test_one_pure_red_row_is_covered_with_hue_zero_in_every_latent_frame():
    frames = torch.full((1, 22, 32, 32, 3), 128, dtype=torch.uint8)
    frames[:, :, 16:, :16] = torch.tensor([255, 0, 0], dtype=torch.uint8)  # the third row of each frame
    rows = cartoon(frames)
    assert rows.shape == (1, 7 * 4, CHANNELS)  # 22 frames are 7 latent frames
    cells = rows.float().view(7, 4, MOMENTS, 3, 16)
    expected = torch.zeros(7, 4, MOMENTS, 3, 16)
    expected[:, 2, :, 0] = expected[:, 2, :, 1] = 1.0  # covered, cosine of hue 0; its sine is 0
    torch.testing.assert_close(cells, expected)
    assert covered_rows(rows).view(7, 4).tolist() == [[0.0, 0.0, 1.0, 0.0]] * 7


def test_rows_weigh_alike_while_places_are_open_and_by_the_given_ratio_once_decided():
    frames = torch.full((1, 5, 32, 32, 3), 128, dtype=torch.uint8)
    frames[:, :, :16, :16] = torch.tensor([0, 0, 255], dtype=torch.uint8)
    rows = cartoon(frames)
    torch.testing.assert_close(row_weights(rows, torch.tensor([0.98]), 3.0), torch.ones(1, 8))
    decided = row_weights(rows, torch.tensor([0.5]), 3.0)
    torch.testing.assert_close(decided.mean(), torch.tensor(1.0))
    torch.testing.assert_close(decided[0, 0] / decided[0, 1], torch.tensor(3.0))


def test_reading_is_the_wiener_filter_of_a_cartoon_that_some_channels_hold():
    """y = x A with white x of unit variance: under noise s the best reading is A / (1 + s^2)."""
    torch.manual_seed(0)
    rows = torch.randn(64, 512, 12)
    mixing = torch.randn(12, 5)
    got = readout(rows, rows @ mixing + 3.0, noise=0.5)  # an offset is no matter
    torch.testing.assert_close(got, mixing / 1.25, atol=0.03, rtol=0)
