"""A meter of allocated bytes that shares no code with the package: a hook around torch's own CPU allocator.

It has to be there before the package's allocator, which then asks it for all that lies in no arena; an arena's memory
is added whole. It counts what every thread allocates, within ops too, and what was made before it not at all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parent / "allocator_hook.cpp"
BUILT = Path(__file__).parents[1] / ".pytest_cache" / "built"


class AllocatedBytes:
    """Bytes of all blocks of 64 bytes or more that torch has allocated on the CPU since :func:`allocated_bytes`;
    those of smaller ones, which no budget counts, are told of apart.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("hook_live", "hook_peak", "hook_small_peak"):
            getattr(library, name).restype = ctypes.c_long
        library.hook_install()

    @property
    def live(self) -> int:
        return int(self._library.hook_live())

    @property
    def peak(self) -> int:
        """Since the last :meth:`restart`."""
        return int(self._library.hook_peak())

    @property
    def small_peak(self) -> int:
        """As :attr:`peak`, of the blocks of less than 64 bytes."""
        return int(self._library.hook_small_peak())

    def restart(self) -> None:
        self._library.hook_restart()


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which("c++") or shutil.which("g++")


@functools.cache
def allocated_bytes() -> AllocatedBytes:
    """The meter of this process; to be called before anything is allocated that it is to know of."""
    torch_folder = Path(torch.__file__).parent
    made_of = f"{torch.__version__} {torch_folder} {SOURCE.read_text()}"
    library = BUILT / f"allocator_hook-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        build(library, torch_folder)
    return AllocatedBytes(ctypes.CDLL(str(library)))


def build(library: Path, torch_folder: Path) -> None:
    """Compiles it once for all processes, some of which may begin to at the same time."""
    found, lib = compiler(), torch_folder / "lib"
    if found is None:
        pytest.skip("there is no C++ compiler", allow_module_level=True)
    BUILT.mkdir(parents=True, exist_ok=True)
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-isystem", str(torch_folder / "include")]
    linked = [f"-L{lib}", "-lc10", f"-Wl,-rpath,{lib}"]
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        made = Path(folder) / library.name
        subprocess.run([found, *options, str(SOURCE), "-o", str(made), *linked], check=True)
        made.replace(library)
