"""The CPU device: process memory as device, a spill file as host tier, two I/O threads as the two copy streams."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeAlias

import torch

from poochplan.errors import SpillError
from poochplan.tensors.storages import new_storage
from poochplan.units import format_bytes

from .device import Event, Interval, Stream

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 1 << 15
"""Up to this size the calling thread copies at once: waking another one takes longer than such a copy."""
_LOOK_AGAIN_S = 1.0
"""Seconds after which a waiting thread checks again whether the copying thread still lives."""

Transfer = Callable[[memoryview, int], int]
SPILL_DIR_VARIABLE = "POOCH_SPILL_DIR"
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_STDERR = 2
_WRITE_CHUNK_BYTES = 8 << 20


class SpillCopy:
    """One queued copy, and the event of its end. States: queued, running, ended (``error`` is set if it failed).

    It holds the storage until its end, so that a caller that stops waiting does no harm.
    """

    def __init__(self, stream: SpillStream, storage: torch.UntypedStorage, host_offset: int) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.host_offset = host_offset
        self.size_bytes = storage.nbytes()
        self.error: OSError | None = None
        self.began_s = self.ended_s = 0.0
        """Time by ``time.perf_counter``, for a timeline; set once it has ended."""
        self._stream = stream
        self._has_ended = False
        # A plain lock, not an Event: if the garbage collector finds a copy while an Event's own lock is held, it waits
        # for the thread that needs this lock.
        self._running = threading.Lock()
        self._running.acquire()

    def done(self) -> bool:
        return self._has_ended

    def wait(self) -> None:
        """Blocks until it has ended; with an error if its thread has died before.

        It does nothing on a copying thread, where the garbage collector may end a value too: the thread would wait for
        itself.
        """
        if isinstance(threading.current_thread(), _SpillThread):
            return
        while not self._has_ended:
            if not self._stream.is_alive():
                self.fail("the thread that copies has died")
            elif self._running.acquire(timeout=_LOOK_AGAIN_S):
                self._running.release()

    def fail(self, reason: str) -> None:
        """Ends it as failed."""
        self._end(OSError(errno.EIO, reason))

    def run(self, move: Transfer, throttle_bytes_per_s: float | None) -> None:
        """Copies all bytes in chunks, on average no faster than the throttle. Errors go to ``error``."""
        self.began_s = start_s = time.perf_counter()
        error: OSError | None = OSError(errno.EIO, "the copy was broken off")
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
            error = None
        except Exception as raised:
            error = raised if isinstance(raised, OSError) else OSError(errno.EIO, str(raised) or repr(raised))
            error = error.with_traceback(None)  # which would hold the buffer
        finally:  # after anything that was raised, the value must not count as copied
            self._end(error)

    def _end(self, error: OSError | None) -> None:
        if not self._has_ended:
            self.error, self.storage = error, None
            self.ended_s = time.perf_counter()
            self._has_ended = True
            self._running.release()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


class _Done:
    def done(self) -> bool:
        return True


DONE = _Done()


class CallingThread:
    """The compute stream: ops run when they are called, so a wait blocks the caller."""

    def record(self) -> Event:
        return DONE

    def wait(self, event: Event) -> float:
        if event.done():
            return 0.0
        assert isinstance(event, SpillCopy)
        start_s = time.perf_counter()
        event.wait()
        return time.perf_counter() - start_s


class _SpillThread(threading.Thread):
    """A thread that copies."""


Stop: TypeAlias = "weakref.ref[SpillStream]"
"""Ends the thread of a stream."""


class SpillStream:
    """One direction: a queue, and the thread that processes it. Copies wait only for those before them. If there are
    none, a small copy without a throttle needs no thread.

    The thread refers to the queue and not to the stream, so that it ends even if the stream is never closed.
    """

    def __init__(self, name: str, move: Transfer, throttle_bytes_per_s: float | None) -> None:
        self._jobs: queue.SimpleQueue[SpillCopy | Stop] = queue.SimpleQueue()
        self._at_once_bytes = 0 if throttle_bytes_per_s else SMALL_BYTES
        self._last: Event = DONE
        self._closing = threading.Event()
        self._move = _unless(self._closing, move)
        self._stop = weakref.ref(self, self._jobs.put)
        self.thread = _SpillThread(
            target=_serve,
            args=(self._jobs, self._stop, self._move, throttle_bytes_per_s),
            name=f"poochplan-{name}",
            daemon=True,
        )
        self.thread.start()

    def is_alive(self) -> bool:
        """Whether copies still end. When the interpreter exits, daemon threads are frozen and do not end."""
        return self.thread.is_alive() and not sys.is_finalizing()

    def record(self) -> Event:
        return self._last

    def wait(self, event: Event) -> float:
        """Waits only for events of the calling thread, which have always happened."""
        assert event.done()
        return 0.0

    def copy(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        job, is_idle = SpillCopy(self, storage, host_offset), self._last.done()
        self._last = job
        if is_idle and job.size_bytes <= self._at_once_bytes:
            job.run(self._move, None)
        elif self.is_alive():
            self._jobs.put(job)
        else:
            job.fail("the thread that copies has ended")
        return job

    def close(self) -> None:
        """Ends the thread; copies that nothing waited for are cancelled."""
        self._closing.set()
        self._jobs.put(self._stop)
        self._last = DONE  # it knows this stream
        try:
            self._join()
        finally:  # also if that was interrupted: behind a closed file, it would write to the next that is opened
            self._join()

    def _join(self) -> None:
        if self.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()


def _serve(
    jobs: queue.SimpleQueue[SpillCopy | Stop], stop: Stop, move: Transfer, throttle_bytes_per_s: float | None
) -> None:
    """Processes the queue until ``stop`` is in it. ``close`` puts it there. If the stream dies, ``stop`` (a weak
    reference that this function keeps alive) puts itself there.
    """
    while isinstance(job := jobs.get(), SpillCopy):
        job.run(move, throttle_bytes_per_s)
        del job  # otherwise the thread would hold the last copy until the next


def _unless(closing: threading.Event, move: Transfer) -> Transfer:
    def guarded(chunk: memoryview, at: int) -> int:
        if closing.is_set():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        return move(chunk, at)

    return guarded


class ComputesWhenCalled:
    """The part of a device whose ops run when they are called, on one stream, in memory of the C library."""

    kind = "cpu"
    host_tier = "spill"
    where = torch.device("cpu")
    spans = False

    def use(self, storage: torch.UntypedStorage, home: Stream) -> None:
        """Nothing to do: there is one compute stream."""

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stopwatch(self) -> None:
        return None

    def start_peaks(self) -> None:
        """Nothing to do: the C library keeps no peaks."""

    def start_step_peak(self) -> None:
        """Nothing to do."""

    def step_peak_bytes(self) -> int | None:
        return None

    def step_reserved_bytes(self) -> None:
        return None

    def step_retries(self) -> int:
        return 0

    def let_go_of_cache(self) -> None:
        """Nothing to do."""

    def peaks(self) -> None:
        return None


class CpuDevice(ComputesWhenCalled):
    """Keeps one open spill file and two threads from construction to :meth:`close`.

    Parameters
    ----------
    directory: where to spill; see :func:`choose_spill_dir` for the default and the errors.
    throttle_bytes_per_s: limit each direction to this rate, so that the link is a known constant.
    """

    def __init__(self, directory: str | Path | None = None, *, throttle_bytes_per_s: float | None = None) -> None:
        self.compute = CallingThread()
        with contextlib.ExitStack() as stack:  # undone if one of these fails
            self.file = file = SpillFile(choose_spill_dir(directory))
            stack.callback(file.close)
            # pwrite and preadv release the interpreter lock while they move bytes.
            self.outward = SpillStream(
                "out", lambda chunk, at: os.pwrite(file.descriptor, chunk, at), throttle_bytes_per_s
            )
            stack.callback(self.outward.close)
            self.inward = SpillStream(
                "in", lambda chunk, at: os.preadv(file.descriptor, [chunk], at), throttle_bytes_per_s
            )
            stack.callback(self.inward.close)
            self._stack = stack.pop_all()

    def reserve_host(self, size_bytes: int, first: int = 0, *, lasting: bool = False) -> None:
        """Extends the file, and writes every block from ``first`` on once. Raises ``OSError`` if the disk is full.

        What lasts is mapped (:meth:`host_view`), where a write to a block that a full disk does not have ends the
        process. So it gets all of its blocks here, also those that are part of a hole.
        """
        self.file.write_ahead(first + size_bytes, first)
        if lasting:
            os.posix_fallocate(self.file.descriptor, first, size_bytes)

    def host_view(self, size_bytes: int, first: int) -> torch.Tensor:
        """A shared mapping of the file: the system keeps both alike, and the file alive."""
        return torch.frombuffer(mmap.mmap(self.file.descriptor, size_bytes, offset=first), dtype=torch.uint8)

    def trim_host(self, taken: Sequence[Interval]) -> None:
        """Cuts the file after the last of them; it has no holes that could be released."""
        self.file.cut(max((behind for _, behind in taken), default=0))

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        return new_storage(size_bytes, self.where)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self.outward.copy(storage, host_offset)

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self.inward.copy(storage, host_offset)

    def read(self, storage: torch.UntypedStorage, host_offset: int) -> None:
        buffer, at = _bytes_of(storage), 0
        while at < len(buffer):
            count = os.preadv(self.file.descriptor, [buffer[at : at + CHUNK_BYTES]], host_offset + at)
            if count == 0:
                raise OSError(errno.EIO, "the spill file ended early")
            at += count

    def synchronize(self) -> None:
        for stream in (self.outward, self.inward):
            self.compute.wait(stream.record())

    def close(self) -> None:
        self._stack.close()


def file_system_type(directory: Path) -> str:
    """Type of the file system of ``directory``, such as ``ext4``; empty if the kernel does not report it."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                found = fields[fields.index("-") + 1]
    return found


def choose_spill_dir(directory: str | Path | None = None) -> Path:
    """The directory to spill to: the one given, ``$POOCH_SPILL_DIR``, or the first of /var/tmp, the temporary
    directory and the working directory that is on a disk.

    Raises
    ------
    SpillError
        It does not exist, cannot be written, or is a tmpfs: spilling to memory saves none.
    """
    asked = directory or os.environ.get(SPILL_DIR_VARIABLE)
    if asked:
        chosen = Path(asked)
        if not chosen.is_dir():
            raise SpillError(f"spill directory {chosen}: expected a folder, found none; create it or name another")
        kind = file_system_type(chosen)
        if kind in _MEMORY_FILE_SYSTEMS:
            raise SpillError(
                f"spill directory {chosen} is a {kind}: spilling to memory saves none; name a folder on a disk"
            )
        if not os.access(chosen, os.W_OK | os.X_OK):
            raise SpillError(f"spill directory {chosen} cannot be written; name another")
        return chosen
    for candidate in (Path("/var/tmp"), Path(tempfile.gettempdir()), Path.cwd()):
        if (
            candidate.is_dir()
            and os.access(candidate, os.W_OK | os.X_OK)
            and file_system_type(candidate) not in _MEMORY_FILE_SYSTEMS
        ):
            return candidate
    raise SpillError(f"no spill directory on a disk was found; name one with --spill-dir or {SPILL_DIR_VARIABLE}")


def _not_standard(file: IO[bytes]) -> IO[bytes]:
    """The file by a descriptor above those of stdin, stdout and stderr. If a daemon has closed these, any file may get
    their numbers, and whatever C libraries print would be written into it.
    """
    if file.fileno() > _STDERR:
        return file
    import fcntl  # not on every system that can plan

    with file:
        return os.fdopen(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, _STDERR + 1), "r+b", buffering=0)


class SpillFile:
    """A file without a name, which nobody else may read (0600): a crash leaves nothing behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._file = _not_standard(tempfile.TemporaryFile(buffering=0, dir=directory))  # noqa: SIM115
        except OSError as error:
            raise SpillError(f"spill directory {directory}: {error.strerror}; name another") from error
        self.descriptor = self._file.fileno()
        self.size_bytes = 0

    def write_ahead(self, size_bytes: int, first: int = 0) -> None:
        """Allocates the file up to there and writes it once: the first write of a block costs ten times the later ones.

        Bytes before ``first`` are not touched: a value may lie there.

        Raises
        ------
        OSError
            The disk has too little room, and nothing is written; or it has become full, and the file keeps what it got.
        """
        self.size_bytes = max(self.size_bytes, first)
        free_bytes = shutil.disk_usage(self.directory).free
        if size_bytes - self.size_bytes > free_bytes:
            raise OSError(errno.ENOSPC, f"No space left on device: {format_bytes(free_bytes)} in {self.directory}")
        zeros = memoryview(bytes(min(size_bytes, _WRITE_CHUNK_BYTES)))
        while self.size_bytes < size_bytes:
            wanted = min(len(zeros), size_bytes - self.size_bytes)
            self.size_bytes += os.pwrite(self.descriptor, zeros[:wanted], self.size_bytes)

    def cut(self, size_bytes: int) -> None:
        """Releases the disk space after the first ``size_bytes``, if the file system allows it."""
        with contextlib.suppress(OSError):
            if os.fstat(self.descriptor).st_size > size_bytes:
                os.ftruncate(self.descriptor, size_bytes)
                self.size_bytes = min(self.size_bytes, size_bytes)

    def close(self) -> None:
        """Releases the space. Idempotent."""
        self.descriptor = -1
        self._file.close()
