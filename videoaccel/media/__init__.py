"""Media at the edges of a request: mp4 with sound out, reference files in."""

from videoaccel.media.intake import (
    MediaLimits,
    Sound,
    media_kind,
    read_audio,
    read_image,
    read_video,
)
from videoaccel.media.mp4 import CRF, Video, to_uint8, write_video
from videoaccel.media.outputs import check_writable, write_json
from videoaccel.media.resample import resample

__all__ = [
    "CRF",
    "MediaLimits",
    "Sound",
    "Video",
    "check_writable",
    "media_kind",
    "read_audio",
    "read_image",
    "read_video",
    "resample",
    "to_uint8",
    "write_json",
    "write_video",
]
