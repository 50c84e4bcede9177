"""How the library is built: once, for this user alone, and in one clear line where it cannot be."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poochplan.errors import NativeError
from poochplan.runtime.arena import library
from poochplan.runtime.arena.library import ALLOCATOR, Library, build, is_built, library_file

LOADS = """
import torch
early = torch.ones(100_000)
from poochplan.runtime.arena.library import library
found = library()
assert found is library()
early.resize_(200_000)
late = torch.ones(100_000)
assert found.block_at(late.data_ptr()) >= 0 > found.block_at(early.data_ptr())
assert float(early[:100_000].sum() + late.sum()) == 200_000
del early
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


@pytest.fixture
def built_home(home: Path, native: Library, cache_home: Path) -> Path:
    """A cache with the library in it."""
    shutil.copytree(cache_home / "poochplan" / "native", home / "poochplan" / "native")
    return home


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def one_line(error: pytest.ExceptionInfo[NativeError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_two_processes_build_at_once_and_both_load(native: Library, home: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([sys.executable, "-c", LOADS], env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    folder = library_file().parent
    assert sorted(path.name for path in folder.iterdir()) == ["allocator.so", "lock"]
    for one in (folder, folder.parent, library_file()):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
    assert is_built()


def test_telling_whether_it_is_built_builds_and_makes_nothing(home: Path) -> None:
    assert not is_built()
    ALLOCATOR.why_unavailable()
    assert list(home.iterdir()) == []


def test_what_is_built_is_not_built_again(built_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(script(built_home / "fails", "exit 1")))
    assert is_built()
    assert build() == library_file()
    assert ALLOCATOR.why_unavailable() == ""


def test_another_torch_is_another_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = library_file()
    for name, value in (("__version__", "99.0"), ("version.git_version", "another")):
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.{name}", value)
            assert library_file() != this
    assert library_file() == this
    assert torch.__version__ in this.parent.name


def test_without_a_compiler_one_line_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    expected = "expected a C++ compiler, found none of c++, g++, clang++; install g++ or clang++"
    assert expected in ALLOCATOR.why_unavailable()
    with pytest.raises(NativeError) as error:
        build()
    assert expected in one_line(error)
    assert list(home.iterdir()) == []


def test_a_compiler_that_is_named_and_not_there_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert ALLOCATOR.why_unavailable().startswith(
        "CXX=no-such-compiler -O3: expected a C++ compiler, found no such command; "
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "echo 'In file x:' >&2; echo 'a.h:3:1: fatal  error: c10/what.h: No such file' >&2; echo more >&2; exit 1",
            "a.h:3:1: fatal error: c10/what.h: No such file",
        ),
        ("echo killed >&2; exit 137", "killed"),
        ("exit 1", "it says nothing"),
        ("printf 'error: %0500d' 0 >&2; exit 1", "..."),
    ],
)
def test_a_compiler_that_fails_is_one_clear_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    compiler = script(home / "compiler", text)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeError) as error:
        build()
    line = one_line(error)
    assert line.startswith(f"{compiler} could not build the allocator: ")
    assert line.endswith(said)
    assert len(line) < 300 + len(str(compiler))
    assert not is_built()
    assert sorted(path.name for path in library_file().parent.iterdir()) == ["allocator.failed", "lock"]
    assert ALLOCATOR.last_failure() == line


@pytest.mark.parametrize(
    ("above", "mode", "message"),
    [
        (0, 0o722, r"allocator\.so: expected that nobody else can write there, found mode 722; chmod go-w it"),
        (1, 0o770, "found mode 770; chmod go-w it"),
        (1, 0o702, "found mode 702; chmod go-w it"),
        (2, 0o777, "found mode 777; chmod go-w it"),
        (4, 0o777, "found mode 777; chmod o-w it"),
    ],
    ids=["file", "folder, by a group", "folder", "its parent", "far above"],
)
def test_what_others_can_write_is_refused(built_home: Path, above: int, mode: int, message: str) -> None:
    path = (library_file(), *library_file().parents)[above]
    path.chmod(mode)
    with pytest.raises(NativeError, match=message):
        build()
    assert not is_built()
    path.chmod(0o1777 if path == built_home else 0o700)  # as /tmp: nobody can put another folder in the place of ours
    assert build() == library_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(built_home: Path) -> None:
    folder = library_file().parent
    for one in (library_file(), folder, folder.parent, built_home):
        os.chown(one, 12345, -1)
        with pytest.raises(NativeError, match="expected to be owned by user 0, found user 12345; set XDG_CACHE_HOME"):
            build()
        os.chown(one, 0, -1)
    assert is_built()


def test_a_link_in_the_place_of_the_folder_is_refused(built_home: Path, tmp_path: Path) -> None:
    folder = library_file().parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NativeError, match="expected a folder, found something else; remove it"):
        build()


DAMAGES = {
    "other content": lambda data: b"no library",
    "nothing": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 3],  # to load it would end the process
    "one byte": lambda data: data[:-999] + bytes([data[-999] ^ 1]) + data[-998:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_anew_and_without_a_compiler_is_one_clear_line(
    damage: str, built_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = library_file().read_bytes()
    (built_home / "whole").write_bytes(whole)
    library_file().write_bytes(DAMAGES[damage](whole))
    assert not is_built()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeError, match="CXX=no-such-compiler: expected a C\\+\\+ compiler"):
        build()
    compiler = script(built_home / "copies", f"for last; do :; done; cp {built_home}/whole $last")
    monkeypatch.setenv("CXX", str(compiler))
    assert build().read_bytes().startswith(whole)
    assert is_built()


def test_a_library_that_cannot_be_loaded_is_one_clear_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = script(home / "compiler", "for last; do :; done; echo no library > $last")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeError) as error:
        Library()
    assert "cannot be loaded" in one_line(error)
    assert one_line(error).endswith("remove it, and it is built anew")


def test_a_failure_is_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_failure", None)
    monkeypatch.setenv("PATH", str(home))
    for _ in range(2):
        with pytest.raises(NativeError, match="found none of"):
            library.library()
        monkeypatch.setattr(library.ALLOCATOR, "build", lambda: pytest.fail("it is built again"))
    assert library._library is None
    assert not library.is_loaded()
    assert "found none of" in library.why_unavailable()
    monkeypatch.setattr(library.ALLOCATOR, "_is_told", False)
    assert library.untold_absence().startswith("expected a C++ compiler, found none of c++, g++, clang++; without it ")
    assert library.untold_absence() == ""
    with library.fresh_memory():  # which only asks for huge pages if there is one
        assert torch.ones(1 << 20).sum() == 1 << 20
