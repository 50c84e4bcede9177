"""What the documents say is true: links, file names, commands and code, and sentences that can be read."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from benchmarks.against.compare_table import short_table, table
from poochplan.cli import build_parser
from poochplan.planner.policies import PolicyInput, policy_names, registry, run_policy
from poochplan.planner.simulator.problem import Problem
from poochplan.workload import shipped_configs
from tests.processes import ROOT

SITE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MEASURED = [ROOT / "benchmarks" / "README.md", *sorted((ROOT / "benchmarks" / "pages").glob("*.md"))]
PAGES = [*SITE, ROOT / "CHANGELOG.md", *MEASURED, ROOT / "benchmarks" / "instances" / "README.md"]
EXAMPLES_OF_NAMES = {"train.py", "path/to/file.py", "my_network.toml", "runtime/devices/NAME.py"}
"""Files that a reader has, or is to write."""
OF_THE_TABLE = {
    "planning.json": ("resnet50-b256", "unet3d-192", "gpt2-medium"),
    "planning-today.json": ("llama-7b", "qwen2-7b", "vit-l", "whisper-large"),
}
MOST_WORDS, MEAN_WORDS = 40, 16
WORKLOADS = {*shipped_configs(), "my_network.toml"}
"""Those that a command of the README may name; it has its reader write the last one."""
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SKIPPED = re.compile(r"^(#|\||<!--|    |!\[|---$)")
_ITEM = re.compile(r"^\s*([*-]|\d+\.) +")
_END = re.compile(r"(?<=[.!?])[*)]*\s+|(?<=[.!?]\))\s+")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s#]+)")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
site_pages = pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(ROOT)))


README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = "\n".join(page.read_text(encoding="utf-8") for page in MEASURED)
RESULTS = ROOT / "benchmarks" / "results"


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in _BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def prose(page: Path) -> str:
    """Without blocks of code."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    return _CODE.findall(prose(page))


@pages
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = [link for link in _LINK.findall(prose(page)) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@site_pages
def test_every_file_and_folder_that_is_named_exists(page: Path) -> None:
    named = {span for span in spans(page) if re.fullmatch(r"[\w./-]+(\.py|\.toml|\.md|\.yaml|/)", span)}
    missing = {name for name in named - EXAMPLES_OF_NAMES if not (ROOT / name).exists()}
    outputs = {"demo-output/", "dist/", "site/", "results/", ".venv/"}
    folders = [ROOT / name for name in named if name.endswith("/")]  # `preserve.py` beside `profiler/step/`
    assert {name for name in missing - outputs if not any((folder / name).exists() for folder in folders)} == set()


def test_the_architecture_page_answers_with_names_that_are_in_those_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [row for row in text.split("## Where is what")[1].split("##")[0].splitlines() if row.startswith("|")][2:]
    answers = [_CODE.findall(row) for row in rows]
    assert len(answers) >= 7
    for answer in answers:
        files = [ROOT / span for span in answer if span.endswith(".py")]
        code = "\n".join(path.read_text(encoding="utf-8") for path in files)
        names = [span.rpartition(".")[2] for span in answer if not span.endswith(".py")]
        assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []
        assert files


@site_pages
def test_every_command_of_pooch_that_is_written_can_be_read(page: Path) -> None:
    lines = [line for code in blocks(page, "sh") for line in code.splitlines()]
    commands = [line for line in (*lines, *spans(page)) if line.startswith("pooch ") and "..." not in line]
    found = set()
    for command in commands:
        _, *arguments = shlex.split(command, comments=True)
        if len(arguments) > 1 and "NAME" not in arguments:
            options = build_parser().parse_args(arguments)
            found.add(options.verb.name)
            assert page.name != "README.md" or getattr(options, "workload", "tiny") in (*WORKLOADS, None)
    assert page.name != "README.md" or found >= {"profile", "plan", "run"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_that_is_named_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join([*blocks(ROOT / page, "sh"), *spans(ROOT / page)])))
    assert {"test"} <= named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_measured_figure_of_the_readme_names_a_command_of_the_benchmarks() -> None:
    commands = [span for span in spans(ROOT / "README.md") if span.startswith("python ")]
    assert len(commands) >= 5
    assert [command for command in commands if command not in FIGURES] == []


@site_pages
def test_a_page_shows_code_and_what_is_python_of_it_is_python(page: Path) -> None:
    assert _BLOCK.search(page.read_text(encoding="utf-8"))
    for code in blocks(page, "python"):
        ast.parse(code)


@pytest.fixture(scope="module")
def network() -> dict[str, Any]:
    """The names that the pages take for given: a small network, its step and a loop."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    batch = torch.randn(512, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "step": lambda: model(batch).square().mean(), "steps": 2}


def test_the_loop_of_the_readme_trains_and_the_pages_read_the_files_it_leaves(
    network: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = network | {"poochplan": poochplan}
    exec(blocks(ROOT / "README.md", "python")[1], names)
    total = names["session"].report().total
    assert (total.steps, total.fallbacks) == (2, 0)
    assert total.peak_bytes <= names["plan"].budget_bytes < names["profile"].in_core_peak_bytes
    names["profile"].save("profile.json")
    exec(blocks(ROOT / "docs" / "plan-format.md", "python")[0], names)
    exec(blocks(ROOT / "docs" / "planner.md", "python")[0], names)
    assert str(names["plan"].solve.gap) in capsys.readouterr().out


def test_the_policy_of_contributing_is_one() -> None:
    profile = poochplan.Profile.load(ROOT / "benchmarks" / "instances" / "unet3d-192-v100.json.gz")
    given = PolicyInput(Problem.of(profile), int(0.8 * profile.in_core_peak_bytes))
    try:
        exec(blocks(ROOT / "CONTRIBUTING.md", "python")[0], {"__name__": "contributing"})
        assert "biggest-first" in policy_names()
        assert given.fits(run_policy("biggest-first", given))
    finally:
        registry._POLICIES.pop("biggest-first", None)


def test_the_page_of_the_api_has_every_public_name_and_nothing_is_undocumented() -> None:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "docs" / "hooks" / "api.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = hook.on_page_markdown((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    sections = dict(re.findall(r"^## `poochplan\.(\w+)`\n+(?:```.*?```\n+)?(.*?)$", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(poochplan.__all__)
    assert all(len(text.split()) >= 5 for text in sections.values())
    fields = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert fields >= {*poochplan.Profile.__struct_fields__, *poochplan.Plan.__struct_fields__}


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence. A list item begins a sentence; colons and semicolons end none."""
    paragraphs: list[str] = [""]
    for line in _FENCED.sub("", text).splitlines():
        if _SKIPPED.match(line) or not line.strip():
            paragraphs.append("")
        elif _ITEM.match(line):
            paragraphs.append(_ITEM.sub("", line))
        else:
            paragraphs[-1] += " " + line.strip()
    found = (part.split() for paragraph in paragraphs for part in _END.split(re.sub(r"`[^`]*`", "code", paragraph)))
    return [words for words in found if words]


@site_pages
def test_sentences_can_be_read(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert [" ".join(words) for words in found if len(words) > MOST_WORDS] == []
    assert mean(map(len, found) if found else [0]) <= MEAN_WORDS


def test_the_readme_is_short_and_its_pictures_are_small() -> None:
    assert len(README.splitlines()) <= 150
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert all(picture.stat().st_size < 150_000 for picture in pictures)
    for picture in pictures:
        if picture.suffix == ".svg":
            ElementTree.parse(picture)


def test_the_comparison_is_that_of_the_committed_results() -> None:
    found = json.loads((RESULTS / "compare.json").read_text())
    assert short_table(found, "30%") in README
    assert table(found).rstrip() in FIGURES


def test_the_readme_s_table_is_that_of_the_committed_results() -> None:
    table = README.split("| network, simulated |")[1].split("\n\n")[0]
    shown = iter([[cell.strip(" *%") for cell in line.split("|")[2:-1]] for line in table.splitlines()[2:]])
    for file, networks in OF_THE_TABLE.items():
        results = json.loads((RESULTS / file).read_text())["rows"]
        rows = {row["network"]: row for row in results if row["kept"] == 0.5 and row["link"] in ("pcie3", "pcie5")}
        rows |= {row["network"]: row for row in results if (row["link"], row["kept"]) == ("pcie3", 0.5)}
        for network in networks:
            row, policies = rows[network], rows[network]["policies"]
            by_chen = [found for name in ("sqrt-n", "checkpoint-greedy") if (found := policies[name]) is not None]
            others = [policies[name] for name in ("superneurons", "swap-all")]
            found = [row["overhead"], row["bound"], policies["greedy"], policies["pooch"], min(by_chen, default=None)]
            assert next(shown) == ["-" if one is None else f"{100 * one:.{digits(one)}f}" for one in [*found, *others]]
    assert next(shown, None) is None


def digits(share: float) -> int:
    """Three that count, of a percentage."""
    return 0 if share > 1 else 1 if share > 0.1 else 2


def test_the_readme_says_where_a_simple_rule_is_as_good() -> None:
    rows = json.loads((RESULTS / "planning.json").read_text())["rows"]
    simple = [min(found for found in row["policies"].values() if found is not None) for row in rows]
    near = sum(best - row["overhead"] <= 0.001 for best, row in zip(simple, rows, strict=True))
    said = f"In {near} of {len(rows)} cases (network, budget and link) the best simple rule is at most 0.1"
    assert said in " ".join(README.split())


def test_commits_that_the_readme_names_are_of_its_history() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)

    named = re.findall(r"\bcommit ([0-9a-f]{7,40})\b", README)
    assert named
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    assert [commit for commit in named if git("merge-base", "--is-ancestor", commit, "HEAD").returncode] == []


# -- SECURITY.md: no pickles, no evaluated text, no network ---------------------------------------------------------


FORBIDDEN_MODULES = {
    *("pickle", "dill", "shelve", "marshal", "joblib"),  # files that run code
    *("socket", "http", "urllib", "requests", "ftplib", "smtplib", "ssl"),  # network
    *("subprocess", "pty"),
}
FORBIDDEN_CALLS = {
    *("eval", "exec", "os.system"),
    *("torch.load", "torch.save", "torch.hub.load", "np.load", "pd.read_pickle"),
}
ALLOWED = {"src/poochplan/online/background.py": {"subprocess"}, "src/poochplan/native.py": {"subprocess"}}
"""The process that plans beside a loop, and the compiler, as SECURITY.md says."""
ROOMS = "planner", "profiler", "runtime", "src/poochplan"
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def found_in(code: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
            found.add(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.add(ast.unparse(node.func))
    return found


def test_no_module_reads_pickles_evaluates_text_or_opens_a_connection() -> None:
    for code in ("import pickle", "from urllib.request import urlopen", "torch.load(path)", "eval(text)"):
        assert found_in(code)
    assert len(SOURCES) > 100
    every = {str(path.relative_to(ROOT)): found_in(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: found for path, found in every.items() if found} == ALLOWED
