"""A process of the comparison: profiles, plans, or trains under one method, metered or step by step on demand.

It answers on its standard output, a JSON object a line; what libraries print goes to the standard error.
A method that cannot run here is an answer too: ``{"refused": why}``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

import poochplan
from benchmarks.hooked import train
from benchmarks.measured_steps import MeasuredSteps
from benchmarks.pairs import profiled as profile_steps
from poochplan.errors import PoochError
from poochplan.formats.profile import Profile
from poochplan.planner.planning import ILP
from poochplan.workload import Workload
from tests.allocated_bytes import allocated_bytes

from .asking import KEPT, OURS, WARM_STEPS, Ask
from .compared_networks import fresh
from .methods import NotRunError, method_of

ITERATIONS = 5
"""Steps of a profile that are timed."""
ROOM_OF_KEPT = 1.1
"""Of the in-core peak: an arena for everything is a little larger, and is not used where there is no room for it."""
Say = Callable[[dict[str, Any]], None]


def profiled(ask: Ask, say: Say) -> None:
    """Writes the network's profile to the folder, and says what budgets there are."""
    profile = profile_steps(fresh(ask.network), ask.network, iterations=ITERATIONS, throttle=ask.throttle or None)
    profile.save(_profile_file(ask), force=True)
    seconds = ("plain_step_s", "unserved_step_s", "step_s")
    bytes_told = {"profile_peak_bytes": profile.in_core_peak_bytes, "memory": str(profile.memory)}
    bytes_told["smallest_budget_bytes"] = poochplan.smallest_budget(profile)
    say({name: getattr(profile.times, name) for name in seconds} | bytes_told)


def planned(ask: Ask, say: Say) -> None:
    """Writes the plan of a policy for the budget to the folder, and says what it promises."""
    profile = Profile.load(_profile_file(ask))
    policy = ILP if ask.method in (OURS, KEPT) else ask.method
    room = int(ROOM_OF_KEPT * profile.in_core_peak_bytes)
    plan = poochplan.plan(
        profile, room if ask.method == KEPT else ask.budget_bytes, policy=policy, time_limit_s=ask.time_limit_s
    )
    plan.save(Path(ask.folder) / ask.plan, force=True)
    told = plan.prediction
    promised = {"predicted_step_s": told.step_s, "predicted_peak_bytes": told.peak_bytes}
    arena = {"holds_arena": plan.holds_arena, "arena_peak_bytes": told.arena_peak_bytes}
    say({"predicted_ratio": 1 + told.overhead, **promised, **arena})


def _profile_file(ask: Ask) -> Path:
    return Path(ask.folder) / f"{ask.network}-profile.json"


def metered(ask: Ask, say: Say) -> None:
    """Some steps that are not timed: peak of allocated bytes with the arena whole, losses, and bits after each."""
    before_bytes = allocated_bytes().live
    workload = fresh(ask.network)
    before_bytes += _waiting_bytes(workload)
    torch.manual_seed(1)
    with method_of(ask.method)(workload, ask) as running:
        work = running.workload
        assert work.optimizer is not None
        found = train(work.model, work.step, work.optimizer, ask.steps, running.session, before_bytes)
        facts = running.facts()
    say({"peak_bytes": max(found.peaks), "peaks": found.peaks, "bits": found.parts, "losses": found.losses} | facts)


def _waiting_bytes(workload: Workload) -> int:
    """Of the chunks of text that are not a step's own: data that waits beside it, and that no budget is for."""
    batches = getattr(workload.step, "batches", ())
    return sum(tensor.nbytes for batch in batches[1:] for tensor in batch)


def taking_turns(ask: Ask, say: Say) -> None:
    """Warms up, says so, and takes a step for each line that says ``step``; then tells of all."""
    workload = fresh(ask.network)
    torch.manual_seed(1)
    with method_of(ask.method)(workload, ask) as running:
        steps = MeasuredSteps(running.workload)
        steps.go(WARM_STEPS)
        say({"ready": True})
        for line in sys.stdin:
            if line.strip() != "step":
                break
            wall_s, cpu_s = steps.one()
            say({"wall_s": wall_s, "cpu_s": cpu_s})
        say(steps.found() | running.facts())


WORK = {"profile": profiled, "plan": planned, "metered": metered, "turns": taking_turns}


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(found: dict[str, Any]) -> None:
        answers.write(msgspec.json.encode(found) + b"\n")

    ask = msgspec.json.decode(sys.argv[1], type=Ask)
    try:
        WORK[ask.what](ask, say)
    except (NotRunError, PoochError) as error:
        say({"refused": str(error).splitlines()[0]})


if __name__ == "__main__":
    main()
