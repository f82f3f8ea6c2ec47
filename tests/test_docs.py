"""What the pages say about commands, flags, JSON keys and words is what the code has.

A page marks its tables with a comment in the line above: `<!-- flags: videoaccel bench -->` a table whose
first column holds every flag of that command, `<!-- keys: bench -->` one that holds every key of that output.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from videoaccel import AccelConfig, Receipt
from videoaccel.cli import COMMANDS, build_parser
from videoaccel.pipelines.request import Request
from videoaccel.receipt import Forwards, KernelChoice, Memory, Rejected, Timings
from videoaccel.schema import fields_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("training/*.md")])
}
USERS = {name: text for name, text in PAGES.items() if not name.startswith("training/")}
HEADER = re.compile(r"^<!-- (\w+): ([^>]+?) -->$")
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
OTHERS = {"pip", "export", ".", "cd"}
"""Commands of others, which a page may have a reader type."""


# Reading a page.


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(script: str) -> list[list[str]]:
    """The commands of a shell block, as words; comments are left out."""
    lines = re.sub(r"(&&|\\)\n", " && ", script).replace(" && ", "\n").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def tables(text: str, kind: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Marked tables: what the mark names, and the rows as cells."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        mark = HEADER.match(line)
        if mark is None or mark[1] != kind:
            continue
        rows = []
        for row in lines[number + 1 :]:
            if not row.startswith("|"):
                break
            rows.append([cell.strip() for cell in row.strip("|").split(" | ")])
        assert len(rows) > 2, f"no table follows {line}"
        yield mark[2], rows[2:]


def spans(cell: str) -> list[str]:
    """What stands in a cell as code."""
    return re.findall(r"`([^`\n]+)`", cell)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    found: dict[str, int] = {}
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", outside, flags=re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = found.get(slug, -1) + 1
        found[slug] = count
        if count:
            found[f"{slug}-{count}"] = 0
    return set(found)


# The real parsers.


class Parsed(Exception):
    """What a command's parser made of the words; the command itself doesn't run."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parsed(command: str, words: list[str] | None) -> argparse.ArgumentParser:
    """The parser of `videoaccel NAME` or `python -m MODULE`, once it has taken the words, if there are any.

    Raises:
        UserError, SystemExit: it does not take them.
    """
    if command.startswith("videoaccel"):
        whole = build_parser()
        if words is not None:
            whole.parse_args([*command.split()[1:], *words])
        (choices,) = (a.choices for a in whole._actions if isinstance(a, argparse._SubParsersAction))
        found: argparse.ArgumentParser = choices[command.split()[1]]
        return found
    # Its parser is made inside `main`: stop it where it would read the command line.
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: object = None, namespace: object = None) -> None:
        if words is not None:
            parse(parser, words)
        raise Parsed(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            importlib.import_module(command.removeprefix("python -m ")).main()
    return caught.value.parser


def split(words: list[str]) -> tuple[str, list[str]] | None:
    """A project's command and its words; None for one of somebody else."""
    program = words[0].rpartition("/")[2]
    if program == "videoaccel":
        if len(words) < 2 or words[1] not in COMMANDS:
            raise ValueError(f"videoaccel has no command {words[1:2]}")
        return f"videoaccel {words[1]}", words[2:]
    if program in ("python", "python3") and words[1] == "-m":
        if words[2].partition(".")[0] in ("evals", "training", "videoaccel"):
            return f"python -m {words[2]}", words[3:]
        if words[2] in ("venv", "pytest"):
            return None
    if program in OTHERS:
        return None
    raise ValueError(f"no such command: {shlex.join(words)}")


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Every flag of a parser but --help."""
    return {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}


def documented() -> list[tuple[str, str, list[list[str]]]]:
    """Page, command and rows of every table of flags."""
    found = [(page, *table) for page, text in USERS.items() for table in tables(text, "flags")]
    # docs/NAME.md of a subcommand may leave its mark out.
    for name in COMMANDS:
        page = f"docs/{name}.md"
        if page in USERS and all(command != f"videoaccel {name}" for _, command, _ in found):
            marked = USERS[page].replace("## Flags\n\n", f"<!-- flags: videoaccel {name} -->\n", 1)
            found += [(page, *table) for table in tables(marked, "flags")]
    return found


def flag_faults(rows: list[list[str]], known: set[str]) -> list[str]:
    """Flags that a table lacks, and flags that it alone has."""
    shown = {flag for row in rows for span in spans(row[0]) for flag in FLAG.findall(span)}
    return [f"missing: {flag}" for flag in sorted(known - shown)] + [
        f"no such flag: {flag}" for flag in sorted(shown - known)
    ]


EVERY_COMMAND = [
    pytest.param(page, words, id=f"{page}-{number}")
    for page, text in USERS.items()
    for number, words in enumerate(w for block in blocks(text, "bash") for w in commands(block))
]


@pytest.mark.parametrize(("page", "words"), EVERY_COMMAND)
def test_command_lines_parse(page: str, words: list[str]) -> None:
    command = split(words)
    if command is not None:
        parsed(*command)


@pytest.mark.parametrize(("page", "command", "rows"), documented(), ids=lambda value: str(value)[:40])
def test_a_commands_flags_are_those_on_its_page(page: str, command: str, rows: list[list[str]]) -> None:
    assert flag_faults(rows, options(parsed(command, None))) == []


def test_every_page_of_a_command_has_its_table() -> None:
    assert {"videoaccel generate", "videoaccel bench", "python -m evals.quality"} <= {
        command for _, command, _ in documented()
    }


@pytest.mark.parametrize("page", USERS)
def test_flags_named_in_the_text_exist(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", USERS[page], flags=re.MULTILINE | re.DOTALL)
    ours = [span for span in spans(text) if re.match(r"-|videoaccel |python ", span)]
    named = {flag for span in ours for flag in re.findall(r"(?<![\w-])--[a-z-]+", span)}
    known = {"--help", "--version"}.union(
        *(options(parsed(f"videoaccel {name}", None)) for name in COMMANDS),
        *(options(parsed(command, None)) for _, command, _ in documented() if "python -m" in command),
    )
    assert named - known == set()


# Keys of what the commands write.


def flattened(value: Any, prefix: str = "", leaves: tuple[str, ...] = ()) -> set[str]:
    """`a.b` for a step into a mapping, `a[].b` into a list; what `leaves` names is not looked into."""
    found: set[str] = set()
    for key, item in value.items():
        path = f"{prefix}{key}"
        if path in leaves or not item:
            found.add(path)
        elif isinstance(item, Mapping):
            found |= flattened(item, f"{path}.", leaves)
        elif isinstance(item, list | tuple) and all(isinstance(entry, Mapping) for entry in item):
            found = found.union(*(flattened(entry, f"{path}[].", leaves) for entry in item))
        else:
            found.add(path)
    return found


def schema_keys(cls: type, prefix: str = "") -> set[str]:
    """Every key that a strict dataclass can have in JSON, nested ones as `flattened` writes them."""
    found: set[str] = set()
    for name, hint in fields_of(cls).items():
        parts = [hint, *typing.get_args(hint)]
        nested = [part for part in parts if dataclasses.is_dataclass(part)]
        listed = typing.get_origin(hint) is tuple
        if nested:
            found |= schema_keys(typing.cast(type, nested[0]), f"{prefix}{name}{'[]' if listed else ''}.")
        else:
            found.add(f"{prefix}{name}")
    return found


def made_receipt(**more: Any) -> Receipt:
    return Receipt(
        tier_asked="exact",
        tier_served="exact",
        model="tiny-h3",
        weights="pretrained",
        family="minimax_h3",
        task="t2va",
        device="cpu",
        width=128,
        height=128,
        frames=39,
        fps=24.0,
        seed=0,
        rows={"text": 9, "video": 64},
        steps=3,
        forwards=Forwards(dense=2),
        timings=Timings(encode_s=0.1, denoise_s=0.2, decode_s=0.1, mux_s=0.1, step_s=(0.1, 0.1)),
        **more,
    )


@pytest.fixture
def receipt_keys() -> set[str]:
    return schema_keys(Receipt)


def test_the_receipts_schema_is_what_a_full_receipt_writes(receipt_keys: set[str]) -> None:
    kernel = KernelChoice(op="attention", impl="flash", why="best", rejected=(Rejected(impl="x", why="y"),))
    full = made_receipt(
        budget=AccelConfig().budget(),
        spend={"video": 0.1},
        binding_limit="budget",
        memory=Memory(state=1, peak_allocated=1, peak_reserved=1),
        kernels=(kernel,),
        shift={"video": 5.0},
        sigmas={"video": (1.0, 0.0)},
        error="none",
        notes=("a",),
        warnings=("b",),
    )
    leaves = ("spend", "rows", "shift", "sigmas")
    assert flattened(full.to_dict(), leaves=leaves) == receipt_keys


@pytest.fixture
def outcome_keys(capsys: pytest.CaptureFixture[str]) -> set[str]:
    from videoaccel.cli.generate import report
    from videoaccel.runner import Outcome

    clip: Any = SimpleNamespace(initial_noise={"video": torch.zeros(2)}, audio=None)
    outcome = Outcome(clip=clip, receipt=made_receipt(), latency_s=1.0)
    report(argparse.Namespace(json=True, quiet=False), Path("clip.mp4"), outcome)
    return set(json.loads(capsys.readouterr().out))


@pytest.fixture
def bench_keys(build_wan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The report that `bench` makes, with nothing run: the requests are made up, and all else is its own."""
    from videoaccel.cli import bench, bench_loop

    def measure(handle: Any, work: Any, **settings: Any) -> bench_loop.Measured:
        ended = [bench_loop.Ended(made_receipt(), 0.6)] * settings["requests"]
        measured = bench_loop.Measured(ended=ended, wall_s=1.2)
        if settings["compare"]:
            measured.ours_s, measured.bare_s = [0.5, 0.5], [0.5, 0.5]
        return measured

    monkeypatch.setattr(bench_loop, "measure", measure)
    args = build_parser().parse_args(["bench", "--requests", "2"])
    target = bench.Target(model="x", weights="pretrained", res=None, seconds=None)
    report = bench.bench(build_wan(), target, Request(prompt="a"), args, lambda *words: None)
    assert bench.table(report)
    leaves = ("rows", "versions", "tiers[].config", "tiers[].receipts")
    # The ratio of a tier that has none is null at this key.
    return flattened(report, leaves=leaves) | {"tiers[].bare_diffusers"}


@pytest.fixture
def quality_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    from evals import quality
    from videoaccel.media import write_video

    rng = np.random.default_rng(0)
    files = [str(tmp_path / name) for name in ("a.mp4", "b.mp4")]
    for file in files:
        write_video(file, rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8), fps=24)
    assert quality.main([*files, "--json", "--skip", "vmaf", "--skip", "st_lpips"]) == 0
    # The page names the other three in a sentence of their own.
    return set(json.loads(capsys.readouterr().out)) - {"a", "b", "notes"}


@pytest.fixture
def latents_keys() -> set[str]:
    from evals.quality import latent_metrics

    latents = {stream: torch.ones(2) for stream in ("video", "audio")}
    return set(latent_metrics(latents, latents))


@pytest.fixture
def adherence_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The result file of a whole run in which clips are grey and the verifier is always content."""
    from evals import adherence, results_file
    from evals.world.spec import draw_clip

    clip = (np.zeros((2, 8, 8, 3), np.uint8), np.zeros((2, 8), np.float32))

    class Grey:
        device = torch.device("cpu")

        def __init__(self, *args: Any, **settings: Any) -> None:
            self.sample = lambda specs, **more: list(specs)
            self.decode = lambda clips: iter([clip] * len(clips))

    def content(clips: Any, specs: Any, **more: Any) -> list[dict[str, Any]]:
        flags = dict.fromkeys(adherence.FLAGS, True)
        return [{**flags, "objects": len(spec.objects), "sharpness": 0.1} for spec in specs]

    def clips(count: int, frames: int) -> list[Any]:
        return [draw_clip(1, frames=frames, objects=2)] * count

    timed = tmp_path / "time.json"
    timed.write_text(json.dumps({"metrics": {"generate_s_2cores": 1.0}}))
    monkeypatch.setattr(adherence, "open_run", lambda *args: (None, torch.device("cpu")))
    monkeypatch.setattr(adherence, "Sampler", Grey)
    monkeypatch.setattr(adherence, "judge_clips", content)
    monkeypatch.setattr(adherence, "truths", lambda specs, device: [clip] * len(specs))
    monkeypatch.setattr(adherence, "held_out_clips", clips)
    monkeypatch.setattr(results_file, "commit", lambda: "0123abc")
    argv = ["--clips", "1", "--long-clips", "1", "--out", str(tmp_path / "r.json")]
    assert adherence.main([*argv, "--generate-time", str(timed)]) == 0
    return set(json.loads((tmp_path / "r.json").read_text())["metrics"])


KEY_TABLES = [(page, *table) for page, text in USERS.items() for table in tables(text, "keys")]


def test_the_pages_list_the_keys_of_every_output_that_is_known_here() -> None:
    assert {name for _, name, _ in KEY_TABLES} == {
        "outcome",
        "receipt",
        "bench",
        "quality",
        "latents",
        "adherence",
    }


@pytest.mark.parametrize(("page", "name", "rows"), KEY_TABLES, ids=lambda value: str(value)[:40])
def test_keys_on_a_page_are_those_of_the_output(
    page: str, name: str, rows: list[list[str]], request: pytest.FixtureRequest
) -> None:
    shown = [key for row in rows for key in spans(row[0])]
    assert len(shown) == len(set(shown)), "a key stands twice"
    assert set(shown) == request.getfixturevalue(f"{name}_keys")


def test_quality_page_names_the_other_keys_of_its_json() -> None:
    (said,) = re.findall(r"With `--json` three more keys.*?\n\n", USERS["docs/quality.md"], re.DOTALL)
    assert {"a", "b", "notes"} <= set(spans(said))


def test_fields_of_a_request_are_on_its_page() -> None:
    page = USERS["docs/generate.md"]
    (rows,) = (rows for name, rows in tables(page, "fields") if name == "Request")
    shown = {field for row in rows for field in spans(row[0])}
    known = {field.name for field in dataclasses.fields(Request)}
    flags = {
        name.removeprefix("--").replace("-", "_") for name in options(parsed("videoaccel generate", None))
    }
    assert shown <= known and known - shown - flags - {"prompt"} == set()


# Words, errors, code and links.


def test_words_of_the_world_are_its_own() -> None:
    from evals.world import spec

    (rows,) = (rows for name, rows in tables(USERS["docs/tiny-h3.md"], "words") if name == spec.__name__)
    words = [tuple(spans(row[1])) for row in rows]
    assert words[:4] == [spec.COLORS, spec.SHAPES, spec.MOTIONS, spec.SPEEDS]
    assert [f" {word} " for word in words[4]] == list(spec.JOINS)
    assert words[5] == tuple(f", camera panning {pan}" for pan in spec.PANS if pan)
    combinations = len(spec.COLORS) * len(spec.SHAPES) * len(spec.MOTIONS)
    assert f"the {combinations} combinations" in USERS["docs/tiny-h3.md"]


CONSOLE = [
    pytest.param(*pair, id=pair[0])
    for text in USERS.values()
    for block in blocks(text, "console")
    for pair in re.findall(r"^\$ (.+)\n(.+)$", block, flags=re.MULTILINE)
]


@pytest.mark.parametrize(("line", "said"), CONSOLE)
def test_errors_on_the_pages_are_what_the_command_says(
    line: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from videoaccel.cli import main

    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(line)
    assert program == "videoaccel" and main(words) == 2
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize("page", USERS)
def test_python_on_the_pages_compiles_and_its_imports_exist(page: str) -> None:
    for block in blocks(USERS[page], "python"):
        for node in ast.walk(ast.parse(block, page)):
            if isinstance(node, ast.ImportFrom):
                module: types.ModuleType = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
            elif isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)


def link_faults(page: str, pages: Mapping[str, str]) -> list[str]:
    """Relative links of a page whose file or anchor is not there."""
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", pages[page], flags=re.MULTILINE | re.DOTALL)
    faults = []
    for target in re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        if not path.exists():
            faults.append(f"{target}: no such file")
        elif anchor:
            name = str(path.resolve().relative_to(ROOT))
            if name not in pages or anchor not in anchors(pages[name]):
                faults.append(f"{target}: no such heading")
    return faults


@pytest.mark.parametrize("page", PAGES)
def test_links_and_their_anchors_resolve(page: str) -> None:
    assert link_faults(page, PAGES) == []


@pytest.mark.parametrize("page", USERS)
def test_no_place_on_somebodys_machine_is_named(page: str) -> None:
    assert re.findall(r"(?<![\w.])/(?:work|tmp|home|root)\b", USERS[page]) == []


# The tests above can fail.


def test_commands_are_read_as_a_shell_reads_them() -> None:
    script = "a 'b # c' -d  # said\n.venv/bin/pip install . &&\nvideoaccel x \"y z\"\n"
    assert commands(script) == [
        ["a", "b # c", "-d"],
        [".venv/bin/pip", "install", "."],
        ["videoaccel", "x", "y z"],
    ]


@pytest.mark.parametrize(
    "line",
    [
        "videoaccel generate",
        "videoaccel generate a --sed 1",
        "videoaccel bench --weights half",
        "videoaccel serve --port 1",
        "python -m evals.quality a.mp4",
        "python -m evals.quality a.mp4 b.mp4 --sheets x.png",
        "python -m evals.world.truth --clips 3",
        "python -m evals.gone",
        "make install",
    ],
)
def test_a_line_that_does_not_parse_is_found(line: str) -> None:
    with (
        contextlib.redirect_stderr(None),
        pytest.raises((ValueError, SystemExit, ModuleNotFoundError)),
    ):
        command = split(shlex.split(line))
        assert command is not None
        parsed(*command)


def test_a_flag_too_few_or_too_many_is_found() -> None:
    rows = [["`-o MP4`, `--out MP4`", ""], ["`--gone`", ""]]
    assert flag_faults(rows, {"-o", "--out", "--seed"}) == ["missing: --seed", "no such flag: --gone"]


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "# A `b` c, d\n## A b c d\n[x](#a-b-c-d) [x](#a-b-c-d-1) [x](#a) [x](gone.md) [x](LICENSE)\n"
    assert link_faults("README.md", {"README.md": text}) == ["#a: no such heading", "gone.md: no such file"]


def test_keys_are_flattened() -> None:
    value = {"a": {"b": 1}, "c": [{"d": None}, {"e": {"f": 2}}], "g": [1], "h": {"i": 3}}
    assert flattened(value, leaves=("h",)) == {"a.b", "c[].d", "c[].e.f", "g", "h"}
