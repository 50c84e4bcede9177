"""Several processes that work in turns, so that a machine whose speed changes is as fast for one as for the others.

Each runs alone for ``TURN_S`` seconds, from the end of one of its steps to the end of another; the others are stopped,
with all of their threads. A turn lasts longer while the process has children at work, such as the planner. The time in
which a process waits is not on its clock: ``Turn`` sets back ``time.perf_counter`` and ``time.monotonic``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TURN_S = 2.0
READ, WRITTEN = "POOCH_TURN_READ", "POOCH_TURN_WRITTEN"


class Turn:
    """In one of the processes, made before anything reads a clock. State: the seconds that it has waited."""

    def __init__(self) -> None:
        self._clock, self._waited_s, self._began_s = time.perf_counter, 0.0, 0.0
        self._read, self._written = (int(os.environ[name]) for name in (READ, WRITTEN))
        for name in ("perf_counter", "monotonic"):
            setattr(time, name, self._less_waiting(getattr(time, name)))

    def _less_waiting(self, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() - self._waited_s

    def wait(self) -> None:
        """Gives the turn away, and returns at the beginning of the next one."""
        since_s = self._clock()
        os.write(self._written, b".")
        os.read(self._read, 1)
        self._began_s = self._clock()
        self._waited_s += self._began_s - since_s

    def step_ended(self) -> None:
        if self._clock() - self._began_s > TURN_S and not _has_work():
            self.wait()


def _has_work() -> bool:
    """Whether a child of this process is at work: a planner or a compiler, not a loader's worker, which is a fork."""
    import psutil

    this = psutil.Process()
    own = this.cmdline()
    for child in this.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if words and words != own and "resource_tracker" not in " ".join(words):
                return True
    return False


class _Process:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        read, self._to = os.pipe()
        self._from, written = os.pipe()
        environment = {**environment, READ: str(read), WRITTEN: str(written)}
        with output.open("wb") as file:
            self._popen = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=file,
                stderr=output.with_suffix(".err").open("wb"),
                pass_fds=(read, written),
                start_new_session=True,
            )
        os.close(read)
        os.close(written)
        self.is_over = False
        self.wait()

    def wait(self) -> None:
        """Until it waits for its next turn, and then stops it; or until it has ended."""
        self.is_over = not os.read(self._from, 1)
        if self.is_over:
            self._popen.wait()
        else:
            os.killpg(self._popen.pid, signal.SIGSTOP)

    def end(self) -> None:
        """Ends it if it still runs."""
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def turn(self) -> None:
        os.killpg(self._popen.pid, signal.SIGCONT)
        os.write(self._to, b".")
        self.wait()


def in_turns(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], outputs: Sequence[Path]
) -> None:
    """Python runs each command in an environment of its own, in turns; what they print is in ``outputs`` and, with the
    suffix ``.err``, beside them. Each calls :meth:`Turn.wait` once before its work.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no stopped process is left behind
    with contextlib.ExitStack() as stack:
        processes = []
        for one in zip(commands, environments, outputs, strict=True):
            processes.append(_Process(*one))
            stack.callback(processes[-1].end)
        while processes:
            for process in processes:
                process.turn()
            processes = [process for process in processes if not process.is_over]
