"""The kernels for bits of masks on the processor: their source compiled as C++, and CuPy's way to launch them.

So their arithmetic is that of the source. What a GPU's compiler and threads make of it cannot be seen here.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poochplan.runtime.replays.bits import SOURCE
from tests.allocated_bytes import compiler

if TYPE_CHECKING:
    from .machine import Machine

SHIM = Path(__file__).with_suffix(".cpp")


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled source, once for each process."""
    found = compiler()
    if found is None:
        raise RuntimeError("expected a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.so"
        options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f'-DBITS_CU="{SOURCE}"']
        subprocess.run([found, *options, str(SHIM), "-o", str(file)], check=True)
        return ctypes.CDLL(str(file))


def run(name: str, blocks: int, threads: int, given: tuple[int, int, int, int]) -> None:
    """Runs all threads of a kernel, one after another."""
    source, count, into, table = given
    address = ctypes.c_void_p
    library().launch(
        getattr(library(), name),
        blocks,
        threads,
        address(source),
        ctypes.c_longlong(count),
        address(into),
        address(table),
    )


def raw_module(gpu: Machine) -> type:
    """CuPy's ``RawModule``. A launch is work of the stream that it names, which reads and writes what it is given."""

    class RawModule:
        def __init__(self, *, code: str) -> None:
            assert code == SOURCE.read_text()

        def get_function(self, name: str) -> Callable[..., None]:
            assert hasattr(library(), name)
            gpu.is_asked(None, f"{name} was compiled for the current GPU")
            return functools.partial(launch, name)

    def launch(name: str, grid: Sequence[int], block: Sequence[int], given: Any, *, stream: Any) -> None:
        gpu.is_asked(None, f"{name} was launched on the current GPU")
        gpu.counts[name] += 1
        queue = next(one for one in gpu.host.streams if one.number == stream.ptr)
        source, count, into, table = given
        work, what = queue.begins(), f"{name} on stream {queue.number}"
        for address in (source, table, into):
            gpu.access(queue, work, address, what, writes=address == into)
        queue.catch_up()
        run(name, *grid, *block, given)
        queue.op_runs(count)

    return RawModule
