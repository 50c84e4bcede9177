"""GPT-2 whose blocks are compiled one by one, with and without deferred unpacks: smallest budget, overhead.

    OMP_NUM_THREADS=1 python -m benchmarks.regions -o benchmarks/results/regions.json

Each variant is a process of its own: ``stock`` compiles its blocks before the profile, so that a backward has all that
it saved brought back as it begins; ``arrivals`` compiles them inside. Both are planned at the smallest budget of
``stock`` and at shares of its in-core peak, ``arrivals`` at its own smallest one too. The meter of bytes is the outside
hook. Links are held to 400 MB/s, and a ratio is that of planned to in-core steps of the same variant. A machine is
not as fast in one process as in the next, so a simulated overhead stands beside it, behind a link as fast as the step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.facts import facts_of_run, write_results
from tests.allocated_bytes import AllocatedBytes, allocated_bytes

SETTINGS = {"batch_size": "4", "sequence_length": "128", "layers": "3", "width": "128", "heads": "4"}
SETTINGS |= {"vocabulary": "512"}
SHARES = (0.8, 0.7)
PAIRS = 20
STEPS = 3
"""Of which bits and bytes are told."""


def variant(name: str, budgets: list[int]) -> dict[str, Any]:
    """What one process finds; ``budgets`` in bytes, or none for those that follow from its own profile."""
    meter = allocated_bytes()  # before anything is allocated
    import torch

    import poochplan
    from benchmarks.pairs import one_step
    from poochplan.planner.planning import smallest_budget

    torch.set_num_threads(1)
    work = _compiled()
    bench = Bench(work, meter)
    if name == "stock":
        one_step(work)
    profile = poochplan.profile(work.step, model=work.model, optimizer=work.optimizer, throttle="400MB/s")
    smallest = smallest_budget(profile)
    budgets = budgets or [int(share * profile.in_core_peak_bytes) for share in SHARES] + [smallest]
    ops = sum(op.name == "compiled_region" for op in profile.ops)
    inputs = (value for value in profile.values if value.kind == "input")
    bench.input_bytes = sum(profile.rounded_bytes(value.size_bytes) for value in inputs)
    in_core = bench.steps(None)
    wanted = [budget for budget in dict.fromkeys([*budgets, smallest]) if budget >= smallest]
    rows = [bench.row(profile, budget, in_core) for budget in wanted]
    return {
        "variant": name,
        "region_ops": ops,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_step_s": round(profile.times.step_s, 5),
        "in_core_most_bytes": max(in_core["peaks"]),
        "digest": in_core["digest"],
        "smallest_budget_bytes": smallest,
        "rows": rows,
    }


def _simulated(profile: Any, budget: int) -> float:
    """The predicted overhead behind a link that takes all that is saved one way in the time of one in-core step."""
    import msgspec

    import poochplan
    from poochplan.formats.profile import Link, LinkDirection

    saved_bytes = sum(profile.values[number].size_bytes for number in {handle.value for handle in profile.handles})
    line = LinkDirection(latency_s=0.0, bandwidth_bytes_per_s=saved_bytes / profile.times.step_s)
    scaled = msgspec.structs.replace(profile, link=Link(name="scaled", outward=line, inward=line), runtime=None)
    return round(poochplan.plan(scaled, budget, arena="off", evaluations=2000).prediction.overhead, 4)


def _compiled() -> Any:
    from benchmarks.pairs import load

    work = load("gpt2", SETTINGS)
    for block in work.model.get_submodule("transformer.h").children():
        block.compile()
    return work


class Bench:
    """One compiled workload, whose steps begin from the same weights each time."""

    def __init__(self, work: Any, meter: AllocatedBytes) -> None:
        self._work, self._meter = work, meter
        self._initial = copy.deepcopy(work.model.state_dict())
        self.input_bytes = 0

    def row(self, profile: Any, budget: int, in_core: dict[str, Any]) -> dict[str, Any]:
        """One plan: what it promises, what its steps take, and how much slower they are."""
        import poochplan
        from benchmarks.pairs import Planned, compared, in_pairs

        plan = poochplan.plan(profile, budget, arena="off", time_limit_s=6)
        planned = self.steps(plan)
        bench = Planned(self._work, plan)
        with bench.session:
            for _ in range(3):
                bench.planned()
            pairs = in_pairs(bench.plain, bench.planned, PAIRS)
        return {
            "budget_bytes": budget,
            "predicted_bytes": plan.prediction.peak_bytes,
            "most_bytes": max(planned["peaks"]),
            "bitwise": planned["digest"] == in_core["digest"],
            "fallbacks": planned["fallbacks"],
            "predicted_overhead": round(plan.prediction.overhead, 4),
            "simulated_overhead": _simulated(profile, budget),
            "step": compared(pairs),
        }

    def steps(self, plan: Any) -> dict[str, Any]:
        """Peaks, and a digest of all gradients, of some steps in-core or planned."""
        import torch

        import poochplan

        model, optimizer = self._work.model, self._work.optimizer
        model.load_state_dict(self._initial)
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        gc.collect()
        own = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.state_dict().values()}
        beside_bytes = self._meter.live - sum(own.values()) - self.input_bytes
        digest, peaks = hashlib.sha256(), []
        with contextlib.ExitStack() as stack:
            session = None
            if plan is not None:
                session = stack.enter_context(poochplan.apply(plan, model, arena="off", meter="never"))
            for _ in range(STEPS):
                optimizer.zero_grad(set_to_none=True)
                self._meter.restart()
                loss = self._work.step()
                loss.backward()
                for parameter in model.parameters():
                    digest.update(parameter.grad.numpy().tobytes())
                optimizer.step()
                peaks.append(self._meter.peak - beside_bytes)
        fallbacks = session.report().total.fallbacks if session is not None else 0
        return {"peaks": peaks, "digest": digest.hexdigest()[:16], "fallbacks": fallbacks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--variant", choices=["stock", "arrivals"])
    parser.add_argument("--budgets", type=int, nargs="*", default=[])
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(variant(given.variant, given.budgets)))
        return
    from benchmarks.measured_steps import answer_of

    stock = answer_of("benchmarks.regions", ["--variant", "stock"])
    budgets = [str(row["budget_bytes"]) for row in stock["rows"]]
    arrivals = answer_of("benchmarks.regions", ["--variant", "arrivals", "--budgets", *budgets])
    same = stock["digest"] == arrivals["digest"]
    found = facts_of_run(given) | {"settings": SETTINGS, "bitwise_across": same, "variants": [stock, arrivals]}
    write_results(given.output, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
