"""Each way to get the code, from a real clone: all import, and all make the same plan of the demo's profile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from poochplan.cli import main
from tests.packaging.builds import built, environment, install, run, unpacked
from tests.packaging.folders import ROOT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: there is nothing to clone"),
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
]
LINKS = {"with links": "true", "without links": "false"}
_PACKAGES = "import poochplan.planner, poochplan.profiler.profiling, poochplan.runtime.session"
_PLANNED = ("--budget", "60%", "--policy", "greedy", "-o")


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed, with symbolic links and without."""
    folder = tmp_path_factory.mktemp("clones")
    for name, links in LINKS.items():
        clone = ("git", "-c", f"core.symlinks={links}", "clone", "--quiet", "--depth=1", f"file://{ROOT}")
        run(*clone, str(folder / name))
        assert (folder / name / "src" / "poochplan" / "planner").is_dir() == (links == "true")
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this tree's plan of the demo's profile: a roofline's, which is the same on each machine."""
    folder = tmp_path_factory.mktemp("reference")
    profile, plan = str(folder / "profile.json"), str(folder / "plan.json")
    assert main(["profile", "demo", "--mode", "fake", "--roofline", "v100", "-o", profile]) == 0
    assert main(["plan", profile, *_PLANNED, plan]) == 0
    return folder


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("way", ["checkout", "editable", "wheel", "sdist"])
def test_each_way_imports_and_plans_the_demo(
    clones: Path, reference: Path, tmp_path: Path, way: str, links: str
) -> None:
    tree = clones / links
    if way in ("wheel", "sdist"):
        made = built(way, tree, tmp_path / way)
        tree = made if way == "wheel" else unpacked(made, tmp_path / "unpacked")
    bin_folder = environment(tmp_path / "environment")
    install(bin_folder, *(["--editable"] if way == "editable" else []), str(tree))
    run(str(bin_folder / "python"), "-c", _PACKAGES, cwd=tmp_path)
    run(str(bin_folder / "pooch"), "plan", str(reference / "profile.json"), *_PLANNED, "plan.json", cwd=tmp_path)
    values, expected = (json.loads((one / "plan.json").read_text())["values"] for one in (tmp_path, reference))
    assert values == expected
