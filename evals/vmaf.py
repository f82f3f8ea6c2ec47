"""VMAF through the ffmpeg binary that imageio-ffmpeg ships with libvmaf and its model built in."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from videoaccel.errors import UserError
from videoaccel.media.mp4 import even_frames


@functools.cache
def ffmpeg() -> str:
    """The binary, once it is known to hold libvmaf.

    Raises:
        UserError: imageio-ffmpeg is missing, or its ffmpeg has no libvmaf.
    """
    try:
        import imageio_ffmpeg

        binary: str = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        raise UserError('VMAF needs ffmpeg: pip install "videoaccel[eval]"') from None
    filters = subprocess.run(
        [binary, "-hide_banner", "-filters"], capture_output=True, text=True, check=False
    )
    if " libvmaf " not in filters.stdout:
        raise UserError("VMAF needs an ffmpeg with libvmaf; this one has none: pip install -U imageio-ffmpeg")
    return binary


def vmaf(reference_THWC: np.ndarray[Any, Any], test_THWC: np.ndarray[Any, Any], fps: float) -> float:
    """Mean VMAF of a clip against its reference, 0 to 100 (model vmaf_v0.6.1).

    The model was fitted on 1080p film; on a small canvas it still orders clips, but its scale means little.

    Args:
        reference_THWC, test_THWC: `(T, H, W, 3)` uint8.
        fps: frames a second.

    Raises:
        UserError: no ffmpeg with libvmaf, or it refused the clips.
    """
    binary = ffmpeg()
    height, width = even_frames(reference_THWC[:1]).shape[1:3]
    with tempfile.TemporaryDirectory() as folder:
        # libvmaf takes the clip under test first and the reference second.
        inputs: list[str] = []
        for name, clip in (("test", test_THWC), ("reference", reference_THWC)):
            path = Path(folder) / f"{name}.rgb"
            even_frames(clip).tofile(path)
            inputs += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}"]
            inputs += ["-i", str(path)]
        # The log's path is a filter argument, where ':' is syntax: a bare name in the working folder.
        graph = (
            "[0:v]format=yuv420p[test];[1:v]format=yuv420p[reference];"
            "[test][reference]libvmaf=log_fmt=json:log_path=vmaf.json"
        )
        run = subprocess.run(
            [binary, "-hide_banner", "-v", "error", *inputs, "-lavfi", graph, "-f", "null", "-"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            raise UserError(f"VMAF failed: {run.stderr.strip() or 'ffmpeg gave no reason'}")
        log = json.loads((Path(folder) / "vmaf.json").read_text(encoding="utf-8"))
    if len(log["frames"]) != len(reference_THWC):
        raise UserError(f"VMAF saw {len(log['frames'])} of {len(reference_THWC)} frames")
    return float(log["pooled_metrics"]["vmaf"]["mean"])
