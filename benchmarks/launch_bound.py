"""Steps that are bound by launching: what plans promise beside what their steps take, on the null GPU (tests/nullgpu).

    NULLGPU_BY_PROCESSOR=1 NULLGPU_SECONDS=18 NULLGPU_LINK_GBPS=450 NULLGPU_COPIED_BYTES=65536 \
        PYTHONPATH=src OMP_NUM_THREADS=1 .venv-torch-2.14.1/bin/python -m tests.nullgpu \
        python -m benchmarks.launch_bound -o benchmarks/results/launch-bound.json

GPT-2 of 12 layers under autocast, small enough that its ops are those of a GPU that is never full; ``NULLGPU_SECONDS``
says how much longer they take than on an H100, and the link is as much faster, for its copies are slowed too. Time
passes while this process computes or waits for the GPU, so other processes do not count; they do disturb the caches.
Plans of the planner at budgets, and decisions at random. Planned steps and those in-core take turns; the quickest of
each counts, on the wall and of the launching threads.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from statistics import median
from typing import NamedTuple

import torch

import poochplan
from benchmarks.facts import Row, facts_of_run, parser_of, table_head, table_row, write_results
from benchmarks.pairs import in_pairs
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.writing import with_decisions
from poochplan.workload import Workload
from poochplan.workloads.text import gpt2
from tests.runtime.random_plans import random_plan

WHERE = torch.device("cuda", 0)
BUDGETS = ("100%", "80%", "60%", "smallest")
RANDOM = {"a tenth recomputed": (8, 0, 1), "mixed": (1, 2, 2), "all recomputed": (0, 0, 1)}
"""Decisions by what they are drawn from: keep, swap, recompute."""
WARM_STEPS = 3


class Seconds(NamedTuple):
    """On the wall, and of the processor in forward and in backward."""

    step_s: float
    forward_s: float
    backward_s: float


def network() -> Workload:
    torch.manual_seed(0)
    sizes = {"batch_size": 4, "sequence_length": 256, "layers": 12, "width": 256, "heads": 4, "vocabulary": 2048}
    made = gpt2(device=str(WHERE), **sizes)  # type: ignore[arg-type]

    def step() -> torch.Tensor:
        with torch.autocast(WHERE.type, torch.bfloat16):
            return made.step()

    return Workload(made.model, step, made.optimizer)


def one_step(workload: Workload) -> Seconds:
    assert workload.optimizer is not None
    workload.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize(WHERE)
    start_s, begin_s = time.perf_counter(), time.process_time()
    loss = workload.step()
    middle_s = time.process_time()
    loss.backward()  # type: ignore[no-untyped-call]
    end_s = time.process_time()
    workload.optimizer.step()
    torch.cuda.synchronize(WHERE)
    return Seconds(time.perf_counter() - start_s, middle_s - begin_s, end_s - middle_s)


def plans(profile: Profile, plan_s: float) -> dict[str, Plan]:
    made = {}
    for name in BUDGETS:
        budget = smallest_budget(profile) if name == "smallest" else name
        made[name] = poochplan.plan(profile, budget, time_limit_s=plan_s, threads=1)
    free = {value.name for value in made["100%"].values if not value.why}
    for name, weights in RANDOM.items():
        drawn = {value.name: value.decision for value in random_plan(profile, 0, weights).values}
        wish = {one: wanted for one, wanted in drawn.items() if one in free and wanted is not Decision.KEEP}
        made[name] = with_decisions(profile, made["100%"], wish)
    return made


def under(workload: Workload, plan: Plan, steps: int) -> Row:
    options = {"on_over_budget": "warn", "meter": "never", "on_audit": "off", "quiet": True}
    with poochplan.apply(plan, workload.model, **options) as session:  # type: ignore[arg-type]

        def plain() -> Seconds:
            with session.away():
                return one_step(workload)

        def planned() -> Seconds:
            return one_step(workload)

        for _ in range(WARM_STEPS):
            plain(), planned()
        pairs = in_pairs(plain, planned, steps)
        fallbacks = session.report().total.fallbacks
    (in_core, least), ratios = (
        (Seconds(*map(min, zip(*one, strict=True))) for one in zip(*pairs, strict=True)),
        [two.step_s / one.step_s for one, two in pairs],
    )
    return {
        "decisions": dict(Counter(str(value.decision) for value in plan.values)),
        "promised": plan.prediction.overhead,
        "promised_step_s": plan.prediction.step_s,
        "found": least.step_s / in_core.step_s - 1,
        "found_median": median(ratios) - 1,
        "in_core": in_core._asdict(),
        "planned": least._asdict(),
        "fallbacks": fallbacks,
    }


def line(name: str, row: Row) -> str:
    def processor(way: str) -> str:
        return " / ".join(f"{1e3 * row[way][part]:.1f}" for part in ("forward_s", "backward_s"))

    steps = (row["promised_step_s"], row["planned"]["step_s"], row["in_core"]["step_s"])
    overheads = (f"{row[what]:+.1%}" for what in ("promised", "found", "found_median"))
    milliseconds = (f"{1e3 * seconds:.1f}" for seconds in steps)
    return table_row(name, *overheads, *milliseconds, processor("in_core"), processor("planned"))


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__, "python -m benchmarks.launch_bound", steps=10, iterations=5, plan_s=2.0)
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    workload = network()
    profile = poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, iterations=arguments.iterations
    )
    cost, found = profile.runtime, dict[str, Row]()
    print(cost, f"in-core {1e3 * profile.times.step_s:.1f} ms, {len(profile.ops)} ops")
    columns = ("plan", "promised", "found", "median", "promised ms", "found ms", "in-core ms")
    print(table_head(*columns, "processor in-core", "planned"))
    for name, plan in plans(profile, arguments.plan_s).items():
        found[name] = under(workload, plan, arguments.steps)
        print(line(name, found[name]), flush=True)
        write_results(arguments.output, facts_of_run(arguments) | {"costs": repr(cost), "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
