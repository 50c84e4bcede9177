"""Building the compiled allocator: once for each torch and source, on first use, into a folder of the user's own.

Wheels stay pure: the C++ is package data. It needs c10's headers, which torch brings, and a compiler; without either
everything else works, and :func:`why_unavailable` says what to install.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from poochplan.errors import AllocatorError
from poochplan.formats.files import cache_folder

from .owned_folder import check_file, check_folder, check_makeable, make_folder

SOURCES = Path(__file__).parent / "native"
LIBRARY_NAME = "allocator.so"
COMPILERS = "c++", "g++", "clang++"
FLAGS = "-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"
INSTALL_ADVICE = "install g++ or clang++ (apt install g++, dnf install gcc-c++), or set CXX"
TIMEOUT_S = 300
_MOST_LETTERS = 200
"""Of what a compiler says, in one line."""


def library_file() -> Path:
    """Where the library is, or will be: ``native/<key>/allocator.so`` in the user's cache folder."""
    return cache_folder() / "native" / _key() / LIBRARY_NAME


def is_built() -> bool:
    """Whether the library for this torch and source is there and may be loaded. Builds nothing."""
    try:
        file = library_file()
        if not file.exists():
            return False
        _check(file)
    except (AllocatorError, RuntimeError, OSError):
        return False
    return True


def why_unavailable() -> str:
    """Why there is no library and none can be built, and what to do, in one line; empty where there is or can be.

    Builds nothing, so a compiler that fails shows in :func:`build` alone.
    """
    try:
        if is_built():
            return ""
        _compiler()
        _torch_folder()
        check_makeable(library_file().parent)
    except (AllocatorError, RuntimeError) as error:
        return str(error)
    return ""


def compiler_name() -> str:
    """The command that would build the library; empty where there is none."""
    try:
        return shlex.join(_compiler())
    except AllocatorError:
        return ""


def build() -> Path:
    """The library, which is built if it is not there; takes seconds then. Two processes may call it at once.

    Raises
    ------
    AllocatorError
        It cannot be built here, or its folder may be written by others; one line says what to do.
    """
    try:
        file = library_file()
    except RuntimeError as error:  # there is no home folder
        raise AllocatorError(
            f"expected a folder for the compiled allocator, found {error}; set XDG_CACHE_HOME"
        ) from None
    if file.exists():
        _check(file)
        return file
    command, torch_folder = _compiler(), _torch_folder()
    make_folder(file.parent)
    with _locked(file.parent):
        if not file.exists():  # no other process has built it meanwhile
            _compile(command, torch_folder, file)
    _check(file)
    return file


def _check(file: Path) -> None:
    check_folder(file.parent)
    check_file(file)


@functools.cache
def _key() -> str:
    """Another torch, source or set of flags is another library."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(f"{source.name}\n".encode() + source.read_bytes())
    facts = (str(torch.version.git_version), platform.machine(), *FLAGS, *_abi())
    digest.update("\n".join(facts).encode())
    return f"torch-{torch.__version__}-{digest.hexdigest()[:16]}"


def _abi() -> tuple[str, ...]:
    return (f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",)


def _compiler() -> list[str]:
    if not sys.platform.startswith("linux"):
        raise AllocatorError(f"expected Linux for the compiled allocator, found {sys.platform}; use it there")
    asked = os.environ.get("CXX", "")
    if asked.strip():
        command = shlex.split(asked)
        if shutil.which(command[0]) is None:
            raise AllocatorError(f"CXX={asked}: expected a C++ compiler, found no such command; {INSTALL_ADVICE}")
        return command
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise AllocatorError(f"expected a C++ compiler, found none of {', '.join(COMPILERS)}; {INSTALL_ADVICE}")
    return [found]


def _torch_folder() -> Path:
    folder = Path(torch.__file__).parent
    for part in ("include/c10/core/Allocator.h", "lib/libc10.so"):
        if not (folder / part).exists():
            raise AllocatorError(f"expected {part} in {folder}, found none; install torch from its wheel, which has it")
    return folder


def _compile(command: list[str], torch_folder: Path, file: Path) -> None:
    """Into a neighbour that is moved into place, so that no half-written library is ever loaded."""
    descriptor, scratch = tempfile.mkstemp(suffix=".so", dir=file.parent)
    os.close(descriptor)
    # libc10 is found by its name, since torch has loaded it: the library serves every environment with this torch.
    call = [*command, *FLAGS, *_abi(), f"-I{torch_folder / 'include'}", str(SOURCES / "allocator.cpp")]
    call += [f"-L{torch_folder / 'lib'}", "-lc10", "-pthread", "-o", scratch]
    try:
        done = subprocess.run(call, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise AllocatorError(f"{shlex.join(command)} could not build the allocator: {_condensed(done.stderr)}")
        Path(scratch).chmod(0o700)
        Path(scratch).replace(file)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AllocatorError(f"{shlex.join(command)} could not build the allocator: {_condensed(str(error))}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(scratch).unlink()


def _condensed(output: str) -> str:
    """The first error that a compiler tells of, else the last line, without what is long in it."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    line = (errors or lines[-1:] or ["it says nothing"])[0].replace(f"{SOURCES}{os.sep}", "")
    return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 3]}..."


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process or thread at a time. File systems without locks build twice, and one library wins."""
    import fcntl  # not on every system that can plan

    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
