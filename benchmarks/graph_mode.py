"""Networks compiled with a plan inside their code, against the same networks compiled by Inductor as they are.

    OMP_NUM_THREADS=1 python -m benchmarks.graph_mode -o benchmarks/results/graph_mode.json
    OMP_NUM_THREADS=1 python -m benchmarks.graph_mode compile-time -o benchmarks/results/graph_compile_time.json
    OMP_NUM_THREADS=1 python -m benchmarks.graph_mode capture -o benchmarks/results/graph_capture.json

``steps``: each network and budget is a process of its own. It compiles the network as it is, and another one of the
same seed by ``poochplan.compile``. Told are: whether loss and all gradients of three steps are the same bits, the most
bytes a step takes by the outside hook beside the predicted ones, planned and in-core steps in pairs, the seconds of
both compiles. ``smallest`` is the smallest budget that any of the graphs' rounds finds a plan for. Links are held to
400 MB/s, here and in ``compile-time``.

``compile-time``: each figure is a process of its own, from the model to the end of its second step (some networks are
compiled twice, as their first step writes into their configuration). *Cold* ratios are those of ``poochplan.compile``
with a budget to ``torch.compile``, each with an empty cache of the compiler; *warm* ones those of ``poochplan.compile``
with the plan that was found to ``torch.compile``, each with the cache that the cold one has filled. Seconds are told on
the wall and of the processor, with child processes.

``capture``: networks as the compiler's graphs and as eager ops, both without memory: peak, plan and gap, simulated with
a V100's roofline behind PCIe 3. What is never in memory once the compiler has fused it counts no bytes and no seconds
in the graphs (``profiler/graphs/fusion.py``), so that recomputing costs less there and less is saved.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch

import poochplan
from benchmarks.against.compared_networks import fresh
from benchmarks.facts import Row, parser_of, taken
from benchmarks.hooked import train_anew
from benchmarks.pairs import Seconds, compared, in_pairs, load, one_step, profiled
from benchmarks.plans import decisions_of
from benchmarks.processes import answer_of
from poochplan.errors import InfeasibleError, StepError
from poochplan.profiler.fake.fake import building
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
COMPILED, BUDGET, PLAN = ("gpt2", "bert", "vit"), "60%", "plan.json"
"""Of ``compile-time``."""
TRIES = 4
"""Calls for the smallest budget: one search does not always find what another has told."""


MEDIUM = {"batch_size": "8", "sequence_length": "1024", "layers": "24", "width": "1024", "heads": "16"}
CAPTURED: dict[str, tuple[str, dict[str, str]]] = {
    "resnet50 b256": ("resnet50", {"batch_size": "256", "image_size": "224"}),
    "gpt2 medium": ("gpt2", MEDIUM | {"vocabulary": "50257"}),
}
SHARES = (0.6, 0.4)
TIME_LIMIT_S = 30.0


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
    assert plan is not None
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


def compiled(name: str, how: str, folder: Path) -> Row:
    """Seconds that one process takes."""
    importlib.import_module("torch._inductor.compile_fx")  # what it takes to load is no part of it
    torch.set_num_threads(1)
    work, parts = fresh(name), _Parts()
    if how == "stock":
        compile_module(work.model, dynamic=False)
        one_step(work)
        one_step(work)
        return parts.told()
    if how == "planned":
        given: Row = {"optimizer": work.optimizer, "budget": BUDGET, "throttle": THROTTLE, "progress": parts.begin}
        session = poochplan.compile(work.model, work.step, **given)
        session.plan.save(folder / PLAN)
    else:
        session = poochplan.compile(work.model, plan=poochplan.Plan.load(folder / PLAN))
    parts.begin("two steps")
    with session:
        one_step(work)
        one_step(work)
    return parts.told()


class _Parts:
    """Seconds of what is done one after the other. State: when the last one began."""

    def __init__(self) -> None:
        self._began = self._last = _now()
        self._what = "begin"
        self._wall_s: dict[str, float] = {}

    def begin(self, what: str) -> None:
        now = _now()
        self._wall_s[self._what] = round(self._wall_s.get(self._what, 0.0) + now[0] - self._last[0], 2)
        self._last, self._what = now, what

    def told(self) -> Row:
        self.begin("end")
        (wall_s, cpu_s), (began_s, began_cpu_s) = self._last, self._began
        return {"wall_s": round(wall_s - began_s, 2), "cpu_s": round(cpu_s - began_cpu_s, 2), "parts": self._wall_s}


def _now() -> tuple[float, float]:
    return time.perf_counter(), sum(os.times()[:4])


def compile_times(name: str, repeats: int) -> Row:
    found: dict[str, list[Row]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as ours:
            runs = {"stock_cold": ("stock", plain), "planned_cold": ("planned", ours)}
            for key, words in (runs | {"stock_warm": ("stock", plain), "planned_warm": ("from-plan", ours)}).items():
                caches = {"TORCHINDUCTOR_CACHE_DIR": words[1]}
                answer = answer_of("benchmarks.graph_mode", ["compile-time", "--one", name, *words], caches)
                found.setdefault(key, []).append(answer)
    ratios = {
        f"{state}_{clock}": [
            round(ours[f"{clock}_s"] / plain[f"{clock}_s"], 3)
            for ours, plain in zip(found[f"planned_{state}"], found[f"stock_{state}"], strict=True)
        ]
        for state in ("cold", "warm")
        for clock in ("wall", "cpu")
    }
    medians = {key: median(values) for key, values in ratios.items()}
    return {"network": name, "budget": BUDGET, "median_ratios": medians, "ratios": ratios, "runs": found}


def captured(name: str) -> list[Row]:
    config, settings = CAPTURED[name]
    found = []
    for kind in ("eager", "graphs"):
        with building():
            work = load(config, settings)
        if kind == "graphs":
            work.model.compile(dynamic=False)
        found.append(_row(name, kind, work))
    return found


def _row(name: str, kind: str, work: Workload) -> Row:
    began_s = time.perf_counter()
    profile = profiled(work, "", mode="fake", roofline="v100")
    capture_s = time.perf_counter() - began_s
    peak_bytes = profile.in_core_peak_bytes
    saved = {handle.value for handle in profile.handles}
    plans = []
    for share in SHARES:
        plan = poochplan.plan(profile, int(share * peak_bytes), time_limit_s=TIME_LIMIT_S)
        costs = {"overhead": plan.prediction.overhead, "gap": plan.solve.gap}
        plans.append({"share": share, **costs, "decided": decisions_of(plan)})
    return {
        "network": name,
        "captured": kind,
        "capture_s": round(capture_s, 1),
        "ops": len(profile.ops),
        "in_core_peak_bytes": peak_bytes,
        "saved_bytes": sum(profile.values[number].size_bytes for number in saved),
        "in_core_step_s": round(profile.times.step_s, 5),
        "smallest_share": round(poochplan.smallest_budget(profile) / peak_bytes, 4),
        "plans": plans,
    }


def main() -> None:
    parser = parser_of(__doc__, budgets=list(BUDGETS), pairs=PAIRS, repeats=3)
    parser.add_argument("what", nargs="?", choices=("steps", "compile-time", "capture"), default="steps")
    parser.add_argument("--networks", nargs="+", help="default: all")
    parser.add_argument("--row", nargs=2, metavar=("NETWORK", "BUDGET"), help="this one alone, in this process")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    every = {"steps": NETWORKS, "compile-time": COMPILED, "capture": tuple(CAPTURED)}[given.what]
    names = given.networks or every
    if given.row:
        print(json.dumps(row(*given.row, given.pairs)))
    elif given.one:
        name, how, folder = given.one
        print(json.dumps(compiled(name, how, Path(folder))))
    elif given.what == "steps":

        def answer(case: tuple[str, str]) -> Row:
            return answer_of("benchmarks.graph_mode", ["--row", *case, "--pairs", str(given.pairs)])

        taken(given, product(names, given.budgets), answer, throttle=THROTTLE)
    elif given.what == "compile-time":

        def shown(row: Row) -> str:
            return json.dumps(row["median_ratios"] | {"network": row["network"]})

        taken(given, names, lambda name: compile_times(name, given.repeats), shown, throttle=THROTTLE)
    else:
        taken(given, names, captured)


if __name__ == "__main__":
    main()
