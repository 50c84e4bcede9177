"""Networks compiled with a plan inside their code, against the same networks compiled by Inductor as they are.

    OMP_NUM_THREADS=1 python -m benchmarks.graph_mode -o benchmarks/results/graph_mode.json

Each network and budget is a process of its own. It compiles the network as it is, and another one of the same seed by
``poochplan.compile``. Told are: whether loss and all gradients of three steps are the same bits, the most bytes a step
takes by the outside hook beside the predicted ones, planned and in-core steps in pairs, the seconds of both compiles.
``smallest`` is the smallest budget that any of the graphs' rounds finds a plan for. Links are held to 400 MB/s.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.facts import facts_of_run, write_results
from benchmarks.measured_steps import answer_of
from tests.allocated_bytes import AllocatedBytes, allocated_bytes

NETWORKS = ("gpt2", "bert", "vit", "resnet50", "unet3d")
BUDGETS = ("80%", "60%", "smallest")
PAIRS = 40
STEPS = 3
"""Of which bits and bytes are told."""
THROTTLE = "400MB/s"
TRIES = 4
"""Calls for the smallest budget: one search does not always find what another has told."""


def row(name: str, budget: str, pairs: int) -> dict[str, Any]:
    """What one process finds."""
    meter = allocated_bytes()  # before anything is allocated
    import torch

    import poochplan
    from benchmarks.against.compared_networks import fresh
    from benchmarks.pairs import compared, in_pairs, one_step
    from poochplan.errors import InfeasibleError, StepError
    from poochplan.torch_private.compiler_internals import compile_module

    torch.set_num_threads(1)
    stock = fresh(name)
    initial = copy.deepcopy(stock.model.state_dict())
    compile_module(stock.model, dynamic=False)
    began_s = time.perf_counter()
    one_step(stock)
    compile_s = time.perf_counter() - began_s
    stock.model.load_state_dict(initial)
    in_core = told_steps(stock, meter)
    work = fresh(name)
    began_s = time.perf_counter()
    try:
        session = _compiled(work, budget)
    except (InfeasibleError, StepError) as error:
        return {"network": name, "budget": budget, "refused": str(error)}
    planning_s = time.perf_counter() - began_s
    plan = session.plan
    with poochplan.apply(plan, work.model, arena="off", meter="never"):
        planned = told_steps(work, meter)
    with session:
        for _ in range(4):
            one_step(work)

        def plain() -> tuple[float, float]:
            with session.away():
                return one_step(stock)

        plain()
        found = in_pairs(plain, lambda: one_step(work), pairs)
        report = session.report()
    return {
        "network": name,
        "budget": budget,
        "budget_bytes": plan.budget_bytes,
        "in_core_peak_bytes": plan.prediction.in_core_peak_bytes,
        "in_core_most_bytes": in_core["most_bytes"],
        "predicted_bytes": plan.prediction.peak_bytes,
        "most_bytes": planned["most_bytes"],
        "bitwise": planned["digest"] == in_core["digest"],
        "recomputed": len(plan.replays),
        "swapped_bytes": plan.prediction.out_bytes,
        "predicted_overhead": round(plan.prediction.overhead, 4),
        "steps_not_as_planned": report.total.fallbacks,
        "step": compared(found),
        "compile_s": round(compile_s, 1),
        "planning_s": round(planning_s, 1),
    }


def _compiled(work: Any, budget: str) -> Any:
    import poochplan
    from poochplan.errors import InfeasibleError

    wanted: str | int = 1 if budget == "smallest" else budget
    for _ in range(TRIES):
        try:
            return poochplan.compile(work.model, work.step, optimizer=work.optimizer, budget=wanted, throttle=THROTTLE)
        except InfeasibleError as error:
            if budget != "smallest":
                raise
            told, wanted = error, error.smallest_budget_bytes
    raise told


def told_steps(work: Any, meter: AllocatedBytes) -> dict[str, Any]:
    """A digest of loss and gradients of some steps from the first weights on, and the most bytes that one took."""
    import torch

    model, optimizer = work.model, work.optimizer
    torch.manual_seed(1)
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    own_bytes = sum(tensor.untyped_storage().nbytes() for tensor in _storages(model))
    beside_bytes = meter.live - own_bytes
    digest, most_bytes = hashlib.sha256(), 0
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        meter.restart()
        loss = work.step()
        loss.backward()
        digest.update(str(loss.item()).encode())
        for parameter in model.parameters():
            digest.update(parameter.grad.contiguous().numpy().tobytes())
        optimizer.step()
        most_bytes = max(most_bytes, meter.peak - beside_bytes)
    return {"digest": digest.hexdigest()[:16], "most_bytes": most_bytes}


def _storages(model: Any) -> list[Any]:
    by_place = {tensor.untyped_storage().data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return list(by_place.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--budgets", nargs="*", default=list(BUDGETS))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "BUDGET"), help="this one alone, in this process")
    given = parser.parse_args()
    if given.row:
        print(json.dumps(row(*given.row, given.pairs)))
        return
    rows = []
    for name in given.networks:
        for budget in given.budgets:
            rows.append(answer_of("benchmarks.graph_mode", ["--row", name, budget, "--pairs", str(given.pairs)]))
            print(json.dumps(rows[-1]), flush=True)
            write_results(given.output, facts_of_run(given) | {"throttle": THROTTLE, "rows": rows})


if __name__ == "__main__":
    main()
