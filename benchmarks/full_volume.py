"""A 3D U-Net trained on whole volumes under a plan, against patches: Dice, seconds and bytes, at equal cost.

    python -m benchmarks.full_volume -o benchmarks/results/full-volume.json
    python -m benchmarks.full_volume --table benchmarks/results/full-volume.json    prints the table of the page

Both ways have the same seconds and seeds, and the bytes that training on patches takes in-core: they are the budget of
the plan. Seconds are those of CPU in training steps. Of each seed both run at the same time, each in a process of one
compute thread on one core; every two seconds the two change cores, so that what else runs meets both alike. Bytes are
by the allocator hook of the tests, with an arena whole on top. Cases: ``benchmarks/volume_cases.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import poochplan
from benchmarks.facts import PACKAGES, Row, facts_of_run, parser_of, write_results
from benchmarks.measured_steps import arena_bytes
from benchmarks.pairs import Planned
from benchmarks.plans import decisions_of, predicted
from benchmarks.processes import in_a_process
from benchmarks.volume_cases import GRID, Case, deformed, other_scanner, template
from benchmarks.volume_tables import lines
from benchmarks.volume_training import METHODS, Method, Setting, Training, dice, train
from poochplan.formats.plan import Plan
from poochplan.workload import Workload
from tests.allocated_bytes import AllocatedBytes, allocated_bytes

SETTING = Setting()
TURN_S = 2.0
FIRST_HELD_OUT = 100
"""Seed of the first held-out case; training cases have those from 0 on."""
PLANNER_S = 30.0


def cases_of(training: int, held_out: int) -> tuple[list[Case], list[Case]]:
    """Copies to train on, and others that no training sees."""
    of = template(GRID)
    return (
        [deformed(of, seed) for seed in range(training)],
        [deformed(of, FIRST_HELD_OUT + seed) for seed in range(held_out)],
    )


def in_core_bytes(method: Method, cases: list[Case]) -> int:
    """Most allocated bytes of four ordinary steps."""
    torch.set_num_threads(1)
    meter = allocated_bytes()
    training = Training(method, SETTING, cases, seed=0)
    for _ in range(4):
        training.step()
    return meter.peak


def planned(cases: list[Case], budget_bytes: int, pairs: int, file: Path) -> Row:
    """Profiles steps on whole volumes, plans them within the budget, and compares planned with in-core steps."""
    torch.set_num_threads(1)
    training = Training("whole", SETTING, cases, seed=0)
    begin_s = time.perf_counter()
    profile = poochplan.profile(training.forward, model=training.model, optimizer=training.optimizer)
    profiled_s = time.perf_counter()
    plan = poochplan.plan(profile, budget_bytes, time_limit_s=PLANNER_S)
    planned_s = time.perf_counter()
    plan.save(file, force=True)
    workload = Workload(training.model, training.forward, training.optimizer)
    return {
        "profile_s": round(profiled_s - begin_s, 1),
        "plan_s": round(planned_s - profiled_s, 1),
        "smallest_budget_bytes": poochplan.smallest_budget(profile),
        "decisions": decisions_of(plan),
        "predicted": predicted(plan, "peak_bytes", "arena_peak_bytes", "overhead"),
        "pairs": Planned(workload, plan).measure(pairs, 0)["planned_over_plain"],
    }


def one(
    method: Method, seed: int, cases: list[Case], held_out: list[Case], other: Case, plan_file: Path, limits: Row
) -> Row:
    """One training, in a process of its own. ``limits``: its seconds, and looks at held-out cases."""
    take_turns(METHODS.index(method))
    torch.set_num_threads(1)
    meter = allocated_bytes()
    training = Training(method, SETTING, cases, seed)
    if method == "whole":
        with poochplan.apply(Plan.load(plan_file), training.model) as session:
            course = train(training, held_out, meter=meter, arena_bytes=lambda: arena_bytes(session), **limits)
            told = session_facts(session.report())
    else:
        course, told = train(training, held_out, meter=meter, **limits), {}
    return {
        "method": method,
        "seed": seed,
        "steps": len(course.losses),
        "seconds": round(course.seconds, 2),
        "wall_s": round(course.wall_s, 2),
        "median_step_s": round(median(course.step_s), 4),
        "last_losses": round(mean(course.losses[-20:]), 5),
        "peak_bytes": course.peak_bytes,
        "looking_peak_bytes": course.looking_peak_bytes,
        "looks": course.looks,
        "session": told,
        **predictions(training, held_out, other, meter),
    }


def predictions(training: Training, held_out: list[Case], other: Case, meter: AllocatedBytes) -> Row:
    """What a trained network says when nothing of its training is held any more, and what that takes."""
    training.optimizer.zero_grad(set_to_none=True)
    meter.restart()
    begin_s = time.process_time()
    found = {case.name: training.predicted(case) for case in held_out}
    predicting_s, predicting_peak_bytes = time.process_time() - begin_s, meter.peak
    found[other.name] = training.predicted(other)
    middle = found[held_out[0].name][:, :, GRID.shape[2] // 2]
    return {
        "predicting_peak_bytes": predicting_peak_bytes,
        "predicting_s": round(predicting_s / len(held_out), 4),
        "held_out": {case.name: dice(found[case.name], case.labels) for case in held_out},
        "other_scanner": dice(found[other.name], other.labels),
        "slice": ["".join(map(str, row)) for row in middle.tolist()],
        "other_found": found[other.name],
    }


def session_facts(report: Any) -> Row:
    return {
        "steps_followed": report.steps_followed,
        "fallbacks": report.total.fallbacks,
        "arena_bytes": report.arena.size_bytes if report.arena is not None else 0,
        "swapped_bytes": report.total.out_bytes,
        "replay_s": round(report.total.replay_s, 2),
        "stall_s": round(report.total.stall_s, 2),
    }


def take_turns(number: int) -> None:
    """From now on this process has one core, and another every two seconds: as the number says, the first or second."""
    cores = sorted(os.sched_getaffinity(0))[:2]

    def move() -> None:
        while True:
            core = cores[(int(time.time() / TURN_S) + number) % len(cores)]
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):  # it may have ended
                    os.sched_setaffinity(int(thread.name), {core})
            time.sleep(TURN_S - time.time() % TURN_S + 0.001)

    threading.Thread(target=move, daemon=True).start()


def main() -> None:
    parser = parser_of(
        __doc__,
        seconds=(110.0, "of CPU, of training steps, for each way and seed"),
        seeds=3,
        cases=(16, "to train on"),
        held_out=4,
        looks=(11, "at the held-out cases, evenly spaced in time"),
        pairs=(8, "of planned and in-core steps"),
    )
    parser.add_argument("--table", metavar="FILE", help="run nothing, print the table of these results")
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(lines(json.loads(Path(arguments.table).read_text()))))
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    begin_s = time.perf_counter()
    cases, held_out = cases_of(arguments.cases, arguments.held_out)
    other, alike = other_scanner()
    found: Row = facts_of_run(arguments, (*PACKAGES, "monai", "nibabel", "nilearn")) | {
        "setting": asdict(SETTING) | {"grid": asdict(GRID)},
        "other_scanner_correlation": round(alike, 4),
        "in_core_peak_bytes": {},
        "runs": [],
    }
    for method in METHODS:
        found["in_core_peak_bytes"][method] = in_a_process(in_core_bytes, method, cases, start="spawn")
    budget_bytes = found["in_core_peak_bytes"]["patches"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        found["plan"] = in_a_process(planned, cases, budget_bytes, arguments.pairs, file, start="spawn")
        print(json.dumps(found), flush=True)
        for seed in range(arguments.seeds):
            limits = {"budget_s": arguments.seconds, "looks": arguments.looks}
            with ProcessPoolExecutor(len(METHODS), get_context("spawn"), max_tasks_per_child=1) as both:
                calls = [both.submit(one, method, seed, cases, held_out, other, file, limits) for method in METHODS]
                rows = [call.result() for call in calls]
            said = [row.pop("other_found") for row in rows]
            found["runs"] += [row | {"agreement_on_other": dice(said[0], said[1])} for row in rows]
            found["wall_s"] = round(time.perf_counter() - begin_s, 1)
            write_results(arguments.output, found)
            for row in rows:
                print(json.dumps({key: row[key] for key in row if key not in ("looks", "slice")}), flush=True)


if __name__ == "__main__":
    main()
