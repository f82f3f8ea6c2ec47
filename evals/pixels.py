"""Between uint8 frames and the pixel space of MiniMax-H3's video VAE (ImageNet statistics over [0, 1])."""

import torch

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """uint8 `(B, T, H, W, 3)` to the video VAE's pixel space `(B, 3, T, H, W)` float32."""
    mean = torch.tensor(PIXEL_MEAN, device=frames.device).view(1, 3, 1, 1, 1)
    std = torch.tensor(PIXEL_STD, device=frames.device).view(1, 3, 1, 1, 1)
    return (frames.permute(0, 4, 1, 2, 3).float() / 255.0 - mean) / std


def denormalise(pixels: torch.Tensor) -> torch.Tensor:
    """The inverse of `normalise`, rounded and clamped."""
    mean = torch.tensor(PIXEL_MEAN, device=pixels.device).view(1, 3, 1, 1, 1)
    std = torch.tensor(PIXEL_STD, device=pixels.device).view(1, 3, 1, 1, 1)
    return ((pixels.float() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
