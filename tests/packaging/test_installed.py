"""An installed wheel does what the README says, away from the source tree; planning does not load torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import poochplan
from tests.packaging.conftest import environment, install, run
from tests.packaging.folders import ROOT, package_folders

INSTANCE = ROOT / "benchmarks" / "instances" / "resnet50-b256-v100.json.gz"
_IMPORTS = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # importing it is an error
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
print(*sorted({name for name in sys.modules if name.startswith("poochplan.")}))
"""
_WHERE = "import poochplan.planner, poochplan.profiler, poochplan.runtime; print(poochplan.runtime.__path__[0])"
_ELSEWHERE = """
import os, sys
import numpy, pandas, multiprocessing  # which look at the system themselves
sys.platform = "darwin"
sys.modules["torch"] = sys.modules["resource"] = None  # importing them is an error
del os.sched_getaffinity
from poochplan.cli import main
sys.exit(main(sys.argv[1:]))
"""


def modules_of(*packages: str) -> set[str]:
    """Every module of the packages, by the folders of this tree."""
    return {
        package if path.stem == "__init__" else f"{package}.{path.stem}"
        for package, folder in package_folders().items()
        if any(f"{package}.".startswith(f"{wanted}.") for wanted in packages)
        for path in folder.glob("*.py")
    }


def test_every_module_of_the_planner_imports_without_torch(installed: Path, tmp_path: Path) -> None:
    imported = run(str(installed / "python"), "-c", _IMPORTS, "poochplan.planner", cwd=tmp_path).split()
    assert modules_of("poochplan.planner") <= set(imported)


def test_planning_needs_neither_torch_nor_linux(installed: Path, tmp_path: Path) -> None:
    plan = ("plan", str(INSTANCE), "--policy", "sqrt-n", "--budget", "60%", "-o", "plan.json")
    run(str(installed / "python"), "-c", _ELSEWHERE, *plan, cwd=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["values"]


@pytest.mark.parametrize("links", ["with links", "without links"])
def test_an_editable_install_imports_the_checkout(links: str, builds: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(builds / "trees" / links, tree, symlinks=True)
    bin_folder = environment(tmp_path / "environment")
    install(bin_folder, "--editable", str(tree))
    found = Path(run(str(bin_folder / "python"), "-c", _WHERE, cwd=tmp_path).strip())
    assert found.resolve() == tree / "runtime"


def test_the_command_knows_its_version_and_profiles_a_name_that_ships(installed: Path, tmp_path: Path) -> None:
    assert run(str(installed / "pooch"), "--version", cwd=tmp_path) == f"pooch {poochplan.__version__}\n"
    fake = ("--mode", "fake", "--roofline", "v100")
    run(str(installed / "pooch"), "profile", "char_rnn", *fake, "-o", "profile.json", cwd=tmp_path)
    assert json.loads((tmp_path / "profile.json").read_text())["workload"] == "char_rnn"
