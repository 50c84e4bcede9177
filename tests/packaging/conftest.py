"""Checkouts, what is built from them, and environments with nothing of the source tree in them. Every archive is built
once, however many processes test.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.folders import ROOT

Once = Callable[[str, Callable[[Path], object]], Path]
SOURCES = ("with links", "without links", "sdist")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Once:
    """Makes a folder of the session by the first process that asks, while the others wait."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / f"{name}.done").exists():
                make(folder)
                (shared / f"{name}.done").touch()
        return folder

    return made


@pytest.fixture(scope="session")
def builds(once: Once) -> Path:
    """A folder with everything that is built from this tree's sources as they are now: the ``trees`` that it is built
    from, by name; ``sdist``; and the wheel of each tree.
    """

    def make(folder: Path) -> None:
        trees = folder / "trees"
        trees.mkdir(parents=True)
        for name in ("with links", "without links"):
            checkout(trees / name, links=name == "with links")
        unpacked(built("sdist", trees / "without links", folder / "sdist"), trees / "sdist")
        for name in SOURCES:
            built("wheel", trees / name, folder / f"wheel from {name}")

    return once("packaging-builds", make)


def wheel_from(source: str, builds: Path) -> Path:
    (wheel,) = (builds / f"wheel from {source}").iterdir()
    return wheel


@pytest.fixture(scope="session")
def installed(once: Once, builds: Path) -> Path:
    """The ``bin`` folder of an environment that has the wheel and knows nothing of this tree."""
    wheel = str(wheel_from("sdist", builds))
    return once("packaging-environment", lambda folder: install(environment(folder), wheel)) / "bin"


_NEEDED = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "docs", "src", "planner", "profiler", "runtime")
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def checkout(folder: Path, *, links: bool) -> Path:
    """What a build needs of this tree, copied; without ``links`` each is a file with its target, as in git."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*_NEEDED, "configs"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(source, folder)
    for path in [] if links else list(folder.rglob("*")):
        if path.is_symlink():
            target = path.readlink()
            path.unlink()
            path.write_text(str(target))
    return folder


def built(kind: str, tree: Path, out: Path) -> Path:
    """The ``"wheel"`` or ``"sdist"`` of a tree, built by the setuptools that is installed here."""
    out.mkdir()
    run(sys.executable, "-c", _BUILD, f"build_{kind}", str(out), cwd=tree)
    (archive,) = out.iterdir()
    return archive


def unpacked(sdist: Path, tree: Path) -> Path:
    """The tree that an sdist holds, which is moved there."""
    with tarfile.open(sdist) as archive:
        filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in Python 3.11.2
        archive.extractall(tree.with_suffix(".out"), **filters)
    (inside,) = tree.with_suffix(".out").iterdir()
    return inside.rename(tree)


def files_of(wheel: Path) -> dict[str, bytes]:
    """What is in a wheel, but for the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def environment(folder: Path) -> Path:
    """An environment with the dependencies of this one and without poochplan: its ``bin`` folder."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python3.*/site-packages")
    installed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(installed))  # .pth files in there, an editable one, are not read
    return folder / "bin"


def install(bin_folder: Path, *what: str) -> None:
    """pip install, from this machine alone."""
    options = "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"
    quiet = "--quiet", "--disable-pip-version-check"
    run(sys.executable, "-m", "pip", "--python", str(bin_folder / "python"), "install", *quiet, *options, *what)


def run(*command: str, cwd: Path | None = None) -> str:
    """What the command, which knows nothing of this tree, says on stdout; its stderr is the failure's message."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    result = subprocess.run(command, cwd=cwd, env=settings, text=True, capture_output=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
    return result.stdout
