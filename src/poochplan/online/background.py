"""Work in the background of a loop: plans, one at a time, by another process, and the allocator's build by a thread."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

from poochplan.errors import NativeError, PoochError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.profiler.trials.machine_facts import completed, is_complete, on_worker_thread
from poochplan.runtime.arena.library import build, is_built, is_loaded, untold_absence, why_not_loaded
from poochplan.runtime.arena.step_arena import ArenaMode, why_no_arena
from poochplan.runtime.messages import Messages

from .auto_messages import BUILDING
from .before_plan import PauseBudget, has_no_processor_to_spare
from .planning_process import PlanRequest

END_S = 5.0
"""A process that was asked to end is killed after this."""
MEASURING_S = 0.5
"""Seconds of pause that a loop must have earned before it pauses for the measurements of the machine."""
LONG_S = 10.0
"""A loop that has run for so long pauses for them in any case: later they would take as long, and the plan waits."""


class BackgroundPlan:
    """One plan: first requested, then being made (:meth:`start`). :meth:`close` ends it at the latest.

    The process measures facts of the machine that the profile lacks, unless :meth:`measure` has done so before;
    :meth:`profile` includes them.
    """

    def __init__(self, profile: Profile, request: PlanRequest) -> None:
        self.lacks_facts = not is_complete(profile)
        """Whether some facts of the machine are still to be measured."""
        self._profile = profile
        self._request = msgspec.structs.replace(request, is_complete=not self.lacks_facts)
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = ""
        """Why no process could be started."""
        self._folder = tempfile.TemporaryDirectory(prefix="poochplan-")
        self._at = Path(self._folder.name)
        profile.save(self._at / "profile.json")

    def measure(self, _: float) -> None:
        """Measures in this process what the profile lacks, however long it takes: that is less than a process takes to
        start. A measurement that fails is left to the planning process, which reports why.
        """
        self.lacks_facts = False
        with contextlib.suppress(PoochError, OSError):
            profile = on_worker_thread(lambda: completed(self._profile, self._request.spill_dir))
            profile.save(self._at / "profile.json", force=True)
            self._request = msgspec.structs.replace(self._request, is_complete=True)

    def start(self) -> None:
        """Starts planning. Idempotent."""
        if self._process is not None or self._failed:
            return
        try:
            (self._at / "request.json").write_bytes(msgspec.json.encode(self._request))
            with (self._at / "messages").open("wb") as told:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "poochplan.online.planning_process", str(self._at), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=told,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C is for the loop
                )
        except OSError as error:  # too many processes, or no room for files
            self._failed = f"planning could not begin ({error.strerror})"

    def is_done(self, wait_s: float | None = 0.0) -> bool:
        """Whether planning was started and has ended, after waiting at most ``wait_s`` (None: without limit)."""
        if self._process is None:
            return bool(self._failed)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        return self._process.returncode is not None

    def profile(self) -> Profile:
        """The profile, once planning is done."""
        return Profile.load(self._at / "profile.json")

    def plan(self) -> Plan:
        """The plan, once planning is done. Raises ``PoochError`` with the process's message if there is none."""
        if (self._at / "plan.json").exists():
            return Plan.load(self._at / "plan.json")
        if self._process is None:
            raise PoochError(self._failed)
        said = (self._at / "messages").read_text(errors="replace").strip().splitlines()
        ended = f"exit code {self._process.returncode} (below 0: it was killed, mostly because memory was short)"
        why = said[-1] if said else ended
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


class PlanQueue(dict[Any, BackgroundPlan]):
    """Requested plans, by what they are for. They are made one at a time, because the loop needs the processors too."""

    def __init__(self, pauses: PauseBudget, *, measures_here: bool) -> None:
        super().__init__()
        self._pauses, self._measures_here = pauses, measures_here

    def __setitem__(self, key: Any, planning: BackgroundPlan) -> None:
        replaced = self.get(key)
        if replaced is not None:
            replaced.close()
        super().__setitem__(key, planning)
        self._start_the_first()

    def go_on(self) -> None:
        """Called between two steps. The loop pauses for the first plan, as long as it has earned."""
        self._start_the_first()
        if self:
            self._pauses.spend(next(iter(self.values())).is_done)

    def take_done(self) -> list[tuple[Any, BackgroundPlan]]:
        """Removes and returns the plans that are done; the next one is started."""
        done = [(key, planning) for key, planning in self.items() if planning.is_done()]
        for key, _ in done:
            del self[key]
        self._start_the_first()
        return done

    def wait(self, wait_s: float | None) -> None:
        first = next(iter(self.values()))
        first.start()
        first.is_done(wait_s)

    def close(self) -> None:
        """Ends them all."""
        for planning in self.values():
            planning.close()
        self.clear()

    def _start_the_first(self) -> None:
        for planning in self.values():
            is_here = self._measures_here and planning.lacks_facts and has_no_processor_to_spare()
            least_s = MEASURING_S if self._pauses.age_s < LONG_S else -math.inf
            if not is_here or self._pauses.spend(planning.measure, least_s):
                planning.start()
            return


class BackgroundBuild:
    """Builds the compiled allocator if it is missing. State: whether it is active.

    The first segments are profiled after the build: a profile begun without the allocator would never have the memory
    inside ops. Raises ``UsageError`` if the mode is ``"on"`` and an arena is impossible.
    """

    def __init__(self, mode: ArenaMode, where: torch.device, messages: Messages) -> None:
        self._thread: threading.Thread | None = None
        self._messages = messages
        reason = why_no_arena(where.type)
        self._is_loaded = bool(reason)
        if not reason and mode == "on":  # an arena is required, so wait for the build or its error
            reason = why_not_loaded()
        if reason and mode == "on":
            raise UsageError(f'arena: "on" is not possible: {reason}; take "auto" to train without an arena')
        if reason and where.type == "cpu":
            self._tell()
        if not (reason or is_loaded() or is_built()):
            messages.say(BUILDING)
            self._thread = threading.Thread(target=self._build, name="allocator's build")
            with contextlib.suppress(RuntimeError):  # with limited address space its first user builds it
                self._thread.start()

    @staticmethod
    def _build() -> None:
        with contextlib.suppress(NativeError):  # loading it reports why
            build()

    def wait(self, wait_s: float | None) -> None:
        if self._thread is not None:
            self._thread.join(wait_s)

    @property
    def is_ready(self) -> bool:
        """Whether it is active, or will never be."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if not self._is_loaded:
            self._is_loaded = True
            if why_not_loaded():
                self._tell()
        return True

    def _tell(self) -> None:
        if line := untold_absence():
            self._messages.warn(line)
