"""Reads the camera's pan off the background: the one shift that explains its change from frame to frame."""

import numpy as np
from scipy import ndimage

from evals.world.spec import FPS, PAN_SPEED


def background_velocity(frames: np.ndarray, objects: np.ndarray) -> tuple[float, float]:
    """Mean velocity of the background, x and y, in canvas widths a second (least squares on image gradients).

    Args:
        frames: `(T, H, W, 3)` uint8.
        objects: `(T, H, W)` bool, pixels to leave out.
    """
    if len(frames) < 2:
        return 0.0, 0.0
    grey = frames.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    grey = ndimage.gaussian_filter(grey, (0, 1.6, 1.6))
    keep = ~(objects[1:] | objects[:-1])
    keep[:, :3] = keep[:, -3:] = keep[:, :, :3] = keep[:, :, -3:] = False
    middle = 0.5 * (grey[1:] + grey[:-1])
    gx, gy = np.zeros_like(middle), np.zeros_like(middle)
    gx[:, :, 1:-1] = 0.5 * (middle[:, :, 2:] - middle[:, :, :-2])
    gy[:, 1:-1] = 0.5 * (middle[:, 2:] - middle[:, :-2])
    gt = grey[1:] - grey[:-1]
    gx, gy, gt = gx[keep], gy[keep], gt[keep]
    normal = np.array([[gx @ gx, gx @ gy], [gx @ gy, gy @ gy]], float)
    if np.linalg.det(normal) < 1e-3:
        return 0.0, 0.0
    velocity = -np.linalg.solve(normal, np.array([gx @ gt, gy @ gt], float))
    return float(velocity[0]) * FPS / frames.shape[2], float(velocity[1]) * FPS / frames.shape[1]


def pan_of(velocity: float) -> str:
    """The pan that a horizontal background velocity means: scenery moves right when the camera pans left."""
    if abs(velocity) < PAN_SPEED / 2:
        return ""
    return "left" if velocity > 0 else "right"
