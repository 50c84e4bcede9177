"""Gradients bitwise equal and the peak as predicted: every third-party network of the tests under random plans.

Decisions, points and budgets are drawn at random (``tests/runtime/third_party_networks.py``); each plan is trained for
three steps from the same start as in-core training, on the CPU device and on the adversarial one of the tests. Loss,
gradients, buffers, parameters and generators are compared bitwise after each step; the peak is that of the session's
meter, the prediction the simulator's.

    python -m benchmarks.third_party [--networks gpt2,vit] [--plans 5] [-o benchmarks/results/third_party.json]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections import Counter
from typing import Any

import torch

from benchmarks.facts import PACKAGES, facts_of_run, write_results
from poochplan.formats.plan import Plan
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import simulate
from poochplan.runtime.run_report import Report
from tests.planner.plans import plan_with
from tests.runtime.adversarial import AdversarialDevice, OpClock  # the tests' own device
from tests.runtime.nets import Case, equal, train  # the list and its helpers are the tests'
from tests.runtime.third_party_networks import NETWORKS, random_schedule

STEPS = 3
DEVICES = "cpu", "adversarial"


def trained(case: Case, plan: Plan, device: str) -> tuple[list[list[torch.Tensor]], Report, list[str]]:
    """What the steps left behind, the report, and what the adversarial device had to complain of."""
    adversarial = AdversarialDevice(OpClock()) if device == "adversarial" else None
    with adversarial.clock if adversarial else contextlib.nullcontext():
        seen, report = train(case, STEPS, plan, meter="always", device=(lambda: adversarial) if adversarial else None)
    assert report is not None
    return seen, report, adversarial.violations if adversarial else []


def rows_of(name: str, case: Case, plans: int) -> list[dict[str, Any]]:
    """One row for each random plan of a network, on each device."""
    reference, _ = train(case, STEPS)
    profile = case.profile()
    problem = build_problem(profile)
    rows = []
    for seed in range(plans):
        schedule = random_schedule(profile, problem, seed)
        predicted_bytes = simulate(problem, schedule).peak_bytes
        for device in DEVICES:
            planned, report, violations = trained(case, plan_with(profile, schedule), device)
            rows.append(
                {
                    "network": name,
                    "seed": seed,
                    "device": device,
                    "decisions": dict(Counter(map(str, schedule.decisions))),
                    "saved_values": problem.value_count,
                    "replayed_values": report.last_step.replayed_values,
                    "swapped_in_bytes": report.last_step.in_bytes,
                    "bitwise": equal(reference, planned),
                    "in_core_peak_bytes": profile.in_core_peak_bytes,
                    "predicted_peak_bytes": predicted_bytes,
                    "metered_peak_bytes": report.total.peak_bytes,
                    "within_predicted": (report.total.peak_bytes or 0) <= predicted_bytes,
                    "fallbacks": report.total.fallbacks,
                    "complaints": [*report.total.fallback_reasons, *violations],
                }
            )
    return rows


def passed(row: dict[str, Any]) -> bool:
    return bool(row["bitwise"] and row["within_predicted"] and not row["fallbacks"] and not row["complaints"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--plans", type=int, default=5, help="random plans for each network")
    parser.add_argument("-o", "--output", default=None, help="write the rows as JSON here")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.networks.split(","):
        start_s = time.perf_counter()
        found = rows_of(name, NETWORKS[name], arguments.plans)
        gc.collect()
        rows += found
        good = sum(map(passed, found))
        print(f"{name}: {good} of {len(found)} plans as promised, {time.perf_counter() - start_s:.0f} s", flush=True)
    good, networks = sum(map(passed, rows)), len({row["network"] for row in rows})
    print(
        f"{good} of {len(rows)} plans of {networks} networks: bitwise, within the predicted peak, nothing left undone"
    )
    if arguments.output:
        facts = facts_of_run(arguments, (*PACKAGES, "transformers", "monai"))
        summary = {"networks": networks, "plans": len(rows), "as_promised": good}
        write_results(arguments.output, facts | {"summary": summary, "rows": rows})
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
