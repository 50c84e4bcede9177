"""What the runtime costs on the profiled model itself: steps that record every op, that also recompute every other
value, or that swap every other one, beside steps that keep all.

Among a real step's ops the cache has less of the runtime's data than on a small network, and ops that write in place
take longer to record. So these costs may be two to three times as high there.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Phase, Profile, RuntimeCost
from poochplan.planner.arena.packing import packed
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule
from poochplan.planner.simulator.simulate import Walk
from poochplan.profiler.trials.compare import instructions_for
from poochplan.runtime.arena.step_arena import RepeatedStep
from poochplan.runtime.step_policies.follow import Follow, IndexedPlan
from poochplan.runtime.step_policies.step_policy import SwapEach

from .after_capture import TimedSteps
from .segment_observer import NewObserver, StudyContext

SHORT_OP_S = 2e-4
"""If the mean op takes longer, recording and replays add a few percent at most, and a small network's costs do."""
LEAST_OPS = 2000
"""For a step of fewer short ops the small network's costs do: at 1,300 ops plans were within 8% of their promise."""
LAYING_OUT, ROUNDS = 3, 3
"""Steps of each kind: those that lay an arena out and touch its pages, and those of which the shortest counts."""
Own = dict[str, Any]
"""Some of the costs of a ``RuntimeCost``."""


class _Seconds(NamedTuple):
    """Of one step; in hooks the thread's processor time, without its waits."""

    whole_s: float
    pack_s: float
    unpack_s: float


def has_short_ops(profile: Profile) -> bool:
    """Whether the runtime's own work may be a notable part of a step."""
    return 0 < profile.times.step_s < SHORT_OP_S * len(profile.ops)


def own_costs(context: StudyContext, profile: Profile, *, has_arena: bool) -> Generator[NewObserver, Any, Own]:
    """Asks for the steps, from an arena if there may be one. A cost that is not above 0 there is left out."""
    if len(profile.ops) < LEAST_OPS or not has_short_ops(profile):
        return {}
    problem = Problem.of(profile)
    kept = [Decision.KEEP] * problem.value_count
    wishes = {
        "keep": kept,
        "record": kept,
        "recompute": every_other(Decision.RECOMPUTE, problem),
        "swap": every_other(Decision.SWAP, problem),
    }
    shortest = dict[str, _Seconds]()
    for name, wish in wishes.items():
        instructions = instructions_for(profile, wish)
        if name in ("keep", "swap"):
            instructions = msgspec.structs.replace(instructions, record_from_start=False)
        steps = yield from _several(context, instructions, has_arena=has_arena)
        if not steps:
            return {}
        shortest[name] = _Seconds(*map(min, zip(*steps, strict=True)))
    return _costs(problem, wishes, shortest)


def with_own_costs(profile: Profile, own: Own) -> Profile:
    """The profile with these in place of the small network's."""
    cost = profile.runtime
    if cost is None or not own:
        return profile
    unmeasured = tuple(name for name in cost.unmeasured if name not in own)
    cost = RuntimeCost(**{**msgspec.structs.asdict(cost), **own, "unmeasured": unmeasured})
    cost = msgspec.structs.replace(cost, fetch_s=min(cost.fetch_s, cost.swap_s))
    return msgspec.structs.replace(profile, runtime=cost)


def _several(
    context: StudyContext, instructions: Instructions, *, has_arena: bool
) -> Generator[NewObserver, Any, list[_Seconds]]:
    """Steps with these decisions, from an arena if there may be one, as planned steps run; none if one diverged."""
    policy = Follow(IndexedPlan.of(instructions), SwapEach(at_once=True))
    with closing(TimedSteps(context, lambda: policy, RepeatedStep(packed) if has_arena else None)) as steps:
        yield from steps.several(LAYING_OUT)
        seconds = yield from steps.several(ROUNDS)
    if not steps.have_followed:
        return []
    in_hooks = zip(seconds, steps.in_hooks[LAYING_OUT:], strict=True)
    return [_Seconds(sum(step.values()) + hooks.total_s, hooks.pack_s, hooks.unpack_s) for step, hooks in in_hooks]


def every_other(decision: Decision, problem: Problem) -> list[Decision]:
    """Every other value of which it may be decided so. Then most replays start from a value that is there."""
    replays, is_replay = problem.replay.replays, decision is Decision.RECOMPUTE
    may = [at for at, kept in enumerate(problem.must_keep) if not kept and not (is_replay and replays[at] is None)]
    decisions = [Decision.KEEP] * problem.value_count
    for value in may[1::2]:
        decisions[value] = decision
    return decisions


def _costs(problem: Problem, wishes: Mapping[str, Sequence[Decision]], seconds: Mapping[str, _Seconds]) -> Own:
    keep, record, recompute, swap = seconds.values()
    recorded, (replayed, replayed_s) = recorded_ops(problem), replayed_ops(problem, wishes["recompute"])
    swapped = wishes["swap"].count(Decision.SWAP)
    found = {
        "record_s": (record.whole_s - keep.whole_s) / max(1, recorded),
        "replay_s": (recompute.whole_s - record.whole_s - replayed_s) / max(1, replayed),
        "swap_s": (swap.pack_s + swap.unpack_s - keep.pack_s - keep.unpack_s) / max(1, swapped),
        "fetch_s": (swap.unpack_s - keep.unpack_s) / max(1, swapped),
    }
    return {name: cost_s for name, cost_s in found.items() if cost_s > 0}


def recorded_ops(problem: Problem) -> int:
    """How many ops a step records that records all it can."""
    return sum(op.phase is Phase.FORWARD for op in problem.profile.ops[: problem.launch_cost.last_save_op])


def replayed_ops(problem: Problem, wish: Sequence[Decision]) -> tuple[int, float]:
    """How many ops a step replays with these decisions, and their seconds."""
    replays = [replay for _, replay in Walk(problem, Schedule(tuple(wish), (), True)).replays]
    return sum(len(one.ops) for one in replays), sum(one.seconds for one in replays)
