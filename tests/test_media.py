"""The mp4 is checked by walking its boxes by hand, not by the library that wrote it."""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from videoaccel.errors import UserError
from videoaccel.files import replacing
from videoaccel.media import (
    MediaLimits,
    check_writable,
    media_kind,
    read_audio,
    read_image,
    read_video,
    resample,
    to_uint8,
    write_json,
    write_video,
)

FIX = re.compile(r"; (check|choose|give|re-encode|save|scale) ")
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


def moving_square(frames: int, height: int = 64, width: int = 96) -> np.ndarray:
    clip = np.full((frames, height, width, 3), 30, np.uint8)
    for t in range(frames):
        clip[t, 16:48, 2 * t % width : 2 * t % width + 16] = (200, 120, 40)
    return clip


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    sound = np.zeros((2, 52_000), np.float32)
    sound[:, 26_000:26_200] = 0.8
    write_video(tmp_path / "clip.mp4", moving_square(39), fps=24, audio=sound, rate=32_000)
    return tmp_path / "clip.mp4"


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


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"old")
    with pytest.raises(ValueError, match="not finite"):
        write_video(tmp_path / "a.mp4", np.full((3, 32, 32, 3), np.nan, np.float32))
    with pytest.raises(RuntimeError), replacing(tmp_path / "a.mp4") as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"old"


def test_to_uint8_rounds_and_clips() -> None:
    values = np.array([-0.5, 0.0, 0.5 / 255 + 1e-6, 1.0, 2.0], np.float32)
    assert to_uint8(values).tolist() == [0, 0, 1, 255, 255]


def test_check_writable(tmp_path: Path) -> None:
    assert check_writable(tmp_path / "a.mp4", suffix=".mp4") == tmp_path / "a.mp4"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"end in \.mp4"):
        check_writable(tmp_path / "a.avi", suffix=".mp4")
    with pytest.raises(UserError, match="mkdir -p"):
        check_writable(tmp_path / "no" / "a.mp4")
    with pytest.raises(UserError, match="folder"):
        check_writable(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        check_writable("/proc/a.mp4")


def test_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1.5})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert "1.5" in (tmp_path / "a.json").read_text()


def test_image_is_turned_upright(tmp_path: Path) -> None:
    pixels = np.zeros((16, 24, 3), np.uint8)
    pixels[:, :12] = 255  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying down: show turned 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = np.asarray(read_image(tmp_path / "a.jpg")).astype(int)
    assert upright.shape == (24, 16, 3)
    assert upright[:8].mean() > 245 and upright[-8:].mean() < 10  # left went up


def test_alpha_is_flattened(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[..., 0] = 200
    pixels[:8, :, 3] = 255
    pixels[8:, :, 3] = 128
    Image.fromarray(pixels).save(tmp_path / "a.png")
    flat = np.asarray(read_image(tmp_path / "a.png", background=(0, 0, 100))).astype(int)
    assert flat[0, 0].tolist() == [200, 0, 0]
    share = 128 / 255
    np.testing.assert_allclose(flat[-1, 0], [200 * share, 0, 100 * (1 - share)], atol=1)


def test_palette_with_transparency_and_16_bits(tmp_path: Path) -> None:
    palette = Image.new("P", (16, 16), 0)
    palette.putpalette([10, 20, 30, 200, 0, 0])
    palette.info["transparency"] = 0
    palette.save(tmp_path / "p.png", transparency=0)
    assert np.asarray(read_image(tmp_path / "p.png"))[0, 0].tolist() == [255, 255, 255]
    Image.fromarray(np.full((16, 16), 0x8000, np.uint16)).save(tmp_path / "d.png")
    assert np.asarray(read_image(tmp_path / "d.png"))[0, 0].tolist() == [128, 128, 128]


def png_header(width: int, height: int) -> bytes:
    """A png that claims a size and holds no pixels."""
    import zlib

    def chunk(body: bytes) -> bytes:
        return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))

    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(header) + chunk(b"IDAT" + zlib.compress(b""))


def test_a_decompression_bomb_is_refused_from_its_header(tmp_path: Path) -> None:
    for side in (9_000, 60_000):
        (tmp_path / "bomb.png").write_bytes(png_header(side, side))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserError, match="scale it down"):
                read_image(tmp_path / "bomb.png")


def test_broken_references_give_one_line(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(stream, "PNG")
    (tmp_path / "cut.png").write_bytes(stream.getvalue()[:2_000])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("not a video")
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\n/etc/hostname\n")
    for name in ("cut.png", "text.png", "empty.png", "absent.png"):
        with pytest.raises(UserError) as caught:
            read_image(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value) and FIX.search(str(caught.value))
    for name in ("text.mp4", "list.mp4", "empty.png", "absent.mp4"):
        for reader in (read_video, read_audio):
            with pytest.raises(UserError) as caught:
                reader(tmp_path / name)
            assert "\n" not in str(caught.value) and name in str(caught.value)
            assert FIX.search(str(caught.value))


def test_truncated_video_is_refused(clip: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.mp4").write_bytes(clip.read_bytes()[:900])
    with pytest.raises(UserError, match=r"(broken|no frame).*; re-encode"):
        read_video(tmp_path / "cut.mp4")


def test_limits_of_references(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="over the limit"):
        read_video(clip, limits=MediaLimits(max_seconds=1.0))
    with pytest.raises(UserError, match="over the limit"):
        read_video(clip, limits=MediaLimits(max_pixels=1_000))
    with pytest.raises(UserError, match="too many frames"):
        read_video(clip, limits=MediaLimits(max_frames=10))
    with pytest.raises(UserError, match="over the limit"):
        read_audio(clip, limits=MediaLimits(max_bytes=100))
    Image.new("RGB", (4, 400)).save(tmp_path / "thin.png")
    with pytest.raises(UserError, match="too small"):
        read_image(tmp_path / "thin.png")


@pytest.mark.parametrize("rate", [16000, 44100, 48000])
def test_resampling_keeps_a_tone_in_place(rate: int) -> None:
    def tones(rate: int) -> np.ndarray:
        t = np.arange(rate) / rate
        return np.stack([np.sin(2 * np.pi * 440 * t), 0.5 * np.cos(2 * np.pi * 1000 * t)]).astype(np.float32)

    found = resample(tones(rate), rate, 32000)
    assert found.shape == (2, 32000)
    # The filter sees silence beyond both ends.
    np.testing.assert_allclose(found[:, 200:-200], tones(32000)[:, 200:-200], atol=1e-4)
    assert resample(tones(rate)[:1], rate, 32000).shape == (1, 32000)


def test_sound_longer_than_its_container_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lies.mkv"
    with av.open(str(path), "w") as container:
        picture = container.add_stream("libx264", rate=24)
        sound = container.add_stream("pcm_s16le", rate=8000)
        picture.width = picture.height = 32
        picture.pix_fmt, sound.layout = "yuv420p", "mono"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux(picture.encode(frame))
        container.mux(picture.encode())
        block = av.AudioFrame.from_ndarray(np.zeros((1, 40_000), np.int16), format="s16", layout="mono")
        block.sample_rate = 8000
        container.mux(sound.encode(block))
        container.mux(sound.encode())
    whole = bytearray(path.read_bytes())
    # Matroska's Duration (id 0x4489, a double, ms): five seconds in fact, one by its own word.
    place = whole.index(b"\x44\x89\x88") + 3
    assert struct.unpack(">d", whole[place : place + 8]) == (5000.0,)
    whole[place : place + 8] = struct.pack(">d", 1000.0)
    path.write_bytes(whole)
    assert read_video(path).audio is not None
    with pytest.raises(UserError, match="its sound is over 2 s"):
        read_video(path, limits=MediaLimits(max_seconds=2.0))


def test_mono_keeps_its_level(tmp_path: Path) -> None:
    import wave

    wave_ = (0.5 * np.sin(np.arange(8_000) * 0.2) * 32767).astype("<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(wave_.tobytes())
    sound = read_audio(tmp_path / "a.wav")
    assert sound.rate == 16_000
    np.testing.assert_allclose(sound.samples, np.stack([wave_, wave_]) / 32768, atol=1e-4)


def test_rotated_video_is_turned_upright(clip: Path, tmp_path: Path) -> None:
    """The display matrix in the track header is edited by hand: a quarter turn, as phones write it."""
    data = bytearray(clip.read_bytes())
    at = data.index(b"tkhd") + 4
    one = 1 << 16
    data[at + 40 : at + 76] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 64 * one, 0, 1 << 30)
    (tmp_path / "turned.mp4").write_bytes(bytes(data))
    # (a, b, c, d) = (0, 1, -1, 0) maps x to down and y to left: clockwise, as ffmpeg's own player shows it.
    plain, turned = read_video(clip).frames, read_video(tmp_path / "turned.mp4").frames
    np.testing.assert_array_equal(turned, np.rot90(plain, k=-1, axes=(1, 2)))


def test_kinds() -> None:
    assert [media_kind(n) for n in ("a.PNG", "a.mp4", "a.wav")] == ["image", "video", "audio"]
    with pytest.raises(UserError, match="png"):
        media_kind("a.gif")


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    """An existing file behind the link, a missing one, and one in another folder."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        link = tmp_path / name
        link.symlink_to(Path("far") / name)
        assert check_writable(link, suffix=".json") == link
        write_json(link, {"x": 1})
        assert link.is_symlink() and (tmp_path / "far" / name).read_text() == '{\n  "x": 1\n}\n'
    (tmp_path / "round.json").symlink_to("round.json")
    (tmp_path / "null.json").symlink_to("/dev/null")
    (tmp_path / "lost.json").symlink_to("gone/lost.json")
    for name in ("round.json", "null.json", "lost.json"):
        with pytest.raises(UserError, match="cannot write"):
            check_writable(tmp_path / name)
        with pytest.raises(UserError, match="cannot write"):
            write_json(tmp_path / name, {"x": 1})
        assert (tmp_path / name).is_symlink()


@pytest.mark.parametrize("length", [300, 5_000])
def test_a_name_too_long_is_refused_in_few_words(tmp_path: Path, length: int) -> None:
    for attempt in (check_writable, lambda path: write_json(path, {}), existing_file_of):
        with pytest.raises(UserError, match="name too long") as caught:
            attempt(tmp_path / ("x" * length + ".json"))
        assert len(str(caught.value)) < 300


def existing_file_of(path: Path) -> Path:
    from videoaccel.media.intake import existing_file

    return existing_file(path, None)


def test_a_write_that_breaks_off_is_the_users_to_fix(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the system's write fails just so, with another number."""
    import subprocess
    import sys

    code = (
        "import resource, sys; from videoaccel.files import UserError, write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_text(sys.argv[1], 'x' * 5000)\n"
        "except UserError as error: print(error)"
    )
    (tmp_path / "a.json").write_text("old")
    command = [sys.executable, "-c", code, str(tmp_path / "a.json")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "File too large; free some space" in answer.stdout and answer.stdout.count("\n") == 1
    assert (tmp_path / "a.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_colon_in_a_path_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("12:30").mkdir()
    for name in ("12:30/clip.mp4", "12:31.mp4"):
        write_video(name, moving_square(4))
        assert len(read_video(name).frames) == 4


@pytest.mark.parametrize(
    ("size", "words"), [((7, 7), "8 px a side at least"), ((9_000, 7_000), "50 megapixels")]
)
def test_a_limit_speaks_for_itself(tmp_path: Path, size: tuple[int, int], words: str) -> None:
    (tmp_path / "a.png").write_bytes(png_header(*size))
    with pytest.raises(UserError, match=words) as caught:
        read_image(tmp_path / "a.png")
    assert "broken" not in str(caught.value)


def float_wav(path: Path, samples: np.ndarray, rate: int = 8_000) -> None:
    """A WAV of 32-bit floats (format tag 3), written by hand."""
    data = samples.astype("<f4").tobytes()
    head = struct.pack("<HHIIHH", 3, 1, rate, rate * 4, 4, 32)
    body = b"WAVE" + b"fmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data)) + data
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)


def test_sound_outside_its_range_is_refused_by_its_range(tmp_path: Path) -> None:
    wave = np.linspace(-1.2, 1.2, 4_000, dtype=np.float32)
    float_wav(tmp_path / "a.wav", wave)
    sound = read_audio(tmp_path / "a.wav")
    np.testing.assert_array_equal(sound.samples[1], wave)
    assert sound.samples.flags.writeable and sound.samples.flags.c_contiguous
    for value, words in (
        (1e30, r"1e\+30.*\[-1, 1\]"),
        (np.nan, r"not finite.*\[-1, 1\]"),
        (np.inf, "not finite"),
    ):
        wave[7] = value
        float_wav(tmp_path / "a.wav", wave)
        with pytest.raises(UserError, match=words):
            read_audio(tmp_path / "a.wav")


def test_a_sound_too_short_to_resample_is_refused() -> None:
    with pytest.raises(UserError, match="too short"):
        resample(np.zeros((2, 1), np.float32), 48_000, 16_000)
