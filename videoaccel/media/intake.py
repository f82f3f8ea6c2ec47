"""Reads reference images, videos and sound from untrusted files; refuses early the broken and the huge."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from videoaccel.errors import UserError
from videoaccel.files import shown
from videoaccel.media.mp4 import ACCURATE_RND, BICUBIC, FULL_CHROMA_OUT, Float32, UInt8, Video

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
VIDEO_SUFFIXES = {".mp4", ".mov", ".webm", ".mkv"}
AUDIO_SUFFIXES = {".wav", ".mp3", ".flac", ".m4a", ".ogg", ".opus"}
MAX_LEVEL = 8.0
"""Largest sample a sound may hold. Decoders of lossy formats overshoot 1 by a little; far beyond it a file of
floats is scaled otherwise (integers kept as floats) or broken."""
DEMUXERS = "mov,mp4,matroska,webm,wav,mp3,flac,ogg"
KINDS = "an image (png, jpg, webp), a video (mp4, mov, webm, mkv) or a sound (wav, mp3, flac, m4a, ogg, opus)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What a reference file may be. Sizes and counts are checked from headers before anything is decoded.

    Attributes:
        max_bytes: size of the file.
        max_pixels: width x height of an image or of one frame.
        min_side: shorter edge, in pixels.
        max_seconds: length of a video or a sound.
        max_frames: frames of a video, counted while decoding, since a container may lie about them.
        max_decoded_bytes: decoded frames of a video together.
    """

    max_bytes: int = 200_000_000
    max_pixels: int = 50_000_000
    min_side: int = 8
    max_seconds: float = 60.0
    max_frames: int = 3_600
    max_decoded_bytes: int = 4_000_000_000


class Sound(NamedTuple):
    """`samples`: `(2, N)` float32 in [-1, 1]; `rate`: samples a second."""

    samples: Float32
    rate: int


def media_kind(path: str | os.PathLike[str]) -> Literal["image", "video", "audio"]:
    """What a reference file is, by its name's ending.

    Raises:
        UserError: an ending that none of the readers takes.
    """
    suffix = Path(path).suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return "image"
    if suffix in VIDEO_SUFFIXES:
        return "video"
    if suffix in AUDIO_SUFFIXES:
        return "audio"
    raise UserError(f"cannot read {path}: {suffix or 'no file ending'} is not known; give {KINDS}")


def existing_file(path: str | os.PathLike[str], limits: MediaLimits | None) -> Path:
    """The path, once it is known to be a readable, regular, non-empty file within the size limit."""
    source = Path(path)
    try:
        size = source.stat().st_size
        if not source.is_file():
            raise UserError(f"cannot read {source}: it is not a file; give one")
        with source.open("rb"):
            pass
    except FileNotFoundError:
        raise UserError(f"cannot read {source}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"cannot read {shown(source)}: {error.strerror or error}; check the path") from error
    if size == 0:
        raise UserError(f"cannot read {source}: the file is empty; save or copy it again")
    if limits is not None and size > limits.max_bytes:
        raise UserError(
            f"cannot use {source}: {size / 1e6:.0f} MB is over the limit of {limits.max_bytes / 1e6:.0f} MB;"
            " shrink the file"
        )
    return source


def check_canvas(source: Path, width: int, height: int, limits: MediaLimits | None) -> None:
    """Refuses a picture size outside the limits."""
    if limits is None:
        return
    if width * height > limits.max_pixels:
        raise UserError(
            f"cannot use {source}: {width}x{height} is over the limit of"
            f" {limits.max_pixels / 1e6:.0f} megapixels; scale it down"
        )
    if min(width, height) < limits.min_side:
        raise UserError(
            f"cannot use {source}: {width}x{height} is too small; give {limits.min_side} px a side at least"
        )


def read_image(
    path: str | os.PathLike[str],
    *,
    limits: MediaLimits | None = MediaLimits(),
    background: tuple[int, int, int] = (255, 255, 255),
) -> Image.Image:
    """A reference image, upright, in RGB, transparency laid over `background`; an animation's first frame.

    Args:
        path: a png, jpg or webp file, told by its content, not by its name.
        limits: checked from the header, before the pixels are decoded; None checks nothing.
        background: RGB behind transparent pixels.

    Raises:
        UserError: missing, broken, of another format, or outside the limits.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    source = existing_file(path, limits)
    try:
        # Pillow warns about sizes, which are checked here against our own limit, and about broken metadata.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(source, formats=("PNG", "JPEG", "WEBP")) as image:
                check_canvas(source, *image.size, limits)
                image.load()
                upright = ImageOps.exif_transpose(image)
                return flatten(upright, background)
    except UnidentifiedImageError:
        raise UserError(
            f"cannot read {source}: not a png, jpg or webp image, or broken; save it again"
        ) from None
    except UserError:  # a ValueError, whose own message says what is wrong
        raise
    except Image.DecompressionBombError:
        raise UserError(f"cannot use {source}: too many pixels; scale it down") from None
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        raise UserError(f"cannot read {source}: the image is broken ({error}); save it again") from error


def flatten(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Any mode to RGB: 16 bit scaled down rather than clipped, transparency laid over `background`."""
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        grey = (np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        over = image.convert("RGBA")
        under = Image.new("RGBA", over.size, (*background, 255))
        return Image.alpha_composite(under, over).convert("RGB")
    return image.convert("RGB")


def read_video(path: str | os.PathLike[str], *, limits: MediaLimits | None = None) -> Video:
    """Every frame of a video, upright, and its sound.

    Colours follow the stream's own matrix and range; an untagged stream counts as bt709. A quarter-turn
    rotation in the container is applied. The frame rate is the container's average.

    Args:
        path: a file.
        limits: size, canvas and length, checked from the header before decoding; None checks nothing.

    Returns:
        `Video(frames (T, H, W, 3) uint8, audio (2, N) float32 or None, fps, rate or None)`.

    Raises:
        UserError: missing, broken, without a picture, or outside the limits.
    """
    source = existing_file(path, limits)
    with opened(source) as container:
        if not container.streams.video:
            raise UserError(f"cannot read {source}: it has no video stream; give {KINDS}")
        stream = container.streams.video[0]
        check_codec(source, stream)
        check_whole(source, container, stream)
        stream.thread_type = "AUTO"
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        if fps <= 0:
            raise UserError(f"cannot read {source}: it states no frame rate; re-encode it")
        check_canvas(source, stream.codec_context.width, stream.codec_context.height, limits)
        check_length(source, container, limits)
        frames: list[UInt8] = []
        rotation, total = 0.0, 0
        for frame in container.decode(stream):
            rotation = frame.rotation
            check_canvas(source, frame.width, frame.height, limits)  # the stream's own header may have lied
            picture = rgb(frame)
            if frames and picture.shape != frames[0].shape:
                raise UserError(f"cannot read {source}: its frames change size; re-encode it")
            frames.append(picture)
            total += picture.nbytes
            if limits is not None and (len(frames) > limits.max_frames or total > limits.max_decoded_bytes):
                raise UserError(f"cannot use {source}: too many frames to hold; give a shorter video")
    if not frames:
        raise UserError(f"cannot read {source}: no frame could be decoded; re-encode it")
    stacked = np.stack(frames)
    # The display matrix says how far to turn the picture counter-clockwise, as ffmpeg's own player does.
    # (diffusers 0.42.1 turns the other way in its reader, which puts phone videos upside down.)
    turns = round(rotation / 90.0) % 4
    if turns:
        stacked = np.ascontiguousarray(np.rot90(stacked, k=turns, axes=(1, 2)))
    with opened(source) as container:
        if not container.streams.audio:
            return Video(stacked, None, fps, None)
        sound = decode_audio(source, container, limits)
    return Video(stacked, sound.samples, fps, sound.rate)


def read_audio(path: str | os.PathLike[str], *, limits: MediaLimits | None = MediaLimits()) -> Sound:
    """The sound of a file as stereo at its own rate; one channel is doubled, more than two are mixed down.

    Raises:
        UserError: missing, broken, silent of any stream, or outside the limits.
    """
    source = existing_file(path, limits)
    with opened(source) as container:
        if not container.streams.audio:
            raise UserError(f"cannot read {source}: it has no sound; give a file that has")
        check_length(source, container, limits)
        sound = decode_audio(source, container, limits)
    return sound


def rgb(frame: Any) -> UInt8:
    """One decoded frame as `(H, W, 3)` uint8 full-range RGB."""
    from av.video.reformatter import ColorRange

    # The frame's AVColorSpace to libswscale's name for its matrix; anything else counts as bt709.
    matrix = {4: 4, 5: 5, 6: 5, 7: 7, 9: 9}.get(int(frame.colorspace), 1)
    full = frame.color_range == ColorRange.JPEG or frame.format.name.startswith("yuvj")
    image: UInt8 = frame.reformat(
        format="rgb24",
        src_colorspace=matrix,
        dst_colorspace=5,  # libswscale's default; RGB has no matrix of its own
        src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
        dst_color_range=ColorRange.JPEG,
        interpolation=BICUBIC | ACCURATE_RND | FULL_CHROMA_OUT,
    ).to_ndarray()
    return image


def decode_audio(source: Path, container: Any, limits: MediaLimits | None = None) -> Sound:
    """The first sound stream as stereo, cut to the length the container states (AAC pads its last block)."""
    import av

    stream = container.streams.audio[0]
    check_codec(source, stream)
    check_whole(source, container, stream)
    rate = int(stream.codec_context.sample_rate)
    channels = int(stream.codec_context.channels)
    # Doubling one channel here keeps its level: ffmpeg's own upmix lowers it by 3 dB.
    resampler = av.AudioResampler(format="fltp", layout="mono" if channels == 1 else "stereo", rate=rate)
    blocks, length = [], 0
    for frame in container.decode(stream):
        for block in resampler.resample(frame):
            blocks.append(block.to_ndarray())
            length += blocks[-1].shape[1]
        if limits is not None and length > (limits.max_seconds + 1) * rate:
            raise UserError(f"cannot use {source}: its sound is over {limits.max_seconds:g} s; cut it")
    blocks += [block.to_ndarray() for block in resampler.resample(None)]
    if not blocks:
        raise UserError(f"cannot read {source}: no sound could be decoded; re-encode it")
    samples = np.concatenate(blocks, axis=1).astype(np.float32, copy=False)
    if stream.duration:
        samples = samples[:, : max(1, round(float(stream.duration * stream.time_base) * rate))]
    loudest = float(np.abs(samples).max(initial=0.0))
    if not loudest <= MAX_LEVEL:  # a NaN as well
        found = f"up to {loudest:.3g}" if np.isfinite(loudest) else "that are not finite"
        raise UserError(
            f"cannot use {source}: its sound holds values {found}, outside [-1, 1]; scale it to that range"
        )
    # A copy: what broadcast_to gives is read-only, and torch warns about such arrays.
    return Sound(np.array(np.broadcast_to(samples, (2, samples.shape[1])), order="C"), rate)


def check_codec(source: Path, stream: Any) -> None:
    """Refuses a stream without a decoder: PyAV opens it all the same, with no codec context."""
    if stream.codec_context is None:
        kind = "picture" if stream.type == "video" else "sound"
        raise UserError(f"cannot read {source}: its {kind} is broken or of an unknown codec; re-encode it")


def check_whole(source: Path, container: Any, stream: Any) -> None:
    """Refuses an mp4 whose index names samples beyond the end of the file: libav would stop there in silence.

    The index, and not the header's count of frames: that one also counts what an edit list leaves out. Other
    containers have no such index, and PyAV before 16 doesn't show it; there nothing is checked.
    """
    if "mp4" not in container.format.name:
        return
    samples = [(entry.pos, entry.size) for entry in getattr(stream, "index_entries", ())]
    size = source.stat().st_size
    there = sum(start + length <= size for start, length in samples)
    if there < len(samples):
        kind = "frames" if stream.type == "video" else "blocks of sound"
        raise UserError(
            f"cannot read {source}: the file is cut short, {there} of its {len(samples)} {kind} are there;"
            " copy or download it again"
        )


def check_length(source: Path, container: Any, limits: MediaLimits | None) -> None:
    """Refuses a container that states more seconds than the limit."""
    if limits is None or container.duration is None:
        return
    seconds = container.duration / 1e6
    if seconds > limits.max_seconds:
        limit = f"{limits.max_seconds:g} s"
        raise UserError(f"cannot use {source}: {seconds:.1f} s is over the limit of {limit}; cut it")


@contextlib.contextmanager
def opened(source: Path) -> Iterator[Any]:
    """An open container, whose faults come out as one-line errors."""
    import av

    try:
        # A playlist or a concat script would make the demuxer open other files and addresses.
        allowed = {"protocol_whitelist": "file", "format_whitelist": DEMUXERS}
        # Absolute: libav takes the "12:" of a relative path such as 12:30.mp4 for a protocol.
        # Titles and the like are not always UTF-8, and are of no use here.
        with av.open(str(source.absolute()), options=allowed, metadata_errors="replace") as container:
            yield container
    except av.error.FFmpegError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot read {source}: broken or not a media file ({reason}); re-encode it, or give another"
        ) from error
