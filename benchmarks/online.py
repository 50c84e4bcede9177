"""Plans made in a running loop (``poochplan.auto``) against plans of a profile taken beforehand, on six workloads.

    python -m benchmarks.online -o benchmarks/results/online.json

Each workload in a process of its own, the planner with the same limits both times. What is told:

* segments until the plan is in force, when the loop waits for the planner (``session.wait_until_planned()``);
* what these took beside ordinary steps, in ordinary steps; waiting, link and runtime costs (measured once on a machine,
  and before) apart;
* steps under the two plans in pairs, in one attachment of the engine: median ratio and its 95% interval.
"""

from __future__ import annotations

import tempfile
import time
from statistics import median

import poochplan
from benchmarks.arena import KEPT, WORKLOADS, fresh
from benchmarks.facts import Row, parser_of, taken
from benchmarks.pairs import Seconds, compared, in_pairs, one_step, profiled
from benchmarks.plans import budget_of
from benchmarks.processes import in_a_process
from poochplan import Plan
from poochplan.formats.plan import Instructions
from poochplan.profiler.link import cached_link
from poochplan.profiler.trials.machine_facts import cached_cost
from poochplan.runtime.attachment import Attachment, PlanSource
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.step_policies.follow import Follow, IndexedPlan
from poochplan.runtime.step_policies.step_policy import SwapEach
from poochplan.workload import Workload

MOST_SEGMENTS = 40
ORDINARY = 5


class Turns(PlanSource):
    """Segments follow one of two plans, as ``which`` says."""

    is_given = gives_up = True

    def __init__(self, *plans: Plan) -> None:
        self.alternatives: tuple[Instructions, ...] = tuple(plan.instructions for plan in plans)
        self._plans = [IndexedPlan.of(instructions) for instructions in self.alternatives]
        self.which = 0

    def choose(self, segment: Segment) -> Follow:
        return Follow(self._plans[self.which], SwapEach())


def online(workload: Workload, budget_bytes: int, time_limit_s: float) -> tuple[Row, Plan]:
    ordinary_s = median(one_step(workload)[0] for _ in range(ORDINARY))
    steps_s, waited_s = [], 0.0
    with tempfile.TemporaryDirectory() as cache:
        session = poochplan.auto(
            workload.model, workload.optimizer, budget=budget_bytes, cache=cache, time_limit_s=time_limit_s, quiet=True
        )
        with session:
            while session.plan is None and len(steps_s) < MOST_SEGMENTS:
                start_s = time.perf_counter()
                one_step(workload)
                session._attachment.settle()  # as the next step would
                steps_s.append(time.perf_counter() - start_s)
                start_s = time.perf_counter()
                session.wait_until_planned()
                waited_s += time.perf_counter() - start_s
            plan, profile = session.plan, session.profile
            for _ in range(3):
                one_step(workload)
    if plan is None or profile is None:
        raise SystemExit(f"no plan after {MOST_SEGMENTS} segments")
    row = {
        "segments": len(steps_s),
        "ordinary_step_s": ordinary_s,
        "took_steps": (sum(steps_s) - len(steps_s) * ordinary_s) / ordinary_s,
        "waited_s": waited_s,
        "mode": profile.mode,
        "in_core_step_s": profile.times.step_s,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "peak_bytes": session.total.peak_bytes,
        "fallbacks": session.total.fallbacks,
    }
    return row, plan


def against(workload: Workload, offline: Plan, found: Plan, pairs: int) -> Row:
    """Steps under the online plan over steps under the offline one."""
    turns = Turns(offline, found)
    where = next(workload.model.parameters()).device
    attachment = Attachment({"": workload.model}, where.type, lambda: open_device(where), turns)

    def step(which: int) -> Seconds:
        turns.which = which
        return one_step(workload)

    with attachment:
        attachment.device.reserve_host(attachment.engine.host.planned_bytes)
        for which in (0, 1, 0, 1):
            step(which)
        return compared(in_pairs(lambda: step(0), lambda: step(1), pairs))


def one(name: str, pairs: int, time_limit_s: float) -> Row:
    workload = fresh(name)
    where = next(workload.model.parameters()).device
    cached_link(where)
    cached_cost(where)
    before = profiled(workload, name)
    budget_bytes = budget_of(before, KEPT)
    offline = poochplan.plan(before, budget_bytes, time_limit_s=time_limit_s, threads=1)
    row, found = online(workload, budget_bytes, time_limit_s)
    return {
        "workload": name,
        "budget_bytes": budget_bytes,
        **row,
        "offline_in_core_step_s": before.times.step_s,
        "overheads": [offline.prediction.overhead, found.prediction.overhead],
        "online_over_offline": against(workload, offline, found, pairs),
    }


def main() -> None:
    names = [name for name in WORKLOADS if name != "small-unet"]
    parser = parser_of(__doc__, workloads=names, pairs=40, time_limit=(10.0, "seconds of the planner, both times"))
    asked = parser.parse_args()

    def row_of(name: str) -> Row:
        return dict(in_a_process(one, name, asked.pairs, asked.time_limit, start="spawn"))

    taken(asked, asked.workloads, row_of)


if __name__ == "__main__":
    main()
