"""The best plan there is, by exhaustive search on tiny steps: the yardstick for the planner.

:func:`best_schedule` searches all that ``docs/semantics.md`` allows: decisions, the order of the queue outwards,
release points, prefetch points and their order, explicit early replays and their order. It goes through the clock point
by point and keeps, at each point, every state that could still be the best. Its bytes and seconds are its own; the plan
it ends with is simulated by the planner's simulator, and an assertion fails where the two differ.

The class: a value leaves at most once, before its first use, and comes back once; a replay brings a value back for
good. A value may serve a replay first and leave only then.

What it leaves out, and why that loses nothing on a *plain* link (``duplex == 1``, no interference), where copies and
compute do not slow each other and so an earlier copy, or a later wait, never delays anything:

* Swap-outs. Only the queue's order matters; each is issued as early as the order allows. A value goes at its own save
  point, or right behind a value saved later that it lets go first. So at a save point of ``w``: nothing, or ``w`` and
  then any sequence of values that still wait.
* Releases. One that the ticks up to the next point do not need is moved to the next point: the wait comes later, and
  memory fits as it is. What is left are the inclusion-minimal sets with which these ticks fit. For the same reason a
  release that frees nothing yet (forward still holds the value) is never needed.
* Prefetches. With the queue's order given, the first one of a use point moves to the end of the list of the use point
  before it when memory has room between the two. What a point needs itself is in its list: issued earlier, same tick.
  The two moves never undo each other (one only raises release points, the other only lowers prefetch points).
* Dominance. Of two states with the same places of values, one that is no later in any clock (compute, end of each
  copy) and no more restricted by the rule above makes the other superfluous.

What the runtime takes of the compute stream on the CPU changes none of this: taken earlier, it is not taken later.
Where the thread works ahead of the device it does, since ops in between are launched later.

There, and on other links, where copies slow each other or compute, waiting to issue one can pay. So every swap-out and
prefetch is tried at every point and in every order, and only states that are equal but for the clocks are merged; the
one thing not tried is a wait longer than memory asks for (deliberate idling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from poochplan.formats.plan import Decision
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, assemble
from poochplan.planner.simulator.simulate import Candidate, Simulation, movable, simulate, try_decisions
from tests.planner.clock import is_plain
from tests.planner.oracle_search import Actions, Freedom, Search, State, subsets

MAX_VALUES = 5
MAX_DECIDED_VALUES = 10
SAME = 1e-9
"""Relative difference of seconds below which two are the same."""


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best plan."""

    schedule: Schedule
    simulation: Simulation

    @property
    def step_s(self) -> float:
        return self.simulation.step_s


def best_schedule(
    problem: Problem,
    budget_bytes: int,
    *,
    freedom: Freedom | None = None,
    at_most_s: float = math.inf,
    every_choice: bool = False,
) -> Optimum | None:
    """The schedule with the least step time whose peak is within ``budget_bytes``; None when there is none.

    Steps slower than ``at_most_s`` are not looked for, which only saves time. ``every_choice`` does without the rules
    of the plain link: slower, and the same step if they lose nothing.
    """
    freedom = freedom or Freedom()
    assert len(movable(problem)) <= MAX_VALUES, "too many movable values to try every schedule"
    plain_rules = is_plain(problem.link) and problem.launch_cost.is_compute and not every_choice
    best_s, best = at_most_s * (1 + SAME), None
    for recomputed in _recomputed_sets(problem, freedom):
        found = Search(problem, budget_bytes, recomputed, freedom, best_s, plain_rules).best()
        if found is not None and (best is None or found.clock.now_s < best_s):
            best_s, best = found.clock.now_s, (found, recomputed)
    if best is None:
        return None
    schedule = _schedule_of(problem, *best)
    simulation = simulate(problem, schedule)
    assert math.isclose(simulation.step_s, best_s, rel_tol=SAME), (
        f"{simulation.step_s} s simulated, {best_s} s searched"
    )
    assert simulation.peak_bytes <= budget_bytes, f"{simulation.peak_bytes} bytes simulated, budget {budget_bytes}"
    return Optimum(schedule, simulation)


def best_decisions(problem: Problem, budget_bytes: int) -> Candidate:
    """The best of all decisions as the planner's own schedules do them; fewest bytes over budget if none fits."""
    values = movable(problem)
    assert len(values) <= MAX_DECIDED_VALUES, "too many movable values to try every decision"
    replays = problem.replay.replays
    choices = [
        [d for d in Decision if d is not Decision.RECOMPUTE or replays[value] is not None]
        if value in values
        else [Decision.KEEP]
        for value in range(problem.value_count)
    ]
    wishes = sorted(product(*choices), key=lambda wish: _least_replay_s(problem, wish))
    best: Candidate | None = None
    for wish in wishes:
        if best is not None and best.peak_bytes <= budget_bytes:
            if problem.step_s + _least_replay_s(problem, wish) >= best.simulation.step_s * (1 - SAME):
                break
            if floor_bytes(problem, wish) > budget_bytes:
                continue
        found = try_decisions(problem, "best decisions", wish, budget_bytes)
        if best is None or found.rank(budget_bytes) < best.rank(budget_bytes):
            best = found
    assert best is not None
    return best


def _least_replay_s(problem: Problem, wish: Sequence[Decision]) -> float:
    used = tuple(v for v, d in enumerate(wish) if d is Decision.RECOMPUTE and problem.first_use_point[v] >= 0)
    return problem.replay.merged(used).seconds if used else 0.0


def floor_bytes(problem: Problem, wish: Sequence[Decision]) -> int:
    """A peak that no schedule of these decisions is below: kept values throughout, others while they must be live."""
    floor = problem.base_bytes.copy()
    for value, decision in enumerate(wish):
        size, born, death = (int(a[value]) for a in (problem.rounded_bytes, problem.born, problem.forward_death))
        first, freed = int(problem.first_use[value]), int(problem.freed[value])
        stays = decision is Decision.KEEP
        floor[born : max(death, freed) + 1 if stays else death + 1] += size
        if not stays and death < first < problem.tick_count:
            floor[first : freed + 1] += size
    return int(floor.max())


def _recomputed_sets(problem: Problem, freedom: Freedom) -> list[frozenset[int]]:
    if freedom.decisions is not None:
        return [frozenset(v for v, d in enumerate(freedom.decisions) if d is Decision.RECOMPUTE)]
    able = [value for value in movable(problem) if problem.replay.replays[value] is not None]
    wishes = [frozenset(chosen) for chosen in subsets(able)]
    as_wish = {w: [Decision.RECOMPUTE if v in w else Decision.KEEP for v in range(problem.value_count)] for w in wishes}
    return sorted(wishes, key=lambda w: (_least_replay_s(problem, as_wish[w]), sorted(w)))


def _schedule_of(problem: Problem, last: State, recomputed: frozenset[int]) -> Schedule:
    steps: list[Actions] = []
    state: State | None = last
    while state is not None and state.before is not None:
        steps.append(state.actions)
        state = state.before
    steps.reverse()
    left = {value for actions in steps for value in actions.release}
    lists: dict[int, dict[str, list[int]]] = {}
    for point, actions in enumerate(steps):
        for name, values in actions._asdict().items():
            useful = [value for value in values if name != "swap_out" or value in left]
            if useful:
                lists.setdefault(point, {})[name] = useful
    decisions = [
        Decision.RECOMPUTE if v in recomputed else Decision.SWAP if v in left else Decision.KEEP
        for v in range(problem.value_count)
    ]
    return assemble(problem, decisions, lists)
