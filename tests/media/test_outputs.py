"""Output files: whole or not at all, links followed, bad places told in few words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from videoaccel.errors import UserError
from videoaccel.files import replacing
from videoaccel.media import (
    check_writable,
    write_json,
    write_video,
)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"old")
    with pytest.raises(ValueError, match="not finite"):
        write_video(tmp_path / "a.mp4", np.full((3, 32, 32, 3), np.nan, np.float32))
    with pytest.raises(RuntimeError), replacing(tmp_path / "a.mp4") as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"old"


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
