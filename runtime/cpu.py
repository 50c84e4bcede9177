"""The CPU device: process memory as device, a spill file as host tier, two I/O threads as the two copy streams."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .allocator import give_freed_memory_back
from .spill import SpillFile, choose_spill_dir

CHUNK_BYTES = 1 << 20


class SpillCopy:
    """One queued copy. States: queued, running, ended (``error`` tells whether well)."""

    def __init__(self, storage: torch.UntypedStorage, host_offset: int) -> None:
        self.storage: torch.UntypedStorage | None = storage  # held until the copy has ended (engine rule 3)
        self.host_offset = host_offset
        self.size_bytes = storage.nbytes()
        self.error: OSError | None = None
        self._ended = threading.Event()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> float:
        if self._ended.is_set():
            return 0.0
        start_s = time.perf_counter()
        self._ended.wait()
        return time.perf_counter() - start_s

    def run(self, move: Callable[[memoryview, int], int], throttle_bytes_per_s: float | None) -> None:
        """Moves all bytes in chunks, no faster than the throttle on average; never raises."""
        start_s = time.perf_counter()
        try:
            assert self.storage is not None
            buffer = _bytes_of(self.storage)
            moved = 0
            while moved < self.size_bytes:
                count = move(buffer[moved : moved + CHUNK_BYTES], self.host_offset + moved)
                if count == 0:
                    raise OSError(errno.EIO, "the spill file ended early")
                moved += count
                if throttle_bytes_per_s:
                    ahead_s = moved / throttle_bytes_per_s - (time.perf_counter() - start_s)
                    if ahead_s > 0:
                        time.sleep(ahead_s)
        except BaseException as error:  # whatever it was, the value must not pass for copied
            self.error = error if isinstance(error, OSError) else OSError(errno.EIO, str(error) or repr(error))
        finally:
            self.storage = None
            self._ended.set()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


class CpuDevice:
    """Keeps one open spill file and two threads from construction to :meth:`close`.

    Parameters
    ----------
    directory: where to spill; see :func:`poochplan.runtime.spill.choose_spill_dir` for the default and the errors.
    throttle_bytes_per_s: hold each direction to this rate, so that the link is a known constant.
    """

    kind = "cpu"

    def __init__(self, directory: str | Path | None = None, *, throttle_bytes_per_s: float | None = None) -> None:
        give_freed_memory_back()
        self.file = SpillFile(choose_spill_dir(directory))
        self.throttle_bytes_per_s = throttle_bytes_per_s
        self._queues: list[queue.SimpleQueue[SpillCopy | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        descriptor = self.file.descriptor
        # pwrite and preadv release the interpreter lock while they move bytes.
        moves: list[Callable[[memoryview, int], int]] = [
            lambda chunk, offset: os.pwrite(descriptor, chunk, offset),
            lambda chunk, offset: os.preadv(descriptor, [chunk], offset),
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs, move), name=f"poochplan-{name}", daemon=True)
            for jobs, move, name in zip(self._queues, moves, ("out", "in"), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def write_ahead(self, size_bytes: int) -> None:
        """Makes the file ``size_bytes`` long, every block written once; raises ``OSError`` when the disk is full."""
        self.file.write_ahead(size_bytes)

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self._enqueue(0, SpillCopy(storage, host_offset))

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self._enqueue(1, SpillCopy(storage, host_offset))

    def close(self) -> None:
        for jobs, thread in zip(self._queues, self._threads, strict=True):
            if thread.is_alive():
                jobs.put(None)
                thread.join()
        self.file.close()

    def _enqueue(self, direction: int, copy: SpillCopy) -> SpillCopy:
        if not self._threads[direction].is_alive():
            raise RuntimeError("the session's spill threads have ended; a value was needed after the session closed")
        self._queues[direction].put(copy)
        return copy

    def _serve(self, jobs: queue.SimpleQueue[SpillCopy | None], move: Callable[[memoryview, int], int]) -> None:
        while (copy := jobs.get()) is not None:
            copy.run(move, self.throttle_bytes_per_s)
            del copy  # or the thread would hold the last storage until the next job
