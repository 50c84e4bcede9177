"""GPT-2 whose blocks are compiled one by one, with and without deferred unpacks: smallest budget, overhead.

    OMP_NUM_THREADS=1 python -m benchmarks.regions -o benchmarks/results/regions.json

Each variant is a process of its own: ``stock`` compiles its blocks before the profile, so that a backward has all that
it saved brought back as it begins; ``arrivals`` compiles them inside. Both are planned at the smallest budget of
``stock`` and at shares of its in-core peak, ``arrivals`` at its own smallest one too. The meter of bytes is the outside
hook. Links are held to 400 MB/s, and a ratio is that of planned to in-core steps of the same variant. A simulated
overhead, behind a link as fast as the step, stands beside it.
"""

from __future__ import annotations

import copy
import json

import msgspec
import torch

import poochplan
from benchmarks.facts import Row, facts_of_run, parser_of, write_results
from benchmarks.hooked import Trained, train_anew
from benchmarks.pairs import Planned, compared, in_pairs, load, one_step, profiled
from benchmarks.processes import answer_of
from poochplan.formats.profile import Link, LinkDirection, Profile
from tests.allocated_bytes import allocated_bytes

SETTINGS = {"batch_size": "4", "sequence_length": "128", "layers": "3", "width": "128", "heads": "4"}
SETTINGS |= {"vocabulary": "512"}
SHARES = (0.8, 0.7)
PAIRS = 20
STEPS = 3
"""Of which bits and bytes are told."""


def variant(name: str, budgets: list[int]) -> Row:
    """What one process finds; ``budgets`` in bytes, or none for those that follow from its own profile."""
    allocated_bytes()  # before anything is allocated
    torch.set_num_threads(1)
    work = load("gpt2", SETTINGS)
    for block in work.model.get_submodule("transformer.h").children():
        block.compile()
    initial = copy.deepcopy(work.model.state_dict())
    if name == "stock":
        one_step(work)
    profile = profiled(work, "", throttle="400MB/s")
    smallest = poochplan.smallest_budget(profile)
    budgets = budgets or [int(share * profile.in_core_peak_bytes) for share in SHARES] + [smallest]
    inputs = (value for value in profile.values if value.kind == "input")
    input_bytes = sum(profile.rounded_bytes(value.size_bytes) for value in inputs)

    def steps(plan: poochplan.Plan | None = None) -> Trained:
        work.model.load_state_dict(initial)
        if plan is None:
            return train_anew(work, STEPS, input_bytes=input_bytes)
        with poochplan.apply(plan, work.model, arena="off", meter="never") as session:
            return train_anew(work, STEPS, session, input_bytes)

    in_core = steps()

    def row(budget: int) -> Row:
        """One plan: what it promises, what its steps take, and how much slower they are."""
        plan = poochplan.plan(profile, budget, arena="off", time_limit_s=6)
        planned, bench = steps(plan), Planned(work, plan)
        with bench.session:
            for _ in range(3):
                bench.planned()
            pairs = in_pairs(bench.plain, bench.planned, PAIRS)
        return {
            "budget_bytes": budget,
            "predicted_bytes": plan.prediction.peak_bytes,
            "most_bytes": max(planned.peaks),
            "bitwise": planned.gradients == in_core.gradients,
            "fallbacks": planned.fallbacks,
            "predicted_overhead": round(plan.prediction.overhead, 4),
            "simulated_overhead": _simulated(profile, budget),
            "step": compared(pairs),
        }

    return {
        "variant": name,
        "region_ops": sum(op.name == "compiled_region" for op in profile.ops),
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_step_s": round(profile.times.step_s, 5),
        "in_core_most_bytes": max(in_core.peaks),
        "digest": in_core.gradients,
        "smallest_budget_bytes": smallest,
        "rows": [row(budget) for budget in dict.fromkeys([*budgets, smallest]) if budget >= smallest],
    }


def _simulated(profile: Profile, budget: int) -> float:
    """The predicted overhead behind a link that takes all that is saved one way in the time of one in-core step."""
    saved_bytes = sum(profile.values[number].size_bytes for number in {handle.value for handle in profile.handles})
    line = LinkDirection(latency_s=0.0, bandwidth_bytes_per_s=saved_bytes / profile.times.step_s)
    scaled = msgspec.structs.replace(profile, link=Link(name="scaled", outward=line, inward=line), runtime=None)
    return round(poochplan.plan(scaled, budget, arena="off", evaluations=2000).prediction.overhead, 4)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--variant", choices=["stock", "arrivals"])
    parser.add_argument("--budgets", type=int, nargs="*", default=[])
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(variant(given.variant, given.budgets)))
        return
    stock = answer_of("benchmarks.regions", ["--variant", "stock"])
    budgets = [str(row["budget_bytes"]) for row in stock["rows"]]
    arrivals = answer_of("benchmarks.regions", ["--variant", "arrivals", "--budgets", *budgets])
    same = stock["digest"] == arrivals["digest"]
    found = facts_of_run(given) | {"settings": SETTINGS, "bitwise_across": same, "variants": [stock, arrivals]}
    write_results(given.output, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
