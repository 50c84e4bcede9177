"""The suite's own code, tried on the stand-in with tiny networks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu_suite
from benchmarks.gpu_nets import NETS
from tests.depth import DEEP
from tests.gpu.cases import WHERE


def test_every_case_of_the_suite_runs_and_a_spent_time_limit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_suite, "WARM_STEPS", 1)

    def results(*more: str) -> dict:
        assert gpu_suite.main(["--device", WHERE.type, "--tiny", "--out", str(tmp_path), *more]) == 0
        return json.loads((tmp_path / "gpu-suite.json").read_text())

    test = "is_for_the_current_gpu" if WHERE.type == "cuda" else "any_decisions and embedding"
    nets = list(NETS) if DEEP else ["gpt2-bf16"]
    found = results("--minutes", "30", "--tests", test, "--nets", *nets)
    assert found["failed"] == found["skipped"] == []
    assert "1 passed" in found["tests"]["summary"]
    ways = {"a third", "a fifth", "swap-all", "checkpoint", "save_on_cpu", "a fifth, deterministic"}
    for net in nets:
        rows = {row["way"]: row for row in found["rows"] if row["net"] == net}
        assert rows.keys() == ways
        for label in ("a third", "a fifth"):
            assert rows[label]["metered_peak_bytes"] <= rows[label]["predicted_peak_bytes"]
            assert rows[label]["predicted_peak_bytes"] <= rows[label]["budget_bytes"]
            assert rows[label]["fallbacks"] == 0
        assert rows["a fifth, deterministic"]["bitwise_equal"] is True
        assert rows["a fifth, deterministic"]["fallbacks"] == 0
    if WHERE.type == "cuda":
        assert "overlap" in {one["name"] for one in found["doctor"]}
        assert all(row["stall_s"] >= 0 for row in found["rows"] if row.get("out_bytes"))
    read = (tmp_path / "gpu-suite.md").read_text()
    for line in (f"# GPU suite on {found['device']['name']}", f"* Commit: {found['commit']}", "## gpt2-bf16"):
        assert line in read
    assert "* Bit by bit, gpt2-bf16, a fifth, deterministic: equal" in read
    tmp_path = tmp_path / "late"
    late = results("--minutes", "0.1", "--no-tests", "--nets", "gpt2")
    assert late["skipped"] == [*(["doctor"] if WHERE.type == "cuda" else []), "gpt2: profile"]
    assert late["rows"] == []
    assert "* Left out, the time was up: gpt2: profile" in (tmp_path / "gpu-suite.md").read_text()


@pytest.mark.parametrize(
    ("ended", "reason"),
    [(0, "expected them to run on"), (1, "exit code 1: no output"), (None, "time limit: no output")],
)
def test_tests_that_fail_or_ran_elsewhere_are_a_failure_of_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int | None, reason: str
) -> None:
    def says_nothing(command: list[str], timeout: float = 0.0, **_: object) -> SimpleNamespace:
        if ended is None and "pytest" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=ended, stdout="0")

    monkeypatch.setattr(gpu_suite.subprocess, "run", says_nothing)
    monkeypatch.setattr(gpu_suite, "run_net", lambda suite, name: None)
    assert gpu_suite.main(["--device", WHERE.type, "--tiny", "--minutes", "30", "--out", str(tmp_path)]) == 1
    read = (tmp_path / "gpu-suite.md").read_text()
    assert f"* **Failed**: GPU tests: RuntimeError: GPU tests: {reason}" in read


def test_a_python_without_pytest_runs_the_rest_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_suite.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_suite, "run_net", lambda suite, name: None)
    assert gpu_suite.main(["--device", WHERE.type, "--tiny", "--minutes", "30", "--out", str(tmp_path)]) == 0
    assert "* Tests, on nothing: left out, for pytest is not installed" in (tmp_path / "gpu-suite.md").read_text()


@pytest.mark.parametrize("name", NETS)
def test_every_network_has_a_step_and_blocks_to_checkpoint(name: str) -> None:
    net = NETS[name](WHERE, True)
    assert net.blocks
    with gpu_suite.checkpointed(net.blocks):
        assert gpu_suite.one_step(net, WHERE) > 0
    assert all(parameter.grad is not None for parameter in net.workload.model.parameters())


def test_the_suite_takes_the_cpu_too_and_prints_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = ["--minutes", "0.1", "--nets", "gpt2", "--out", str(tmp_path)]
    assert gpu_suite.main(["--device", "cpu", "--tiny", *late]) == 0
    read = (tmp_path / "gpu-suite.md").read_text()
    assert "* Device: cpu" in read
    assert read in capsys.readouterr().out


def test_other_bits_are_a_failure_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(suite: object, name: str, plan: object) -> dict:
        return {"bitwise_equal": False, "difference": "weight differs", "compared_tensors": 3}

    monkeypatch.setattr(gpu_suite, "bitwise", differs)
    monkeypatch.setattr(gpu_suite, "compare_ways", lambda suite, name: {"a fifth": None})
    arguments = ["--device", WHERE.type, "--tiny", "--no-tests", "--nets", "gpt2", "--out", str(tmp_path)]
    assert gpu_suite.main(arguments) == 1
    assert "gpt2, a fifth, deterministic: **different**: weight differs" in (tmp_path / "gpu-suite.md").read_text()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_settings_of_the_allocator_are_those_of_the_suite(name: str) -> None:
    others = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF")}
    program = "import os; from benchmarks.gpu_suite import ALLOCATOR; print(ALLOCATOR, 'expandable' in str(os.environ))"
    command, environment = [sys.executable, "-c", program], {**others, name: "max_split_size_mb:64"}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == "max_split_size_mb:64 False\n"


ROOT = Path(__file__).parents[2]
THERE = {canonicalize_name(one.name) for one in distributions()}
CELLS = [
    "".join(cell["source"])
    for cell in json.loads((ROOT / "notebooks" / "gpu_first_report.ipynb").read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]


def _run_notebook(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Its cells, as on a GPU; the commands that they gave. That of the suite runs here, without networks."""
    asked: list[list[str]] = []

    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        if not {"pip", "clone", "benchmarks.gpu_suite"} & {*command}:
            return real(command, **options)  # the suite's own question for the commit
        asked.append([*command])
        if "benchmarks.gpu_suite" in command:
            with contextlib.chdir(options["cwd"]):
                gpu_suite.main([*command[command.index("benchmarks.gpu_suite") + 1 :], "--tiny", "--no-tests"])
        return contextlib.nullcontext(SimpleNamespace(stdout=["said\n"]))

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(gpu_suite, "run_net", lambda suite, name: None)
    space: dict[str, Any] = {}
    for source in CELLS:
        exec(source, space)
    return asked


@pytest.mark.skipif(WHERE.type != "cuda", reason="about CUDA alone")
@pytest.mark.parametrize("is_checkout", [True, False])
def test_the_notebook_installs_runs_and_shows_the_page(
    is_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("IPython")
    folder = tmp_path / ("benchmarks" if is_checkout else "poochplan")
    folder.mkdir()
    if is_checkout:
        (folder / "gpu_suite.py").touch()
    monkeypatch.chdir(tmp_path)
    asked = _run_notebook(monkeypatch)
    assert [command[:2] for command in asked if "clone" in command] == ([] if is_checkout else [["git", "clone"]])
    said = capsys.readouterr().out
    page = ((tmp_path if is_checkout else folder) / "gpu-output" / "gpu-suite.md").read_text()
    assert page.startswith("# GPU suite on ")
    assert page in said


def _with_what_they_need(names: set[str]) -> set[str]:
    """Of packages that are installed here, those that pip installs with these."""
    found: set[str] = set()
    while names - found:
        name = min(names - found)
        found.add(name)
        needed = [Requirement(text) for text in (requires(name) or [])]
        names |= {
            canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})
        } & THERE
    return found


def test_the_suite_and_its_tests_import_only_what_the_notebook_installs() -> None:
    """And tqdm, which torch loads where it is installed."""
    (line,) = [line.strip() for source in CELLS for line in source.splitlines() if '"pip"' in line]
    installed = {"torch", *(canonicalize_name(Requirement(text).name) for text in re.findall(r'"([^"]+)"', line)[4:])}
    modules = ["benchmarks.gpu_suite", *(f"tests.gpu.{path.stem}" for path in Path(__file__).parent.glob("*.py"))]
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    owners = packages_distributions()
    roots = {name.partition(".")[0] for name in said.split()}
    imported = {canonicalize_name(owner) for root in roots for owner in owners.get(root, ())}
    assert sorted(imported - _with_what_they_need(installed) - {"poochplan", "tqdm"}) == []
