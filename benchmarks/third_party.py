"""Gradients bitwise equal and bytes as promised: every third-party network of the tests under random plans.

Decisions, points and budgets are drawn at random (``tests/runtime/third_party_networks.py``), as nobody would choose
them. Each plan is trained from the same start as in-core training; loss, gradients, buffers, parameters and generators
are compared bitwise after each step. Each network has a process of its own.

* ``--meter session``: three steps on the CPU device and on the adversarial one of the tests. The peak is that of the
  session's meter, the prediction the simulator's.
* ``--meter allocated``: by the allocator hook of the tests (``benchmarks/hooked.py``), from an arena and without one. A
  random plan's budget is exactly what it promises: its peak without an arena, its arena and what lies outside with one.
  The planner's own plan is for 60% of the in-core peak, or, where that is refused, for the smallest budget that the
  refusal names; a byte less than the smallest has to be refused.

    python -m benchmarks.third_party [--meter allocated] [--networks gpt2,vit] [--plans 5] [-o FILE.json]
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections import Counter

import msgspec
import torch

import poochplan
from benchmarks.facts import PACKAGES, Row, facts_of_run, parser_of, write_results
from benchmarks.hooked import Trained, ready_to_fork, train
from benchmarks.processes import in_a_process
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.policies import PolicyInput
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import Candidate, simulate
from poochplan.planner.writing import BY_HAND, write_plan
from poochplan.runtime.run_report import Report
from tests.allocated_bytes import allocated_bytes
from tests.planner.plans import plan_with
from tests.runtime import nets
from tests.runtime.adversarial import AdversarialDevice, OpClock  # the tests' own device
from tests.runtime.third_party_networks import NETWORKS, random_schedule

STEPS = {"off": 3, "on": 6}
DEVICES = "cpu", "adversarial"
SHARE = "60%"
EVALUATIONS = 30


def session_rows(name: str, plans: int) -> list[Row]:
    """One row for each random plan of a network, on each device."""
    case = NETWORKS[name]
    reference, _ = nets.train(case, STEPS["off"])
    profile = case.profile()
    problem = Problem.of(profile)
    rows = []
    for seed in range(plans):
        schedule = random_schedule(profile, problem, seed)
        predicted_bytes = simulate(problem, schedule).peak_bytes
        for device in DEVICES:
            seen, report, violations = on_device(case, plan_with(profile, schedule), device)
            row = {
                "network": name,
                "seed": seed,
                "device": device,
                "decisions": dict(Counter(map(str, schedule.decisions))),
                "saved_values": problem.value_count,
                "replayed_values": report.last_step.replayed_values,
                "swapped_in_bytes": report.last_step.in_bytes,
                "bitwise": nets.equal(reference, seen),
                "in_core_peak_bytes": profile.in_core_peak_bytes,
                "predicted_peak_bytes": predicted_bytes,
                "metered_peak_bytes": report.total.peak_bytes,
                "within_predicted": (report.total.peak_bytes or 0) <= predicted_bytes,
                "fallbacks": report.total.fallbacks,
                "complaints": [*report.total.fallback_reasons, *violations],
            }
            kept = row["bitwise"] and row["within_predicted"] and not row["fallbacks"] and not row["complaints"]
            rows.append(row | {"as_promised": bool(kept)})
    return rows


def on_device(case: nets.Case, plan: Plan, device: str) -> tuple[list[list[torch.Tensor]], Report, list[str]]:
    """What the steps left behind, the report, and what the adversarial device had to complain of."""
    adversarial = AdversarialDevice(OpClock()) if device == "adversarial" else None
    opened = (lambda: adversarial) if adversarial else None
    with adversarial.clock if adversarial else contextlib.nullcontext():
        seen, report = nets.train(case, STEPS["off"], plan, meter="always", device=opened)
    assert report is not None
    return seen, report, adversarial.violations if adversarial else []


def allocated_rows(name: str, plans: int) -> list[Row]:
    """One row for each plan of a network, the random ones from an arena and without one."""
    case = NETWORKS[name]
    profile = case.profile()
    problem = Problem.of(profile)
    reference = trained(case, None, "off")
    rows: list[Row] = []
    for kind in (*(f"random {seed}" for seed in range(plans)), "planner"):
        for arena in STEPS if kind != "planner" else ("on",):
            row: Row = {"network": name, "plan": kind, "arena": arena, "memory": str(profile.memory)}
            plan = planned(profile, row) if kind == "planner" else random_plan(profile, problem, int(kind[7:]), arena)
            found = trained(case, plan, arena)
            row |= found.facts() | {"bitwise": found.digests == reference.digests[: len(found.digests)]}
            row |= {"budget_bytes": plan.budget_bytes, "in_core_peak_bytes": max(reference.peaks)}
            row |= {"profile_peak_bytes": profile.in_core_peak_bytes, "policy": plan.solve.policy}
            row |= {"over_bytes": max(found.peaks) - plan.budget_bytes}
            kept = row["bitwise"] and row["over_bytes"] <= 0 and not row["fallbacks"] and not row["large_once_learned"]
            refused = row.get("below_the_smallest", "refused") == "refused"
            rows.append(row | {"as_promised": bool(kept and refused)})
    return rows


def random_plan(profile: Profile, problem: Problem, seed: int, arena: str) -> Plan:
    schedule = random_schedule(profile, problem, seed)
    best = Candidate(BY_HAND, schedule.decisions, schedule, simulate(problem, schedule))
    plan = write_plan(PolicyInput(problem, 0), Optimum(best, BY_HAND), 0.0, is_laid_out=True)
    found = plan.prediction
    least = found.arena_peak_bytes if arena == "on" else max(found.peak_bytes, found.first_step_peak_bytes)
    assert least is not None
    return msgspec.structs.replace(plan, budget_bytes=least)


def planned(profile: Profile, row: Row) -> Plan:
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


def trained(case: nets.Case, plan: Plan | None, arena: str) -> Trained:
    """Some steps from the same start, metered from what was there before the model was made."""
    gc.collect()
    before_bytes = allocated_bytes().live
    model, loss_of, optimizer = case.fresh()
    torch.manual_seed(1)
    if plan is None:
        return train(model, loss_of, optimizer, max(STEPS.values()), before_bytes=before_bytes)
    with poochplan.apply(plan, model, arena=arena) as session:  # type: ignore[arg-type]
        return train(model, loss_of, optimizer, STEPS[arena], session, before_bytes)


def summary(rows: list[Row]) -> dict[str, int]:
    found = {"networks": len({row["network"] for row in rows}), "plans": len(rows)}
    found |= {name: sum(row[name] for row in rows) for name in ("as_promised", "bitwise")}
    served = [row for row in rows if row.get("arena") == "on"]
    if not served:
        return found
    return found | {
        "within_budget": sum(row["over_bytes"] <= 0 for row in rows),
        "with_an_arena": len(served),
        "arena_used": sum(row["arena_bytes"] > 0 for row in served),
        "refused_and_planned_at_the_smallest": sum("refused_smallest_bytes" in row for row in rows),
    }


def main() -> int:
    parser = parser_of(__doc__, networks=",".join(NETWORKS), plans=(1, "random plans for each network"))
    parser.add_argument("--meter", default="session", choices=("session", "allocated"))
    arguments = parser.parse_args()
    ready_to_fork()
    rows_of = session_rows if arguments.meter == "session" else allocated_rows
    rows: list[Row] = []
    facts = facts_of_run(arguments, (*PACKAGES, "transformers", "monai"))  # of the code that is loaded now
    for name in arguments.networks.split(","):
        start_s = time.perf_counter()
        found = in_a_process(rows_of, name, arguments.plans)
        rows += found
        told = ("plan", "seed", "device", "arena", "over_bytes", "bitwise", "complaints")
        bad = [{key: row[key] for key in told if key in row} for row in found if not row["as_promised"]]
        good = len(found) - len(bad)
        print(
            f"{name}: {good} of {len(found)} as promised, {time.perf_counter() - start_s:.0f} s {bad or ''}", flush=True
        )
        write_results(arguments.output, facts | {"summary": summary(rows), "rows": rows})
    print(summary(rows))
    return 0 if all(row["as_promised"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
