"""Where the objects of a clip are, row by row: what training looks at beside the velocity.

Objects cover a tenth of a clip and carry what the caption says, while most of the velocity error is
background that no caption fixes. A clip's cartoon is its objects without texture or background: coverage, and
coverage times the cosine and sine of the hue. Training predicts it from hidden states (after
REPA, Yu et al., 2024, which aligns them with a learned representation of the clean picture; the world gives a
better one for nothing) and weighs rows by it. Nothing of this is part of the model.
"""

import torch
import torch.nn.functional as F

CELL = 4  # pixels
ROW = 16  # pixels along the edge of one row of the sequence
MOMENTS = 2  # a latent frame covers up to four frames; their halves are kept apart
CHANNELS = MOMENTS * 3 * (ROW // CELL) ** 2
SCALE = 0.034  # about the cartoon's variance
SATURATED = 0.3  # objects are above, backgrounds below


def latent_groups(frames: int) -> list[list[int]]:
    """Which frames each latent frame covers: of a chunk of 17, the first alone and then four at a time."""
    groups = []
    for start in range(0, frames, 17):
        stop = min(start + 17, frames)
        groups.append([start])
        groups += [list(range(i, i + 4)) for i in range(start + 1, stop, 4)]
    return groups


def saturated(rgb: torch.Tensor, dim: int) -> torch.Tensor:
    """1.0 where colours in [0, 1] along `dim` (kept, at size 1) are an object's."""
    return ((rgb.amax(dim, keepdim=True) - rgb.amin(dim, keepdim=True)) > SATURATED).float()


def _hues(frames: torch.Tensor) -> torch.Tensor:
    """`(B, T, 3, H, W)` of coverage and hue from uint8 `(B, T, H, W, 3)`."""
    rgb = frames.float() / 255
    red, green, blue = rgb.unbind(-1)
    along, across = red - (green + blue) / 2, 0.75**0.5 * (green - blue)
    length = torch.hypot(along, across).clamp_min(1e-4)
    covered = saturated(rgb, -1)[..., 0]
    return torch.stack([covered, covered * along / length, covered * across / length], dim=2)


@torch.no_grad()
def cartoon(frames: torch.Tensor) -> torch.Tensor:
    """The cartoon of clips in the order of the video rows.

    Args:
        frames: uint8 `(B, 17n + 5, H, W, 3)`, edges multiples of 16.

    Returns:
        `(B, T' * H/16 * W/16, CHANNELS)` float16.
    """
    cells = F.avg_pool2d(_hues(frames).flatten(0, 1), CELL).unflatten(0, frames.shape[:2])
    halves = []
    for group in latent_groups(frames.shape[1]):
        middle = max(1, len(group) // 2)
        first, last = group[:middle], group[middle:] or group
        halves.append(torch.stack([cells[:, first].mean(1), cells[:, last].mean(1)], dim=1))
    grid = torch.stack(halves, dim=1)  # B, T', moments, 3, h, w
    side = ROW // CELL
    rows = grid.unflatten(5, (-1, side)).unflatten(4, (-1, side))  # B, T', m, 3, y, side, x, side
    return rows.permute(0, 1, 4, 6, 2, 3, 5, 7).flatten(4).flatten(1, 3).half()


def covered_rows(rows: torch.Tensor) -> torch.Tensor:
    """`(B, N)` float32: 1 for the rows of a cartoon that an object touches."""
    coverage = rows.unflatten(-1, (MOMENTS, 3, -1))[..., 0, :].flatten(-2)
    return (coverage > 0.02).any(-1).float()


def row_weights(rows: torch.Tensor, sigma: torch.Tensor, heaviest: float) -> torch.Tensor:
    """`(B, N)` weights of mean 1: `heaviest` times as much for object rows, where their place is decided.

    At the highest noise levels the place of an object is open, and a weight that depends on it would bias
    the expected velocity towards objects everywhere; there all rows count alike.

    Args:
        rows: the cartoon. sigma: `(B,)` noise level of the video.
    """
    decided = ((0.97 - sigma) / 0.12).clamp(0, 1)[:, None]
    weights = 1 + (heaviest - 1) * decided * covered_rows(rows)
    return weights / weights.mean()


def readout(rows: torch.Tensor, cartoons: torch.Tensor, noise: float = 0.5) -> torch.Tensor:
    """The best linear reading of cartoons from rows under white noise: ridge regression in closed form.

    Args:
        rows: `(B, N, 4 C)` clean latents of unit variance. cartoons: `(B, N, CHANNELS)`.
        noise: standard deviation of the noise.

    Returns:
        `(4 C, CHANNELS)` float32.
    """
    x, y = rows.flatten(0, 1).float(), cartoons.flatten(0, 1).float()
    x, y = x - x.mean(0), y - y.mean(0)
    gram = x.T @ x / len(x) + noise**2 * torch.eye(x.shape[1], device=x.device)
    return torch.linalg.solve(gram, x.T @ y / len(x))
