"""Reference files: read as they are meant, refused where they are broken, huge or outside their range."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import warnings
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from tests.media.conftest import moving_square
from videoaccel.errors import UserError
from videoaccel.media import (
    MediaLimits,
    media_kind,
    read_audio,
    read_image,
    read_video,
    resample,
    write_video,
)

FIX = re.compile(r"; (check|choose|give|re-encode|save|scale) ")


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


@pytest.mark.parametrize("stream", ["picture", "sound"])
def test_an_mp4_cut_short_is_not_a_shorter_clip(stream: str, tmp_path: Path) -> None:
    """The index is at the front, so the container opens; the tail of its samples is not in the file."""
    path = tmp_path / "cut.mp4"
    write_video(path, moving_square(12), fps=24, audio=np.zeros((2, 16_000), np.float32), rate=32_000)
    data = path.read_bytes()
    read = read_video if stream == "picture" else read_audio
    assert read(path)  # whole, it is read
    # One byte of the last sample is missing, and then a tenth of them all.
    with av.open(str(path)) as container:
        tracks = container.streams.video if stream == "picture" else container.streams.audio
        index = [(entry.pos, entry.size) for entry in tracks[0].index_entries]
    last, early = max(pos + size for pos, size in index) - 1, index[len(index) // 4][0]
    for length, there in ((last, len(index) - 1), (early, len(index) // 4)):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=f"cut short, {there} of its {len(index)} .*; copy") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_an_edit_list_is_no_missing_frame(clip: Path, tmp_path: Path) -> None:
    """Half of the samples left out by the container, which still counts them in its header."""
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    command = [ffmpeg, "-v", "error", "-ss", "0.8", "-i", str(clip), "-c", "copy", str(tmp_path / "cut.mp4")]
    subprocess.run(command, check=True)
    with av.open(str(tmp_path / "cut.mp4")) as container:
        counted = container.streams.video[0].frames
    assert 0 < len(read_video(tmp_path / "cut.mp4").frames) < counted


@pytest.mark.parametrize("ending", ["mkv", "mp4"])
def test_a_header_that_gives_no_count_is_read(ending: str, clip: Path, tmp_path: Path) -> None:
    options = ["-movflags", "empty_moov+frag_keyframe"] if ending == "mp4" else []
    path, ffmpeg = tmp_path / f"other.{ending}", imageio_ffmpeg.get_ffmpeg_exe()
    subprocess.run([ffmpeg, "-v", "error", "-i", str(clip), "-c", "copy", *options, str(path)], check=True)
    with av.open(str(path)) as container:
        assert ending == "mp4" or container.streams.video[0].frames == 0
    assert len(read_video(path).frames) == 39


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


def test_a_sample_rate_of_no_sound_is_named() -> None:
    with pytest.raises(UserError, match="1 samples a second is none; give one of 1000 Hz"):
        resample(np.zeros((2, 10), np.float32), 1, 32_000)
    # The lowest that is taken is resampled to its whole length.
    assert resample(np.zeros((2, 1_000), np.float32), 1_000, 32_000).shape == (2, 32_000)


def test_broken_metadata_of_an_image_is_no_warning_and_no_traceback(tmp_path: Path) -> None:
    def exif(*tags: tuple[int, int, int, bytes]) -> bytes:
        entries = b"".join(struct.pack(">HHI", *tag[:3]) + tag[3] for tag in tags)
        return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(tags)) + entries

    turned = (0x0112, 3, 1, b"\0\x06\0\0")
    image = Image.new("RGB", (24, 16))
    image.save(tmp_path / "cut.jpg", exif=exif(turned)[:-4])
    image.save(
        tmp_path / "odd.jpg", exif=exif((0x0100, 2, 2, b"a\0\0\0"), turned) + b"\0\0\0\0"
    )  # width: "a"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image(tmp_path / "cut.jpg").size == (24, 16)
        with pytest.raises(UserError, match="save it again"):
            read_image(tmp_path / "odd.jpg")


def test_a_stream_without_a_decoder_is_told_so(clip: Path, tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(clip.read_bytes().replace(b"avc1", b"zzzz"))
    with pytest.raises(UserError, match="its picture is broken or of an unknown codec; re-encode it"):
        read_video(tmp_path / "v.mp4")
    head = b"fmt " + struct.pack("<IHHIIHH", 16, 0xABCD, 1, 8000, 16000, 2, 16)
    body = b"WAVE" + head + b"data" + struct.pack("<I", 1600) + bytes(1600)
    (tmp_path / "s.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    with pytest.raises(UserError, match="its sound is broken or of an unknown codec; re-encode it"):
        read_audio(tmp_path / "s.wav")


def test_titles_that_are_no_utf8_do_no_harm(clip: Path, tmp_path: Path) -> None:
    whole = clip.read_bytes()
    assert b"Lavf" in whole
    (tmp_path / "latin.mp4").write_bytes(whole.replace(b"Lavf", b"\xe9\xe9vf"))
    assert (read_video(tmp_path / "latin.mp4").frames == read_video(clip).frames).all()
