"""Processes that take turns: one step each on demand, and asleep while the other steps."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import msgspec

from benchmarks.pairs import Seconds

from .asking import Ask

PYTHON = [sys.executable]
"""How commands of these processes begin."""
ASLEEP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads that have nothing to do wait without taking a core, in every process alike."""
ALLOCATOR = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Beginnings of variables that set the C library's allocator; no process has them."""


class RefusedError(Exception):
    """A process said that it cannot do what it was asked, or ended without saying anything; why, in one line."""


def environment(threads: int) -> dict[str, str]:
    """Of every process of the comparison."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATOR)}
    return kept | ASLEEP | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


class Partner:
    """State: a process that answers, a line for each that it is sent."""

    def __init__(self, ask: Ask, threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        command = [*PYTHON, "-W", "ignore", "-m", "benchmarks.against.worker", msgspec.json.encode(ask).decode()]
        self._process = subprocess.Popen(
            command,
            env=environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def answer(self) -> dict[str, Any]:
        """The next one; waits for it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RefusedError(f"the process ended with {self._process.wait()}: {self._last_words()}")
        found: dict[str, Any] = msgspec.json.decode(line)
        if "refused" in found:
            raise RefusedError(found["refused"])
        return found

    def step(self) -> Seconds:
        """Seconds of one step, on the wall and of the processor."""
        found = self._sent("step")
        return found["wall_s"], found["cpu_s"]

    def end(self) -> dict[str, Any]:
        """What it tells of all its steps."""
        return self._sent("end")

    def _sent(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        return self.answer()

    def _last_words(self) -> str:
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        return words[-1][:300] if words else "nothing was said"


def asked(ask: Ask, threads: int) -> dict[str, Any]:
    """The one answer of a process that ends with it."""
    with Partner(ask, threads) as partner:
        return partner.answer()
