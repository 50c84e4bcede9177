"""The process that plans for a training loop, at low priority. It ends when its parent does.

    python -m poochplan.online.planning_process FOLDER PARENT

The folder has a profile and a :class:`PlanRequest`. If the profile lacks the link and the costs of the machine, this
process measures them and writes the profile anew, with the plan next to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.planner.search.allowance import Progress, SearchCallback

PR_SET_PDEATHSIG = 1
LEAST_PRIORITY = 10
GAP = 0.02
"""The search ends within this share of the proven bound, because the loop needs the processors."""
SEARCH_S = 3.0
"""The search goes on for so long, unless it is within the gap."""


class PlanRequest(msgspec.Struct, frozen=True):
    """How a profile is to be planned."""

    time_limit_s: float
    arena: Literal["auto", "on", "off"]
    spill_dir: str | None
    """Spill folder of the link, which is measured there if the profile has none."""
    budget_bytes: int = 0
    room_bytes: int = 0
    """Bytes of the budget that stay free: for memory that comes and goes by time, which no prediction counts."""
    arena_room_bytes: int = 0
    """Bytes of the budget that are left to the arena of real steps, which is larger than the plan's own."""
    is_complete: bool = False
    """Whether the profile has all facts of the machine. Then torch is not loaded."""
    loop_s: float = 0.0
    """Seconds for which the loop had run."""
    ranks: int = 1
    """Number of processes that share the host."""
    on: Literal["allocated", "reserved"] | None = None
    """What the budget covers, as for :func:`poochplan.plan`."""


def ends_with_its_parent(parent: int, folder: Path) -> None:
    """Has the system end this process when its parent, the process of that number, has ended for whatever reason. Then
    nobody else removes the folder.
    """

    def end(*_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGHUP, end)  # SIGTERM is from a parent that waits, and that removes the folder itself
    with contextlib.suppress(OSError, AttributeError):  # not on Linux: the parent ends it if it can
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
        if os.getppid() != parent:
            end()


def ends_when_it_gains_less_than_it_takes(loop_s: float) -> SearchCallback:
    """Ends a search whose plan cannot become better by as much time as the search has taken from the loop, if the loop
    goes on for as long as it has run (``loop_s`` seconds before the search).
    """
    began_s = time.monotonic()

    def is_over(progress: Progress) -> bool:
        took_s = time.monotonic() - began_s
        return took_s >= SEARCH_S and progress.bound_s > 0 and progress.gap * (loop_s + took_s) <= took_s

    return is_over


def with_room(made: Plan, room_bytes: int, arena_room_bytes: int = 0) -> Plan:
    """The same plan for a budget that is larger by both rooms. The first stays free also of the arena's blocks."""
    arena_peak_bytes = made.prediction.arena_peak_bytes
    if arena_peak_bytes is not None:
        arena_peak_bytes += room_bytes
    note = f"{room_bytes} bytes of the budget stay free for collectives in flight"
    return msgspec.structs.replace(
        made,
        budget_bytes=made.budget_bytes + room_bytes + arena_room_bytes,
        prediction=msgspec.structs.replace(made.prediction, arena_peak_bytes=arena_peak_bytes),
        notes=(*made.notes, note) if room_bytes else made.notes,
    )


def plan_in(folder: Path) -> None:
    """Reads the request in that folder, and writes the plan. Raises ``PoochError``."""
    from poochplan.formats.profile import Profile
    from poochplan.planner.planning import plan

    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=PlanRequest)
    profile = Profile.load(folder / "profile.json")
    if not request.is_complete:
        import torch

        from poochplan.profiler.trials.machine_facts import completed

        torch.set_num_threads(profile.device.threads or torch.get_num_threads())
        profile = completed(profile, request.spill_dir)
        profile.save(folder / "profile.json", force=True)
    watch = ends_when_it_gains_less_than_it_takes(request.loop_s)
    made = plan(
        profile,
        request.budget_bytes - request.room_bytes - request.arena_room_bytes,
        time_limit_s=request.time_limit_s,
        gap=GAP,
        threads=1,
        ranks_per_host=request.ranks,
        arena=request.arena,
        on=request.on,
        watch=watch,
    )
    with_room(made, request.room_bytes, request.arena_room_bytes).save(folder / "plan.json")


def main(folder: str) -> int:
    """Returns the exit code. A failure is one line on stderr."""
    from poochplan.errors import PoochError

    warnings.simplefilter("ignore")  # the loop's process gives them
    try:
        plan_in(Path(folder))
    except (PoochError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    ends_with_its_parent(int(sys.argv[2]), Path(sys.argv[1]))
    with contextlib.suppress(OSError):  # if another thread wants this process's processor, it gets it at once
        os.nice(LEAST_PRIORITY)
    sys.exit(main(sys.argv[1]))
