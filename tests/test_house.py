"""What is written about the project agrees with the project: figures, files, set-up, layout."""

from __future__ import annotations

import ast
import datetime
import importlib.metadata
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("training/*.md")])
RESULTS = sorted((ROOT / "evals/results").glob("*.json"))

# [98.2 %](evals/results/x.json "metrics.color"), the path from the page's own folder.
CITATION = re.compile(r'\[([^\]]+)\]\(([^)\s]*results/[^)\s]+\.json)(?:\s+"([^"]*)")?\)')
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
RESULT_KEYS = {"name", "command", "commit", "date", "device", "versions", "config", "metrics", "rows"}


def prose(page: Path) -> str:
    """A page without its code: examples of citations and links are none."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)


def look_up(result: Any, path: str) -> float:
    """`metrics.color`, `rows.3.psnr_db`, either with ` * 100` behind it for a share shown as a percentage."""
    path, _, factor = path.partition("*")
    value = result
    for part in path.strip().split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    assert isinstance(value, int | float) and not isinstance(value, bool), f"{path} is no number: {value!r}"
    return value * float(factor or 1)


def citation_faults(page: Path, text: str) -> list[str]:
    """What is wrong with the cited figures of a page, one line each."""
    faults = []
    for shown, target, path in CITATION.findall(text):
        where = f"{page.name}: [{shown}]({target})"
        file = page.parent / target
        number = NUMBER.search(shown)
        if not file.is_file():
            faults.append(f"{where}: there is no such result file")
        elif number and not path:
            faults.append(f'{where}: a figure needs its key, as in (file.json "metrics.key")')
        elif path and not number:
            faults.append(f"{where}: a key without a figure")
        elif number:
            digits = number.group().replace(",", "")
            try:
                value = look_up(json.loads(file.read_text(encoding="utf-8")), path)
            except (AssertionError, KeyError, IndexError, ValueError) as error:
                faults.append(f"{where}: no number at {path!r} ({error})")
                continue
            decimals = len(digits.partition(".")[2])
            # Half a unit in the last place shown, and no more.
            if abs(value - float(digits)) > 0.5 * 10.0**-decimals * (1 + 1e-9):
                faults.append(f"{where}: the file says {value}")
    return faults


def result_faults(path: Path, text: str) -> list[str]:
    """What is wrong with a result file's form, one line each."""
    try:
        result = json.loads(text, parse_constant=lambda word: pytest.fail(f"{path.name} holds {word}"))
    except json.JSONDecodeError as error:
        return [f"not JSON: {error}"]
    if not isinstance(result, dict) or set(result) != RESULT_KEYS:
        return [f"keys are not {sorted(RESULT_KEYS)}"]
    faults = []
    if result["name"] != path.stem:
        faults.append(f"name {result['name']!r} is not the file's")
    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", str(result["commit"])):
        faults.append(f"commit {result['commit']!r} is none")
    try:
        datetime.datetime.fromisoformat(str(result["date"]))
    except ValueError:
        faults.append(f"date {result['date']!r} is not ISO 8601")
    if not (isinstance(result["device"], str) and result["device"].strip()):
        faults.append("device is not named")
    versions = result["versions"]
    if not isinstance(versions, dict) or not {"python", "torch"} <= set(versions):
        faults.append("versions lack python or torch")
    if not isinstance(result["config"], dict):
        faults.append("config is no mapping")
    metrics = result["metrics"]
    if not (isinstance(metrics, dict) and metrics):
        faults.append("metrics are empty")
    elif nested := [key for key, value in metrics.items() if isinstance(value, dict | list)]:
        faults.append(f"metrics are not flat: {nested}")
    if not (isinstance(result["rows"], list) and all(isinstance(row, dict) for row in result["rows"])):
        faults.append("rows are no list of mappings")
    if not runs_something_here(str(result["command"])):
        faults.append(f"command {result['command']!r} runs nothing of this project")
    if re.search(r"(^|[\s=])/", str(result["command"])):
        faults.append(f"command {result['command']!r} names a place on somebody's machine")
    return faults


def runs_something_here(command: str) -> bool:
    """Whether a command is the project's own: `videoaccel ...`, `python -m evals.x ...` or the like."""
    if command.startswith("videoaccel "):
        return True
    module = re.match(r"python (?:-m ([\w.]+)|([\w/]+)\.py)(?:\s|$)", command)
    if module is None:
        return False
    path = ROOT / (module[1] or module[2].replace("/", ".")).replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cited_figures_agree_with_their_files(page: Path) -> None:
    assert citation_faults(page, prose(page)) == []


def test_result_files_have_the_agreed_form() -> None:
    faults = {path.name: result_faults(path, path.read_text(encoding="utf-8")) for path in RESULTS}
    assert {name: found for name, found in faults.items() if found} == {}


GOOD = {
    "name": "x",
    "command": "videoaccel bench --out x.json",
    "commit": "0123abc",
    "date": "2026-11-30T12:00:00+00:00",
    "device": "CPU, 2 threads",
    "versions": {"python": "3.11", "torch": "2.13.0"},
    "config": {},
    "metrics": {"color": 0.98249, "forward_s": 6.5, "name": "t2va"},
    "rows": [{"psnr_db": 31.25}],
}


@pytest.mark.parametrize(
    ("cited", "fault"),
    [
        ('[6.5 s](x.json "metrics.forward_s")', None),
        ('[98.2 %](x.json "metrics.color * 100")', None),
        ('[0.982](x.json "metrics.color")', None),
        ('[31.2 dB](x.json "rows.0.psnr_db")', None),
        ("[the file](x.json)", None),
        ('[6.4 s](x.json "metrics.forward_s")', "the file says 6.5"),
        ('[98.3 %](x.json "metrics.color * 100")', "the file says 98.2"),
        ('[0.9](x.json "metrics.color")', "the file says"),
        ('[6.5](x.json "metrics.gone")', "no number at"),
        ('[6.5](x.json "metrics.name")', "no number at"),
        ("[6.5](x.json)", "needs its key"),
        ('[fast](x.json "metrics.forward_s")', "without a figure"),
        ('[6.5](y.json "metrics.forward_s")', "no such result file"),
    ],
)
def test_a_figure_that_disagrees_is_found(tmp_path: Path, cited: str, fault: str | None) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.json").write_text(json.dumps(GOOD))
    text = "It takes " + cited.replace("(", "(results/") + " on a laptop."
    faults = citation_faults(tmp_path / "page.md", text)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"command": "python -m evals.results_file"}, None),
        ({"extra": 1}, "keys are not"),
        ({"name": "y"}, "not the file's"),
        ({"commit": "unknown"}, "is none"),
        ({"date": "yesterday"}, "ISO 8601"),
        ({"device": ""}, "not named"),
        ({"versions": {"python": "3.11"}}, "lack"),
        ({"config": []}, "no mapping"),
        ({"metrics": {}}, "empty"),
        ({"metrics": {"by_tier": {"exact": 1}}}, "not flat"),
        ({"rows": [1]}, "no list of mappings"),
        ({"command": "by hand"}, "runs nothing"),
        ({"command": "python -m evals.gone"}, "runs nothing"),
        ({"command": "videoaccel bench --out /home/me/x.json"}, "somebody's machine"),
    ],
)
def test_a_result_of_another_form_is_found(change: dict[str, Any], fault: str | None) -> None:
    faults = result_faults(Path("x.json"), json.dumps(GOOD | change))
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


def test_a_result_that_is_not_finite_is_found() -> None:
    with pytest.raises(pytest.fail.Exception, match="holds NaN"):
        result_faults(Path("x.json"), json.dumps(GOOD | {"metrics": {"psnr_db": math.nan}}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(prose(page)) if "://" not in target]
    files = [target.partition("#")[0] for target in targets]
    assert [file for file in files if file and not (page.parent / file).exists()] == []


def test_architecture_page_lists_what_exists_and_only_plans_what_does_not() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w./-]+)` \| (exists|planned) \|", text, flags=re.MULTILINE)
    assert len(listed) > 10
    wrong = [(path, state) for path, state in listed if (ROOT / path).exists() != (state == "exists")]
    assert wrong == []
    named = {path.rstrip("/") for path, _ in listed}
    parts = {
        f"videoaccel/{path.name}"
        for path in (ROOT / "videoaccel").iterdir()
        if (path.suffix == ".py" and not path.stem.startswith("__")) or (path / "__init__.py").is_file()
    }
    assert parts - named == set(), "a part of the package that the page to read first does not name"


def test_set_up_is_two_commands_that_ci_reads_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^<!-- set-up: (\w+) -->\n```bash\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL
    )
    assert [name for name, _ in blocks] == ["run", "tests"]
    for _, command in blocks:
        lines = command.splitlines()
        assert all(line.endswith("&&") for line in lines[:-1]), "one command: it stops at the first failure"
        subprocess.run(["bash", "-n", "-c", command], check=True)
    assert "set-up: tests" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_readme_offers_the_tiers_that_config_serves() -> None:
    from videoaccel.config import TIERS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (yes|planned) \|$", text, flags=re.MULTILINE)
    assert rows == [(name, tier.promise, "yes" if tier.served else "planned") for name, tier in TIERS.items()]


def test_readme_says_whether_the_bundled_weights_are_trained() -> None:
    facts = json.loads((ROOT / "videoaccel/assets/tiny-h3/videoaccel.json").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ("bundled weights are not trained yet" in text) != facts.get("trained", True)


def test_constraints_pin_every_requirement_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonical(name): version for name, version in pins.items()}
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name == project["name"]:
            continue
        version = pins[canonical(requirement.name)]
        assert requirement.specifier.contains(version), requirement
    assert not {"torchvision", "torchaudio"} & set(pins)


def imported(folder: Path) -> set[str]:
    """Top-level names that the Python files of a folder import, at any depth of the code."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize(
    ("folder", "extras"), [("videoaccel", ()), ("evals", ("eval",)), ("tests", ("test",))]
)
def test_every_import_is_a_declared_requirement(folder: str, extras: tuple[str, ...]) -> None:
    # What comes along with something else today may not come along tomorrow.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    if "test" in extras:
        lines += optional["eval"]
    declared = {canonical(Requirement(line).name) for line in lines}
    providers = importlib.metadata.packages_distributions()
    own = {path.name for path in ROOT.iterdir() if path.is_dir()} | {"conftest"}
    foreign = imported(ROOT / folder) - set(sys.stdlib_module_names) - own
    assert "numpy" in foreign
    undeclared = {
        name for name in foreign if not {canonical(dist) for dist in providers.get(name, [name])} & declared
    }
    # packaging is pytest's own. triton comes with torch where there is an accelerator; without it, the
    # registry takes no kernel that needs it.
    assert undeclared <= {"packaging", "triton"}, "declare the rest in pyproject.toml"


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_nothing_needs_torchvision() -> None:
    needs = [Requirement(line) for line in importlib.metadata.requires("videoaccel") or []]
    assert needs
    assert not {"torchvision", "torchaudio"} & {need.name for need in needs}
    for path in (ROOT / "videoaccel").rglob("*.py"):
        assert not re.search(
            r"^\s*(import|from) torchvision", path.read_text(encoding="utf-8"), re.MULTILINE
        ), path


def test_bundled_weights_fit_and_travel() -> None:
    weights = list((ROOT / "videoaccel/assets").rglob("*.safetensors"))
    assert weights
    assert sum(path.stat().st_size for path in weights) <= 32e6
