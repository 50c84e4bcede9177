"""Checkouts, what is built from them, and environments with nothing of the source tree in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.packaging.folders import ROOT

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
        archive.extractall(tree.with_suffix(".out"), filter="data")
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
