"""Builds a compiled part on first use, once for each version of its sources, into a folder of the user.

Wheels stay pure: the C++ is package data. Building needs a compiler. Without one everything else works, and
:meth:`NativeBuild.why_unavailable` says what to install. Why a build failed is stored beside the library's place, for
reports alone: the next process tries again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from poochplan.formats.files import cache_folder, write_cache

from .errors import NativeError

COMPILERS = "c++", "g++", "clang++"
FLAGS = "-O2", "-shared", "-fPIC", "-fvisibility=hidden"
INSTALL_ADVICE = "install g++ or clang++ (apt install g++, dnf install gcc-c++), or set CXX"
OTHER_COMPILER = "set CXX to another compiler, and try it with pooch doctor --build"
TIMEOUT_S = 300
_DIGEST_BYTES = hashlib.sha256().digest_size
_MOST_LETTERS = 200
"""Of what a compiler says, in one line."""
Signatures = Mapping[str, tuple[Any, tuple[Any, ...]]]
"""Result and arguments of each function of a library, as ``ctypes`` has them."""


class NativeBuild:
    """One library. ``name``.cpp in ``sources`` is compiled, and compiled again if that folder's content changes.
    ``without`` says what its absence costs. State: whether the user has been told of its absence.
    """

    timeout_s = TIMEOUT_S

    def __init__(self, name: str, sources: Path, flags: Sequence[str], without: str = "") -> None:
        self.name, self.sources, self.flags, self.without = name, sources, (*flags, *FLAGS), without
        self._is_told = False

    def facts(self) -> tuple[str, ...]:
        """Facts that the library depends on besides sources, flags and processor. The first begins the folder name."""
        return (self.name,)

    def options(self) -> list[str]:
        """Further options of the compiler; raises ``NativeError`` if something is missing."""
        return []

    def file(self) -> Path:
        """The path of the library: ``native/<key>/<name>.so`` in the user's cache folder."""
        return cache_folder() / "native" / self._key() / f"{self.name}.so"

    def is_built(self) -> bool:
        """Whether the library for this source exists and may be loaded. Builds nothing."""
        try:
            return _is_there(self.file())
        except (NativeError, OSError):
            return False

    def why_unavailable(self) -> str:
        """Why the library does not exist and cannot be built, and what to do, in one line; empty otherwise.

        Builds nothing, so only :meth:`build` shows whether the compiler fails.
        """
        try:
            if self.is_built():
                return ""
            self._compiler()
            self.options()
            check_makeable(self.file().parent)
        except (NativeError, OSError) as error:
            return str(error)
        return ""

    def last_failure(self) -> str:
        """Why the last build of these sources with the present compiler failed, in one line; empty if none has."""
        with contextlib.suppress(NativeError, OSError):
            compiler, _, said = self._failure_file().read_text(encoding="utf-8").partition("\n")
            if compiler == self._compiler_identity() and not self.is_built():
                return said
        return ""

    def untold(self, why: str) -> str:
        """One line for the user: ``why`` there is no library, what that costs, and what to do. Empty if there is no
        reason, and after the first such line.
        """
        if not why or self._is_told:
            return ""
        self._is_told = True
        found, advice = self.reason_and_advice(why)
        return f"{found}; without it {self.without}; {advice}"

    @staticmethod
    def reason_and_advice(why: str) -> tuple[str, str]:
        found, _, advice = why.partition("; ")
        return found, advice or OTHER_COMPILER

    def compiler_name(self) -> str:
        """The command that would build the library; empty if there is none."""
        try:
            return shlex.join(self._compiler())
        except NativeError:
            return ""

    def build(self) -> Path:
        """The library, which is built in a few seconds if it does not exist or is damaged. Two processes may call it
        at once.

        Raises ``NativeError`` if it cannot be built here, or if others can write to its folder.
        """
        file = self.file()
        if _is_there(file):
            return file
        command = [*self._compiler(), *self.flags, str(self.sources / f"{self.name}.cpp"), *self.options()]
        make_folder(file.parent)
        with _locked(file.parent):
            if not _is_there(file):  # no other process has built it meanwhile
                self._compile(command, file)
        _check(file)
        return file

    def load(self, loader: Callable[[str], Any], signatures: Signatures) -> dict[str, Any]:
        """The functions of the library by their names, which there begin with ``pooch_``. It is built if necessary.

        Raises the errors of :meth:`build`, and ``NativeError`` if ``loader`` cannot load it.
        """
        file = self.build()
        try:
            loaded = loader(str(file))
            found = {name: getattr(loaded, f"pooch_{name}") for name in signatures}
        except (OSError, AttributeError) as error:
            remedy = "remove it, and it is built anew"
            if is_noexec(file):
                remedy = "set XDG_CACHE_HOME to a folder whose file system is not mounted noexec"
            raise NativeError(f"{file}: cannot be loaded ({' '.join(str(error).split())}); {remedy}") from None
        for name, (result, arguments) in signatures.items():
            found[name].restype, found[name].argtypes = result, arguments
        return found

    def _key(self) -> str:
        digest = hashlib.sha256()
        for source in sorted(self.sources.iterdir()):
            digest.update(f"{source.name}\n".encode() + source.read_bytes())
        digest.update("\n".join((*self.facts(), platform.machine(), *self.flags)).encode())
        return f"{self.facts()[0]}-{digest.hexdigest()[:16]}"

    def _compiler(self) -> list[str]:
        if sys.platform == "win32":
            raise NativeError(f"expected Linux or macOS for the compiled {self.name}, found {sys.platform}")
        asked = os.environ.get("CXX", "")
        if asked.strip():
            command = shlex.split(asked)
            if shutil.which(command[0]) is None:
                raise NativeError(f"CXX={asked}: expected a C++ compiler, found no such command; {INSTALL_ADVICE}")
            return command
        found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
        if found is None:
            raise NativeError(f"expected a C++ compiler, found none of {', '.join(COMPILERS)}; {INSTALL_ADVICE}")
        return [found]

    def _failure_file(self) -> Path:
        return self.file().with_suffix(".failed")

    def _compiler_identity(self) -> str:
        """Changes with the command, and with the compiler behind its name."""
        command = self._compiler()
        found = Path(shutil.which(command[0]) or command[0]).resolve()
        return f"{shlex.join(command)} {found} {found.stat().st_size} {found.stat().st_mtime_ns}"

    def _compile(self, command: list[str], file: Path) -> None:
        """Compiles to a temporary file that is then moved, so that no incomplete library is ever loaded. Why that fails
        is stored.
        """
        try:
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                scratch = Path(folder) / file.name
                done = subprocess.run(
                    [*command, "-o", str(scratch)],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=self.timeout_s,
                    check=False,
                    start_new_session=True,  # the compiler ignores Ctrl-C
                )
                if done.returncode == 0:
                    with scratch.open("ab") as library:
                        library.write(hashlib.sha256(scratch.read_bytes()).digest())  # loaders ignore what comes last
                    scratch.chmod(0o700)
                    scratch.replace(file)
                    self._failure_file().unlink(missing_ok=True)
                    return
            said = done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        failure = f"{shlex.join(self._compiler())} could not build the {self.name}: {self._condensed(said)}"
        write_cache(self._failure_file(), f"{self._compiler_identity()}\n{failure}".encode())
        raise NativeError(failure)

    def _condensed(self, output: str) -> str:
        """The first error in a compiler's output, else its last line, shortened."""
        lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        line = (errors or lines[-1:] or ["it says nothing"])[0].replace(f"{self.sources}{os.sep}", "")
        line = line.replace("; ", ", ")  # which divides our own messages
        return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 3]}..."


def run_beside(module: str) -> None:
    """Runs a module in another Python, which goes on when this one ends."""
    none = subprocess.DEVNULL
    command = [sys.executable, "-P", "-m", module]
    subprocess.run(command, stdin=none, stdout=none, stderr=none, check=False, start_new_session=True)


def _is_there(file: Path) -> bool:
    """Whether a library is there and whole: to load one that is cut short may end the process.

    Raises ``NativeError`` if other users can write to it.
    """
    if not file.exists():
        return False
    _check(file)
    data = file.read_bytes()
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _check(file: Path) -> None:
    check_folder(file.parent)
    _check_path(file, {os.geteuid()}, "file")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A block for one process or thread at a time. Without file locks both build, and one library remains."""
    import fcntl  # not on every system that can plan

    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NativeError(f"{folder}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to another") from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_noexec(path: Path) -> bool:
    """Whether programs and libraries cannot be loaded from there, or from where it would be made."""
    there = next(one for one in (path, *path.parents) if one.exists())
    flag = getattr(os, "ST_NOEXEC", 0)  # not on every system that can plan
    return bool(flag and os.statvfs(there).f_flag & flag)


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and its parent for this user alone (mode 0700), and checks both.

    Raises ``NativeError`` if that fails, or if other users have access to what exists.
    """
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unmakeable(folder, error.strerror or str(error)) from None
    check_makeable(folder)


def check_makeable(folder: Path) -> None:
    """Checks that ``folder`` is this user's alone, or can be made. Makes nothing.

    Raises the errors of :func:`check_folder`, and ``NativeError`` if it cannot be written or made.
    """
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if there == folder:
        check_folder(folder)
    if not there.is_dir():
        raise _unmakeable(folder, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unmakeable(folder, os.strerror(errno.EACCES))


def _unmakeable(folder: Path, why: str) -> NativeError:
    return NativeError(f"{folder}: cannot be made or written ({why}); set XDG_CACHE_HOME to a folder you own")


def check_folder(folder: Path) -> None:
    """Checks that ``folder`` and its parent are this user's alone, and that no other user can replace them.

    Raises ``NativeError`` for another owner, a mode that lets others write, or something that is no folder.
    """
    for one in (folder, folder.parent):
        _check_path(one, {os.geteuid()}, "folder")
    # The owner of the root can change anything; in a user namespace that is not number 0.
    trusted = {os.geteuid(), 0, Path("/").lstat().st_uid}
    for above in folder.parent.resolve().parents:
        _check_path(above, trusted)


def _check_path(path: Path, owners: set[int], kind: str = "") -> None:
    """Raises ``NativeError`` for another owner or kind, or a mode that lets others write. Without ``kind`` it is a
    folder above: there a group may write, with only this user in it, since many systems make such home folders.
    """
    try:
        found = path.lstat()
    except OSError as error:
        raise NativeError(
            f"{path}: cannot be looked at ({error.strerror}); set XDG_CACHE_HOME to another folder"
        ) from None
    mode = stat.S_IMODE(found.st_mode)
    if kind and not {"file": stat.S_ISREG, "folder": stat.S_ISDIR}[kind](found.st_mode):
        raise NativeError(f"{path}: expected a {kind}, found something else; remove it")
    if found.st_uid not in owners:
        raise NativeError(
            f"{path}: expected to be owned by user {os.geteuid()}, found user {found.st_uid}; "
            "set XDG_CACHE_HOME to a folder you own"
        )
    others, remedy = (stat.S_IWGRP | stat.S_IWOTH, "go-w") if kind else (stat.S_IWOTH, "o-w")
    is_shared = not kind and mode & stat.S_ISVTX  # as /tmp is
    if mode & others and not is_shared:
        raise NativeError(f"{path}: expected that nobody else can write there, found mode {mode:o}; chmod {remedy} it")
