"""What `write_video` writes, against the container's standard and what PyAV reads back."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from videoaccel.media import (
    read_video,
    to_uint8,
    write_video,
)

from .conftest import moving_square

CONTAINERS = {b"moov", b"trak", b"mdia", b"minf", b"stbl"}


def boxes(data: bytes, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Every box of an ISO 14496-12 file with its path and payload."""
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        header = 8
        if size == 1:
            size, header = struct.unpack(">Q", data[at + 8 : at + 16])[0], 16
        payload = data[at + header : at + size]
        name = f"{prefix}/{kind.decode('latin1')}"
        yield name, payload
        if kind in CONTAINERS:
            yield from boxes(payload, name)
        at += size


def test_container_is_what_browsers_need(clip: Path) -> None:
    found = list(boxes(clip.read_bytes()))
    top = [name for name, _ in found if name.count("/") == 1]
    assert top.index("/moov") < top.index("/mdat")
    samples = [payload[12:16] for name, payload in found if name.endswith("/stsd")]
    assert samples == [b"avc1", b"mp4a"]
    avc1 = next(payload for name, payload in found if name.endswith("/stsd") and payload[12:16] == b"avc1")
    # colr box: colour type nclx, then primaries, transfer and matrix, all 1 for bt709.
    nclx = avc1.index(b"colrnclx") + 8
    assert struct.unpack(">HHH", avc1[nclx : nclx + 6]) == (1, 1, 1)
    # The AVC record's first sequence parameter set: High profile or below (100) means 4:2:0 with 8 bits.
    record = avc1.index(b"avcC") + 4
    assert avc1[record + 1] <= 100


def test_frame_count_rate_and_duration(clip: Path) -> None:
    found = list(boxes(clip.read_bytes()))
    headers = [payload for name, payload in found if name.endswith("/mdhd")]
    scale, duration = struct.unpack(">II", headers[0][12:20])
    assert Fraction(duration, scale) == Fraction(39, 24)
    counts = [struct.unpack(">I", payload[8:12])[0] for name, payload in found if name.endswith("/stsz")]
    assert counts[0] == 39
    with av.open(str(clip)) as container:
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"
        assert container.streams.video[0].average_rate == 24
    video = read_video(clip)
    assert video.frames.shape == (39, 64, 96, 3)
    assert (video.fps, video.rate) == (24.0, 32_000)


def test_sound_stays_in_sync(clip: Path) -> None:
    audio = read_video(clip).audio
    assert audio is not None
    assert audio.shape == (2, 52_000)
    onset = int(np.argmax(np.abs(audio[0]) > 0.3))
    assert abs(onset - 26_000) <= 32  # one millisecond


@pytest.mark.parametrize("samples", [10_000, 52_000, 90_000])
def test_sound_is_fitted_to_the_picture(tmp_path: Path, samples: int) -> None:
    sound = np.full((2, samples), 0.1, np.float32)
    write_video(tmp_path / "a.mp4", moving_square(39), audio=sound, rate=32_000)
    audio = read_video(tmp_path / "a.mp4").audio
    assert audio is not None
    assert abs(audio.shape[1] - 52_000) <= 32


@pytest.mark.parametrize("fps", [24, 25, 30, Fraction(24000, 1001)])
def test_frame_rate_is_exact(tmp_path: Path, fps: Fraction | int) -> None:
    write_video(tmp_path / "a.mp4", moving_square(5), fps=fps)
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.streams.video[0].average_rate == fps
    assert read_video(tmp_path / "a.mp4").audio is None


def test_odd_sizes_repeat_the_edge(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", moving_square(5, 63, 95))
    assert read_video(tmp_path / "a.mp4").frames.shape == (5, 64, 96, 3)


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 120, 30), (255, 255, 255)])
def test_colours_survive(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    """A wrong matrix (bt601 for bt709) shifts a saturated colour by 10 levels and more."""
    write_video(tmp_path / "a.mp4", np.full((3, 32, 32, 3), colour, np.uint8))
    assert np.abs(read_video(tmp_path / "a.mp4").frames.astype(int) - np.array(colour)).max() <= 3


def test_a_bt601_file_is_read_by_its_own_matrix(tmp_path: Path) -> None:
    """Cameras tag standard-definition video bt601 (5); read as bt709, red comes out 20 levels off."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "4"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = 5, 1
        red = av.VideoFrame.from_ndarray(np.full((32, 32, 3), (200, 30, 30), np.uint8), format="rgb24")
        frame = red.reformat(format="yuv420p", dst_colorspace="ITU601", src_color_range=2, dst_color_range=1)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert np.abs(read_video(tmp_path / "a.mp4").frames.astype(int) - [200, 30, 30]).max() <= 3


def test_luma_survives_muxing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(128, 30, (9, 64, 96))
    smooth = sum(np.roll(noise, s, axis=a) for a in (1, 2) for s in (-1, 0, 1)) / 6
    grey = np.repeat(np.clip(smooth, 0, 255).astype(np.uint8)[..., None], 3, axis=3)
    write_video(tmp_path / "a.mp4", grey)
    error = read_video(tmp_path / "a.mp4").frames.astype(float) - grey
    assert 10 * np.log10(255**2 / np.mean(error**2)) > 44


def test_to_uint8_rounds_and_clips() -> None:
    values = np.array([-0.5, 0.0, 0.5 / 255 + 1e-6, 1.0, 2.0], np.float32)
    assert to_uint8(values).tolist() == [0, 0, 1, 255, 255]


def test_a_colon_in_a_path_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("12:30").mkdir()
    for name in ("12:30/clip.mp4", "12:31.mp4"):
        write_video(name, moving_square(4))
        assert len(read_video(name).frames) == 4
