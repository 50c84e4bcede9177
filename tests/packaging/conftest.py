"""What the tests of packaging share: every archive is built once, however many processes test."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.builds import built, checkout, environment, install, unpacked


@dataclass(frozen=True)
class Builds:
    """A checkout with links, one without, and what is built from them and from the sdist."""

    with_links: Path
    without_links: Path
    sdist: Path
    wheels: dict[str, Path]
    """By what each was built from."""


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, Callable[[Path], object]], Path]:
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
def builds(once: Callable[[str, Callable[[Path], object]], Path]) -> Builds:
    """Everything that is built, from this tree's sources as they are now."""
    folder = once("packaging-builds", _build)
    (sdist,) = (folder / "sdist").iterdir()
    wheels = {name: next((folder / f"wheel from {name}").iterdir()) for name in _SOURCES}
    return Builds(folder / "with links", folder / "without links", sdist, wheels)


_SOURCES = ("with links", "without links", "sdist")


def _build(folder: Path) -> None:
    folder.mkdir()
    checkout(folder / "with links", links=True)
    checkout(folder / "without links", links=False)
    sdist = built("sdist", folder / "without links", folder / "sdist")
    (folder / "unpacked").mkdir()
    trees = dict(zip(_SOURCES, (folder / "with links", folder / "without links"), strict=False))
    trees["sdist"] = unpacked(sdist, folder / "unpacked")
    for name, tree in trees.items():
        built("wheel", tree, folder / f"wheel from {name}")


@pytest.fixture(scope="session")
def installed(once: Callable[[str, Callable[[Path], object]], Path], builds: Builds) -> Path:
    """The ``bin`` folder of an environment that has the wheel and knows nothing of this tree."""

    def make(folder: Path) -> None:
        install(environment(folder), str(builds.wheels["sdist"]))

    return once("packaging-environment", make) / "bin"
