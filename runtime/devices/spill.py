"""The spill file: the host tier of the CPU device."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from poochplan.errors import SpillError
from poochplan.units import format_bytes

SPILL_DIR_VARIABLE = "POOCH_SPILL_DIR"
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_WRITE_CHUNK_BYTES = 8 << 20


def file_system_type(directory: Path) -> str:
    """Type of the file system ``directory`` lies on, such as ``ext4``; empty where the kernel does not tell."""
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


class SpillFile:
    """A file without a name: created 0600, unlinked at once, so that a crash leaves nothing behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.descriptor, path = tempfile.mkstemp(prefix="poochplan-", suffix=".spill", dir=directory)
        except OSError as error:
            raise SpillError(f"spill directory {directory}: {error.strerror}; name another") from error
        self._close = weakref.finalize(self, os.close, self.descriptor)  # also when an interrupt lets go of it
        Path(path).unlink()
        self.size_bytes = 0

    def write_ahead(self, size_bytes: int, first: int = 0) -> None:
        """Allocates the file up to there and writes it once: the first write of a block costs ten times the later ones.

        What lies before ``first`` is not touched: it may be somebody's.

        Raises
        ------
        OSError
            The disk has not so much room, and nothing is written; or it is full by now, and the file keeps what it got.
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
        """Gives the disk back what lies beyond the first ``size_bytes``, and nothing where it does not take it."""
        with contextlib.suppress(OSError):
            if os.fstat(self.descriptor).st_size > size_bytes:
                os.ftruncate(self.descriptor, size_bytes)
                self.size_bytes = min(self.size_bytes, size_bytes)

    def close(self) -> None:
        """Gives the space back. Idempotent."""
        self.descriptor = -1
        self._close()
