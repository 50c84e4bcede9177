"""What a session leaves behind: in-core steps after one, against the same in a process that never had one.

Three processes: ``untouched`` has had no session, ``after`` has had one of two steps, and
``held`` has had one and keeps its allocator's setting, as every process did that had had a session up to 0.2.0. They
step in pairs (``pairs.py``), one after the other.

    python -m benchmarks.after_session [--workload gpt2] [--pairs 20] [-o FILE.json]
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import poochplan
from benchmarks.facts import Row, facts_of_run, parser_of, write_results
from benchmarks.pairs import Seconds, compared, in_pairs, load, one_step, profiled
from benchmarks.processes import in_a_process
from poochplan.tensors.host_memory import freed_memory_given_back

KINDS = ("untouched", "after", "held")
SETTINGS = {"batch_size": "2"}
WARM_STEPS = 3


def write_plan(name: str, path: Path) -> None:
    workload = load(name, SETTINGS)
    poochplan.plan(profiled(workload, name, iterations=1), "60%", evaluations=200).save(path, force=True)


def steps_of(kind: str, name: str, plan_file: Path, asked: Connection) -> None:
    """Runs an in-core step each time it is asked to."""
    torch.set_num_threads(1)
    workload = load(name, SETTINGS)
    for _ in range(WARM_STEPS):
        one_step(workload)
    held = freed_memory_given_back()
    if kind != "untouched":
        with poochplan.apply(poochplan.Plan.load(plan_file), workload.model):
            for _ in range(2):
                one_step(workload)
    if kind == "held":
        held.__enter__()
    for _ in range(WARM_STEPS):
        one_step(workload)
    asked.send(None)
    while asked.recv():
        asked.send(one_step(workload))


def measure(name: str, pairs: int) -> Row:
    """Seconds of steps after a session over those of steps without, and the same of the kind ``held``."""
    context = multiprocessing.get_context("spawn")
    steps: dict[str, partial[Seconds]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        in_a_process(write_plan, name, plan_file, start="spawn")
        for kind in KINDS:
            ours, theirs = context.Pipe()
            context.Process(target=steps_of, args=(kind, name, plan_file, theirs), daemon=True).start()
            ours.recv()
            steps[kind] = partial(_step_of, ours)
    found = {f"{kind}_over_untouched": compared(in_pairs(steps[KINDS[0]], steps[kind], pairs)) for kind in KINDS[1:]}
    for step in steps.values():
        step.args[0].send(False)
    return found


def _step_of(process: Connection) -> Seconds:
    process.send(True)
    seconds: Seconds = process.recv()
    return seconds


def main() -> None:
    parser = parser_of(__doc__, workload="gpt2", pairs=20)
    arguments = parser.parse_args()
    found = facts_of_run(arguments) | measure(arguments.workload, arguments.pairs)
    print(json.dumps(found, indent=1))
    write_results(arguments.output, found)


if __name__ == "__main__":
    main()
