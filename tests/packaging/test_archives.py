"""What is built holds everything, from whatever it is built: a checkout, one without symbolic links, or the sdist."""

from __future__ import annotations

import email
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import poochplan
from tests.packaging.conftest import SOURCES, files_of, wheel_from
from tests.packaging.folders import ROOT, package_folders

HOMES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]

NATIVE = {
    "poochplan/planner/simulator/native/evaluator.cpp",
    "poochplan/runtime/arena/native/allocator.cpp",
    "poochplan/runtime/replays/native/tape.cpp",
}


def shipped_files() -> dict[str, bytes]:
    """Every module and every data file by its place in a wheel, found by its ending: no list of packages is asked."""
    found = {}
    for package, home in HOMES.items():
        for path in (ROOT / home).rglob("*"):
            if path.suffix in (".py", ".toml", ".typed", ".cpp", ".h") and path.is_file():
                found["/".join([*package.split("."), *path.relative_to(ROOT / home).parts]).lstrip("/")] = path
    return {name: path.read_bytes() for name, path in found.items()}


def test_every_link_beside_the_list_leads_where_the_list_says() -> None:
    for package, home in HOMES.items():
        if package:
            link = ROOT / "src" / "poochplan" / package.removeprefix("poochplan.")
            assert link.resolve() == ROOT / home


@pytest.mark.parametrize("source", SOURCES)
def test_a_wheel_holds_every_module_and_config(builds: Path, source: str) -> None:
    held = files_of(wheel_from(source, builds))
    expected = shipped_files()
    one_of_each = {"poochplan/py.typed", "poochplan/configs/unet3d.toml", "poochplan/planner/planning.py"}
    assert one_of_each | NATIVE <= set(expected)
    assert held.keys() == expected.keys()
    assert held == expected


def test_the_sdist_holds_every_module_and_the_schemas(builds: Path) -> None:
    (sdist,) = (builds / "sdist").iterdir()
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
        assert not [entry.name for entry in archive if entry.issym() or entry.islnk()]
    modules = {str(path.relative_to(ROOT)) for folder in package_folders().values() for path in folder.glob("*.py")}
    schemas = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "schemas").iterdir()}
    assert len(schemas) >= 2
    assert modules | schemas | {"src/poochplan/py.typed", "configs/unet3d.toml", "README.md", "LICENSE"} <= held


def test_the_version_is_said_in_one_place(builds: Path) -> None:
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for source in SOURCES:
        with zipfile.ZipFile(wheel_from(source, builds)) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            assert email.message_from_bytes(archive.read(name))["Version"] == poochplan.__version__
