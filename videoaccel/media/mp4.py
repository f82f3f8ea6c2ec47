"""Writes a clip as an mp4 that browsers play: h264, yuv420p, moov first, AAC sound."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from videoaccel.errors import UserError
from videoaccel.files import replacing

UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

CRF = 10
"""Constant rate factor of the h264 stream. On a textured moving clip going from 10 to 4 gains 0.3 dB, since
the chroma subsampling that yuv420p forces costs far more; luma stays near 45 dB and above. A measurement
should use the decoded frames before muxing all the same."""

# Flags of libswscale (swscale.h). PyAV before 18 has no names for them and takes the numbers all the same.
BICUBIC, ACCURATE_RND = 0x4, 0x40000
FULL_CHROMA_OUT, FULL_CHROMA_IN = 0x2000, 0x4000

PRESET = "medium"

SMALL_FRAME = 512 * 512
"""Frames of at most this many pixels are encoded by one thread. x264 with several is not repeatable to the
bit: of 480 encodes of small clips 8 differed, of 500 with one thread none did. Small clips are what tests
and evaluations compare, and encoding them is no part of the wait; a large one takes every core."""
AUDIO_BIT_RATE = 192_000


class Video(NamedTuple):
    """A decoded clip.

    Attributes:
        frames: `(T, H, W, 3)` uint8 RGB.
        audio: `(2, N)` float32 in [-1, 1], or None where there is no sound.
        fps: frames a second.
        rate: samples a second of `audio`, or None with it.
    """

    frames: UInt8
    audio: Float32 | None
    fps: float
    rate: int | None


def to_uint8(frames: npt.NDArray[Any]) -> UInt8:
    """Frames as uint8: floats over [0, 1] are clipped, scaled by 255 and rounded; uint8 passes through.

    Raises:
        ValueError: floats that are not finite, or another dtype.
    """
    if frames.dtype == np.uint8:
        same: UInt8 = frames
        return same
    if not np.issubdtype(frames.dtype, np.floating):
        raise ValueError(f"frames must be uint8 or floating point over [0, 1], not {frames.dtype}")
    if not np.isfinite(frames).all():
        raise ValueError("frames hold values that are not finite")
    levels: UInt8 = np.rint(np.clip(frames, 0.0, 1.0) * 255.0).astype(np.uint8)
    return levels


def even_frames(frames: UInt8) -> UInt8:
    """Repeats the last row or column of an odd-sized clip: 4:2:0 chroma has no odd sizes."""
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return frames


def fit_audio(audio: npt.NDArray[Any], frames: int, fps: Fraction, rate: int) -> Float32:
    """Cuts the sound, or pads it with silence, to the picture's length: `(2, round(T / fps * rate))`."""
    samples = round(frames / fps * rate)
    fitted = np.zeros((2, samples), np.float32)
    kept = min(samples, audio.shape[1])
    fitted[:, :kept] = np.clip(audio[:, :kept], -1.0, 1.0)
    return fitted


def write_video(
    path: str | os.PathLike[str],
    frames: npt.NDArray[Any],
    *,
    fps: float | Fraction = 24,
    audio: npt.NDArray[Any] | None = None,
    rate: int | None = None,
    crf: int = CRF,
) -> None:
    """Writes an mp4: h264 and yuv420p with bt709 tags, moov before mdat, AAC stereo at 192 kb/s.

    The file appears under its name only once it is whole. Sound is cut, or padded with silence, to the
    picture's length. An odd height or width gains one repeated row or column.

    Args:
        path: where to write.
        frames: `(T, H, W, 3)` uint8, or floats over [0, 1].
        fps: frames a second, kept exactly (24000/1001 included, as a Fraction).
        audio: `(2, N)` or `(1, N)` floats in [-1, 1]; None writes no sound.
        rate: samples a second of `audio`.
        crf: the h264 quality; see `CRF`.

    Raises:
        ValueError: a shape, dtype or value that is not as above.
        UserError: the folder cannot be written to.
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace

    if frames.ndim != 4 or frames.shape[3] != 3 or frames.shape[0] == 0:
        raise ValueError(f"frames must be (T, H, W, 3) with T >= 1, not {frames.shape}")
    picture = even_frames(to_uint8(frames))
    frame_rate = Fraction(fps).limit_denominator(1001)
    if frame_rate <= 0:
        raise ValueError(f"fps must be positive, not {fps}")
    sound: Float32 | None = None
    if audio is not None:
        if rate is None or rate <= 0:
            raise ValueError(f"audio needs its rate, not {rate}")
        if audio.ndim != 2 or audio.shape[0] not in (1, 2):
            raise ValueError(f"audio must be (2, N) or (1, N), not {audio.shape}")
        if not np.isfinite(audio).all():
            raise ValueError("audio holds values that are not finite")
        sound = fit_audio(np.broadcast_to(audio, (2, audio.shape[1])), len(picture), frame_rate, rate)

    try:
        # The muxer rewrites the file to move moov to the front, which a BytesIO cannot do.
        with (
            replacing(path) as temporary,
            av.open(str(temporary), "w", format="mp4", options={"movflags": "+faststart"}) as container,
        ):
            video: Any = container.add_stream(
                "libx264", rate=frame_rate, options={"crf": str(crf), "preset": PRESET}
            )
            video.height, video.width, video.pix_fmt = picture.shape[1], picture.shape[2], "yuv420p"
            context = video.codec_context
            if video.height * video.width <= SMALL_FRAME:
                context.thread_count = 1
            context.color_range, context.colorspace = 1, 1
            context.color_primaries, context.color_trc = 1, 1
            track: Any = None
            if sound is not None:
                track = container.add_stream("aac", rate=rate, layout="stereo")
                track.bit_rate = AUDIO_BIT_RATE
            for image in picture:
                frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(
                    format="yuv420p",
                    dst_colorspace=Colorspace.ITU709,
                    src_color_range=ColorRange.JPEG,
                    dst_color_range=ColorRange.MPEG,
                    interpolation=BICUBIC | ACCURATE_RND | FULL_CHROMA_IN,
                )
                container.mux(video.encode(frame))
            container.mux(video.encode())
            if sound is not None:
                block = av.AudioFrame.from_ndarray(sound, format="fltp", layout="stereo")
                block.sample_rate = int(rate or 0)
                block.pts = 0
                container.mux(track.encode(block))
                container.mux(track.encode())
    except av.error.FFmpegError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; choose another place or canvas"
        ) from error
