"""Each way to get the code, from a real clone: all import, and all make the same plan of the demo's profile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.packaging.builds import built, environment, install, run, unpacked
from tests.packaging.folders import ROOT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: there is nothing to clone"),
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
]
_PACKAGES = "import poochplan.planner, poochplan.profiler.profiling, poochplan.runtime.session"


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is committed, with symbolic links and without."""
    folder = tmp_path_factory.mktemp("clones")
    for name, links in (("with links", "true"), ("without links", "false")):
        run(
            "git", "-c", f"core.symlinks={links}", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(folder / name)
        )
    assert (folder / "with links" / "src" / "poochplan" / "planner").is_dir()
    assert (folder / "without links" / "src" / "poochplan" / "planner").is_file()
    return {name: folder / name for name in ("with links", "without links")}


@pytest.fixture(scope="module")
def reference(clones: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo's profile (a roofline's, which is the same on each machine) and of its plan."""
    folder = tmp_path_factory.mktemp("reference")
    bin_folder = environment(folder / "environment")
    install(bin_folder, str(built("wheel", clones["with links"], folder / "wheel")))
    fake = ("--mode", "fake", "--roofline", "v100")
    run(str(bin_folder / "pooch"), "profile", "demo", *fake, "-o", "profile.json", cwd=folder)
    plan_demo(bin_folder, folder / "profile.json", folder)
    return folder


def plan_demo(bin_folder: Path, profile: Path, folder: Path) -> object:
    run(str(bin_folder / "python"), "-c", _PACKAGES, cwd=folder)
    options = ("--budget", "60%", "--policy", "greedy", "-o", "plan.json")
    run(str(bin_folder / "pooch"), "plan", str(profile), *options, cwd=folder)
    return json.loads((folder / "plan.json").read_text())["values"]


@pytest.mark.parametrize("links", ["with links", "without links"])
@pytest.mark.parametrize("way", ["checkout", "editable", "wheel", "sdist"])
def test_each_way_imports_and_plans_the_demo(
    clones: dict[str, Path], reference: Path, tmp_path: Path, way: str, links: str
) -> None:
    tree = clones[links]
    what = {
        "checkout": lambda: str(tree),
        "editable": lambda: str(tree),
        "wheel": lambda: str(built("wheel", tree, tmp_path / "wheel")),
        "sdist": lambda: str(unpacked(built("sdist", tree, tmp_path / "sdist"), tmp_path / "unpacked")),
    }[way]()
    bin_folder = environment(tmp_path / "environment")
    install(bin_folder, *(["--editable"] if way == "editable" else []), what)
    plan = plan_demo(bin_folder, reference / "profile.json", tmp_path)
    assert plan == json.loads((reference / "plan.json").read_text())["values"]
