"""Background: planning in a process of its own, one at a time, and what came of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from poochplan.errors import PoochError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile

END_S = 5.0
"""A process that was asked to end is killed after this."""


class Background:
    """One plan, wanted and then under way (:meth:`start`). Ended, at the latest, by :meth:`close`."""

    def __init__(
        self,
        profile: Profile,
        budget_bytes: int,
        time_limit_s: float,
        arena: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        self.budget_bytes = budget_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="poochplan-")
        folder = Path(self._folder.name)
        self._plan = folder / "plan.json"
        self._told = folder / "messages"
        profile.save(folder / "profile.json")
        self._words = [str(folder / "profile.json"), "--budget", str(budget_bytes), "-o", str(self._plan)]
        self._words += ["--threads", "1", "--time-limit", str(time_limit_s), "--arena", arena]

    def start(self) -> None:
        """Planning begins. Idempotent."""
        if self._process is not None:
            return
        with self._told.open("wb") as told:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "poochplan.online.plans.planning_process", *self._words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def is_done(self, wait_s: float | None = 0.0) -> bool:
        """Whether it has been started and has ended, after at most ``wait_s`` (None: however long that takes)."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        return self._process.returncode is not None

    def plan(self) -> Plan:
        """The plan, of one that is done. Raises ``PoochError`` with what it said where there is none."""
        if self._plan.exists():
            return Plan.load(self._plan)
        assert self._process is not None
        said = self._told.read_text(errors="replace").strip().splitlines()
        why = said[-1].removeprefix("pooch: error: ") if said else f"exit code {self._process.returncode}"
        raise PoochError(f"planning ended without a plan: {why}")

    def close(self) -> None:
        """Ends the process if it still runs, and removes its files. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()


class Plannings(dict[Any, Background]):
    """Plans that are wanted, by what for; they are made one at a time, for the loop needs the processors too."""

    def __setitem__(self, key: Any, planning: Background) -> None:
        replaced = self.get(key)
        if replaced is not None:
            replaced.close()
        super().__setitem__(key, planning)
        self._start_the_first()

    def take_done(self) -> list[tuple[Any, Background]]:
        """Those that are done, which are no more in here; the next one begins."""
        done = [(key, planning) for key, planning in self.items() if planning.is_done()]
        for key, _ in done:
            del self[key]
        self._start_the_first()
        return done

    def wait(self, wait_s: float | None) -> None:
        """For the first of them."""
        next(iter(self.values())).is_done(wait_s)

    def close(self) -> None:
        """Ends them all."""
        for planning in self.values():
            planning.close()
        self.clear()

    def _start_the_first(self) -> None:
        for planning in self.values():
            planning.start()
            return
