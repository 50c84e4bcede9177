"""Networks compiled with a plan inside their code, against the same networks compiled by Inductor as they are.

    OMP_NUM_THREADS=1 python -m benchmarks.graph_mode -o benchmarks/results/graph_mode.json

Each network and budget is a process of its own. It compiles the network as it is, and another one of the same seed by
``poochplan.compile``. Told are: whether loss and all gradients of three steps are the same bits, the most bytes a step
takes by the outside hook beside the predicted ones, planned and in-core steps in pairs, the seconds of both compiles.
``smallest`` is the smallest budget that any of the graphs' rounds finds a plan for. Links are held to 400 MB/s.
"""

from __future__ import annotations

import copy
import json
import time
from itertools import product

import torch

import poochplan
from benchmarks.against.compared_networks import fresh
from benchmarks.facts import Row, parser_of, taken
from benchmarks.hooked import train_anew
from benchmarks.pairs import Seconds, compared, in_pairs, one_step
from benchmarks.processes import answer_of
from poochplan.errors import InfeasibleError, StepError
from poochplan.runtime.session import Session
from poochplan.torch_private.compiler_internals import compile_module
from poochplan.workload import Workload
from tests.allocated_bytes import allocated_bytes

NETWORKS = ("gpt2", "bert", "vit", "resnet50", "unet3d")
BUDGETS = ("80%", "60%", "smallest")
PAIRS = 40
STEPS = 3
"""Of which bits and bytes are told."""
THROTTLE = "400MB/s"
TRIES = 4
"""Calls for the smallest budget: one search does not always find what another has told."""


def row(name: str, budget: str, pairs: int) -> Row:
    """What one process finds."""
    allocated_bytes()  # before anything is allocated
    torch.set_num_threads(1)
    stock = fresh(name)
    initial = copy.deepcopy(stock.model.state_dict())
    compile_module(stock.model, dynamic=False)
    began_s = time.perf_counter()
    one_step(stock)
    compile_s = time.perf_counter() - began_s
    stock.model.load_state_dict(initial)
    in_core = train_anew(stock, STEPS)
    work = fresh(name)
    began_s = time.perf_counter()
    try:
        session = _compiled(work, budget)
    except (InfeasibleError, StepError) as error:
        return {"network": name, "budget": budget, "refused": str(error)}
    planning_s = time.perf_counter() - began_s
    plan = session.plan
    with poochplan.apply(plan, work.model, arena="off", meter="never"):
        planned = train_anew(work, STEPS)
    with session:
        for _ in range(4):
            one_step(work)

        def plain() -> Seconds:
            with session.away():
                return one_step(stock)

        plain()
        found = in_pairs(plain, lambda: one_step(work), pairs)
        report = session.report()
    promised = plan.prediction
    return {
        "network": name,
        "budget": budget,
        "budget_bytes": plan.budget_bytes,
        "in_core_peak_bytes": promised.in_core_peak_bytes,
        "in_core_most_bytes": max(in_core.peaks),
        "predicted_bytes": promised.peak_bytes,
        "most_bytes": max(planned.peaks),
        "bitwise": planned.gradients == in_core.gradients,
        "recomputed": len(plan.replays),
        "swapped_bytes": promised.out_bytes,
        "predicted_overhead": round(promised.overhead, 4),
        "steps_not_as_planned": report.total.fallbacks,
        "step": compared(found),
        "compile_s": round(compile_s, 1),
        "planning_s": round(planning_s, 1),
    }


def _compiled(work: Workload, budget: str) -> Session:
    wanted: str | int = 1 if budget == "smallest" else budget
    for _ in range(TRIES):
        try:
            return poochplan.compile(work.model, work.step, optimizer=work.optimizer, budget=wanted, throttle=THROTTLE)
        except InfeasibleError as error:
            if budget != "smallest":
                raise
            told, wanted = error, error.smallest_budget_bytes
    raise told


def main() -> None:
    parser = parser_of(__doc__, networks=list(NETWORKS), budgets=list(BUDGETS), pairs=PAIRS)
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "BUDGET"), help="this one alone, in this process")
    given = parser.parse_args()
    if given.row:
        print(json.dumps(row(*given.row, given.pairs)))
        return

    def answer(case: tuple[str, str]) -> Row:
        return answer_of("benchmarks.graph_mode", ["--row", *case, "--pairs", str(given.pairs)])

    taken(given, product(given.networks, given.budgets), answer, throttle=THROTTLE)


if __name__ == "__main__":
    main()
