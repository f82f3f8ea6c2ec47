"""Contact sheets: a PNG with one clip a row and frames across it.

`python -m evals.contact_sheet A.mp4 B.mp4 -o sheet.png` shows two clips and their difference;
`python -m evals.contact_sheet *.mp4 --rows -o sheet.png` one clip a row.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from evals.command import user_errors
from videoaccel.cli.values import whole
from videoaccel.errors import UserError
from videoaccel.files import replacing
from videoaccel.media import check_writable, read_video

Frames = npt.NDArray[np.uint8]
GAP = 4
LABEL_HEIGHT = 18
GAIN = 4.0


def pick(count: int, columns: int) -> list[int]:
    """Indices of at most `columns` frames spread evenly, the first and the last among them."""
    return sorted({round(x) for x in np.linspace(0, count - 1, min(columns, count))})


def clips_sheet(
    clips_THWC: Sequence[Frames], labels: Sequence[str], *, columns: int = 8, height: int | None = None
) -> Image.Image:
    """One clip a row, a caption over each, `columns` frames across it.

    Args:
        clips_THWC: each `(T, H, W, 3)` uint8; canvas and length may differ from clip to clip.
        labels: one a clip.
        columns: frames across.
        height: height of a frame on the sheet, px; the clips' own by default.
    """
    if not clips_THWC or len(clips_THWC) != len(labels):
        raise ValueError(f"{len(clips_THWC)} clips and {len(labels)} labels: give one label a clip")
    strips = [strip(clip, columns, height) for clip in clips_THWC]
    width = max(s.shape[1] for s in strips) + 2 * GAP
    total = sum(s.shape[0] + LABEL_HEIGHT + GAP for s in strips) + GAP
    sheet = Image.new("RGB", (width, total), (24, 24, 24))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    y = GAP
    for label, row in zip(labels, strips, strict=True):
        draw.text((GAP, y), fitted(label, width - 2 * GAP, draw, font), fill=(230, 230, 230), font=font)
        sheet.paste(Image.fromarray(row), (GAP, y + LABEL_HEIGHT))
        y += row.shape[0] + LABEL_HEIGHT + GAP
    return sheet


def difference_sheet(
    a_THWC: Frames,
    b_THWC: Frames,
    *,
    labels: tuple[str, str] = ("A", "B"),
    columns: int = 8,
    gain: float = GAIN,
) -> Image.Image:
    """Two clips of one shape and, below them, the size of their difference times `gain`."""
    if a_THWC.shape != b_THWC.shape:
        raise UserError(
            f"the clips differ in shape: {a_THWC.shape} and {b_THWC.shape}; give --rows for no difference"
        )
    chosen = pick(len(a_THWC), columns)
    a, b = a_THWC[chosen], b_THWC[chosen]
    size = np.abs(b.astype(np.float32) - a.astype(np.float32)) * gain
    difference = np.clip(np.rint(size), 0, 255).astype(np.uint8)
    return clips_sheet([a, b, difference], [*labels, f"difference x {gain:g}"], columns=columns)


def strip(clip_THWC: Frames, columns: int, height: int | None) -> Frames:
    """`(H, columns * (W + GAP) - GAP, 3)`: frames side by side."""
    tiles: list[npt.NDArray[Any]] = []
    for index in pick(len(clip_THWC), columns):
        image = Image.fromarray(clip_THWC[index])
        if height is not None and height != image.height:
            image = image.resize(
                (round(image.width * height / image.height), height), Image.Resampling.LANCZOS
            )
        if tiles:
            tiles.append(np.full((image.height, GAP, 3), 24, np.uint8))
        tiles.append(np.asarray(image.convert("RGB")))
    return np.concatenate(tiles, axis=1)


def fitted(text: str, width: int, draw: ImageDraw.ImageDraw, font: Any) -> str:
    """The text in one line, cut with an ellipsis where it would run over the sheet's edge."""
    text = " ".join(text.split())
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "…", font=font) > width:
        text = text[:-1]
    return text + "…"


def save(sheet: Image.Image, path: str | os.PathLike[str]) -> None:
    """Writes a sheet as PNG, whole or not at all."""
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG", optimize=True)


@user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.contact_sheet", description="Draw a contact sheet."
    )
    parser.add_argument("clips", nargs="+", metavar="CLIP.mp4")
    parser.add_argument("-o", "--out", required=True, metavar="PNG")
    parser.add_argument(
        "--rows", action="store_true", help="one clip a row and no difference, for two clips too"
    )
    parser.add_argument("--columns", type=whole(1), default=8, help="frames across; default: 8")
    parser.add_argument("--label", action="append", help="one a clip, in order; file names by default")
    args = parser.parse_args(argv)
    check_writable(args.out, suffix=".png")
    labels = args.label or [Path(clip).stem for clip in args.clips]
    if len(labels) != len(args.clips):
        raise UserError(f"{len(labels)} labels for {len(args.clips)} clips: give --label once a clip")
    frames = [read_video(clip).frames for clip in args.clips]
    if len(frames) == 2 and not args.rows:
        sheet = difference_sheet(*frames, labels=(labels[0], labels[1]), columns=args.columns)
    else:
        sheet = clips_sheet(frames, labels, columns=args.columns)
    save(sheet, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
