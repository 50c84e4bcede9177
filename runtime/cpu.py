"""The CPU device: process memory as device, a spill file as host tier, two I/O threads as the two copy streams."""

from __future__ import annotations

import contextlib
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
from .device import Event, Stream
from .spill import SpillFile, choose_spill_dir

CHUNK_BYTES = 1 << 20
_LOOK_AGAIN_S = 1.0
"""How often one who waits looks whether the thread still lives."""

Move = Callable[[memoryview, int], int]


class SpillCopy:
    """One queued copy, and the event of its end. States: queued, running, ended (``error`` tells whether well)."""

    def __init__(self, thread: threading.Thread, storage: torch.UntypedStorage, host_offset: int) -> None:
        self.storage: torch.UntypedStorage | None = storage  # a running copy's memory must not go
        self.host_offset = host_offset
        self.size_bytes = storage.nbytes()
        self.error: OSError | None = None
        self._thread = thread
        self._ended = threading.Event()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Blocks until it has ended; with an error when its thread has died before."""
        while not self._ended.wait(_LOOK_AGAIN_S):
            if not self._thread.is_alive() and not self._ended.is_set():
                self.fail(OSError(errno.EIO, "the thread that copies has died"))

    def fail(self, error: OSError) -> None:
        """Ends it without success."""
        self.error, self.storage = error, None
        self._ended.set()

    def run(self, move: Move, throttle_bytes_per_s: float | None) -> None:
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


class _Done:
    def done(self) -> bool:
        return True


DONE = _Done()


class CallingThread:
    """The compute stream: ops run as they are called, so that a wait blocks the caller."""

    def record(self) -> Event:
        return DONE

    def wait(self, event: Event) -> float:
        if event.done():
            return 0.0
        assert isinstance(event, SpillCopy)
        start_s = time.perf_counter()
        event.wait()
        return time.perf_counter() - start_s


class SpillStream:
    """One direction: a queue, and the thread that works it off. Copies wait for nothing but those before them."""

    def __init__(self, name: str, move: Move, throttle_bytes_per_s: float | None) -> None:
        self._move = move
        self._throttle_bytes_per_s = throttle_bytes_per_s
        self._jobs: queue.SimpleQueue[SpillCopy | None] = queue.SimpleQueue()
        self._last: Event = DONE
        self.thread = threading.Thread(target=self._serve, name=f"poochplan-{name}", daemon=True)
        self.thread.start()

    def record(self) -> Event:
        return self._last

    def wait(self, event: Event) -> float:
        """Of the calling thread's events only, which have always come."""
        assert event.done()
        return 0.0

    def copy(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        job = SpillCopy(self.thread, storage, host_offset)
        self._last = job
        if self.thread.is_alive():
            self._jobs.put(job)
        else:
            job.fail(OSError(errno.EIO, "the thread that copies has ended"))
        return job

    def close(self) -> None:
        if self.thread.is_alive():
            self._jobs.put(None)
            self.thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self._move, self._throttle_bytes_per_s)
            del job  # or the thread would hold the last copy until the next


class CpuDevice:
    """Keeps one open spill file and two threads from construction to :meth:`close`.

    Parameters
    ----------
    directory: where to spill; see :func:`poochplan.runtime.spill.choose_spill_dir` for the default and the errors.
    throttle_bytes_per_s: hold each direction to this rate, so that the link is a known constant.
    """

    kind = "cpu"
    where = torch.device("cpu")

    def __init__(self, directory: str | Path | None = None, *, throttle_bytes_per_s: float | None = None) -> None:
        give_freed_memory_back()
        self.file = SpillFile(choose_spill_dir(directory))
        self.compute = CallingThread()
        descriptor = self.file.descriptor
        # pwrite and preadv release the interpreter lock while they move bytes.
        self.outward = SpillStream("out", lambda chunk, at: os.pwrite(descriptor, chunk, at), throttle_bytes_per_s)
        self.inward = SpillStream("in", lambda chunk, at: os.preadv(descriptor, [chunk], at), throttle_bytes_per_s)

    def reserve_host(self, size_bytes: int) -> None:
        """Makes the file ``size_bytes`` long, every block written once; raises ``OSError`` when the disk is full."""
        self.file.write_ahead(size_bytes)

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self.outward.copy(storage, host_offset)

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self.inward.copy(storage, host_offset)

    def use(self, storage: torch.UntypedStorage, home: Stream) -> None:
        """Nothing to do: there is one compute stream."""

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        for stream in (self.outward, self.inward):
            self.compute.wait(stream.record())

    def start_peaks(self) -> None:
        """Nothing to do: the C library keeps no peaks."""

    def peaks(self) -> None:
        return None

    def close(self) -> None:
        self.outward.close()
        self.inward.close()
        self.file.close()
