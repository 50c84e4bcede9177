"""What the tests of packaging share: every archive is built once, however many processes test."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.builds import built, checkout, environment, install, unpacked

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
