"""Third-party networks by an outside meter: allocated bytes within each plan's budget, from an arena and without one.

The networks and random schedules are those of ``benchmarks/third_party.py``: decisions, points and queues that nobody
would choose. A random plan's budget is exactly what it promises: its peak without an arena, its arena and what lies
outside with one. The planner's own plan is for 60% of the in-core peak, or, where that is refused, for the smallest
budget that the refusal names; a byte less than the smallest has to be refused.

Each network has a process of its own, forked from one that has installed the allocator hook of the tests; see
``benchmarks/hooked.py``. Loss, gradients, buffers, parameters and the generator are compared after each step.

    python -m benchmarks.third_party_allocated [--networks hf_gpt2] [--plans 1] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import msgspec
import torch

import poochplan
from benchmarks.facts import PACKAGES, facts_of_run, write_results
from benchmarks.hooked import Trained, ready_to_fork, train
from benchmarks.resident import in_a_process
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.simulate import Candidate, simulate
from poochplan.planner.writing import BY_HAND, write_plan
from tests.allocated_bytes import allocated_bytes
from tests.runtime.nets import Case
from tests.runtime.third_party_networks import NETWORKS, random_schedule

STEPS = {"off": 3, "on": 6}
SHARE = "60%"
EVALUATIONS = 30


def random_plan(profile: Profile, problem: Problem, seed: int, arena: str) -> Plan:
    """A plan for a random schedule, whose budget is what it promises."""
    schedule = random_schedule(profile, problem, seed)
    best = Candidate(BY_HAND, schedule.decisions, schedule, simulate(problem, schedule))
    plan = write_plan(profile, problem, Optimum(best, BY_HAND), 0, None, 0.0, is_laid_out=True)
    found = plan.prediction
    least = found.arena_peak_bytes if arena == "on" else max(found.peak_bytes, found.first_step_peak_bytes)
    assert least is not None
    return msgspec.structs.replace(plan, budget_bytes=least)


def planned(profile: Profile, row: dict[str, Any]) -> Plan:
    """The planner's own; notes in the row whether the budget was refused, and whether a byte less than the least is."""
    smallest = poochplan.smallest_budget(profile, arena="on")
    try:
        poochplan.plan(profile, smallest - 1, arena="on", evaluations=EVALUATIONS)
        row["below_the_smallest"] = "planned"
    except InfeasibleError as error:
        row["below_the_smallest"] = "refused" if error.smallest_budget_bytes == smallest else "refused, other bytes"
    try:
        return poochplan.plan(profile, SHARE, arena="on", evaluations=EVALUATIONS)
    except InfeasibleError as error:
        row["refused_smallest_bytes"] = error.smallest_budget_bytes
        return poochplan.plan(profile, error.smallest_budget_bytes, arena="on", evaluations=EVALUATIONS)


def trained(case: Case, plan: Plan | None, arena: str) -> Trained:
    """Some steps from the same start, metered from what was there before the model was made."""
    gc.collect()
    before_bytes = allocated_bytes().live
    model, loss_of, optimizer = case.fresh()
    torch.manual_seed(1)
    if plan is None:
        return train(model, loss_of, optimizer, max(STEPS.values()), before_bytes=before_bytes)
    with poochplan.apply(plan, model, arena=arena) as session:  # type: ignore[arg-type]
        return train(model, loss_of, optimizer, STEPS[arena], session, before_bytes)


def rows_of(name: str, plans: int) -> list[dict[str, Any]]:
    """One row for each plan of a network."""
    case = NETWORKS[name]
    profile = case.profile()
    problem = build_problem(profile)
    reference = trained(case, None, "off")
    rows: list[dict[str, Any]] = []
    for kind in (*(f"random {seed}" for seed in range(plans)), "planner"):
        for arena in STEPS if kind != "planner" else ("on",):
            row: dict[str, Any] = {"network": name, "plan": kind, "arena": arena, "memory": str(profile.memory)}
            plan = planned(profile, row) if kind == "planner" else random_plan(profile, problem, int(kind[7:]), arena)
            found = trained(case, plan, arena)
            row |= found.facts() | {"bitwise": found.digests == reference.digests[: len(found.digests)]}
            row |= {"budget_bytes": plan.budget_bytes, "in_core_peak_bytes": max(reference.peaks)}
            row |= {"profile_peak_bytes": profile.in_core_peak_bytes, "policy": plan.solve.policy}
            row |= {"over_bytes": max(found.peaks) - plan.budget_bytes}
            rows.append(row)
    return rows


def passed(row: dict[str, Any]) -> bool:
    return bool(
        row["bitwise"]
        and row["over_bytes"] <= 0
        and not row["fallbacks"]
        and not row["large_once_learned"]
        and row.get("below_the_smallest", "refused") == "refused"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--plans", type=int, default=1, help="random plans for each network, each with and without")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    ready_to_fork()
    rows: list[dict[str, Any]] = []
    facts = facts_of_run(arguments, (*PACKAGES, "transformers", "monai"))  # of the code that is loaded now
    for name in arguments.networks.split(","):
        start_s = time.perf_counter()
        found = in_a_process(rows_of, name, arguments.plans)
        rows += found
        bad = [(row["plan"], row["arena"], row["over_bytes"], row["bitwise"]) for row in found if not passed(row)]
        used = sum(row["arena_bytes"] > 0 for row in found if row["arena"] == "on")
        of = sum(row["arena"] == "on" for row in found)
        print(f"{name}: arena used {used} of {of}, {time.perf_counter() - start_s:.0f} s {bad or ''}", flush=True)
        write_results(arguments.output, facts | {"summary": summary(rows), "rows": rows})
    print(summary(rows))
    return 0 if all(map(passed, rows)) else 1


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    served = [row for row in rows if row["arena"] == "on"]
    return {
        "networks": len({row["network"] for row in rows}),
        "plans": len(rows),
        "as_promised": sum(map(passed, rows)),
        "within_budget": sum(row["over_bytes"] <= 0 for row in rows),
        "bitwise": sum(row["bitwise"] for row in rows),
        "with_an_arena": len(served),
        "arena_used": sum(row["arena_bytes"] > 0 for row in served),
        "refused_and_planned_at_the_smallest": sum("refused_smallest_bytes" in row for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
