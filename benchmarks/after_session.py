"""What a session leaves behind: in-core steps after one, against the same in a process that never had one.

Three processes: ``untouched`` has had no session, ``after`` has had one of two steps, and
``held`` has had one and keeps its allocator's setting, as every process did that had had a session up to 0.2.0. They
step in pairs (``pairs.py``), one after the other.

    python -m benchmarks.after_session [--workload gpt2] [--pairs 20] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.facts import facts_of_run, write_results
from benchmarks.pairs import Seconds, Step, compared, in_pairs, load, one_step, profiled

KINDS = ("untouched", "after", "held")
SETTINGS = {"batch_size": "2"}
WARM_STEPS = 3


def write_plan(name: str, path: Path) -> None:
    """A plan of 60% of the in-core peak."""
    import poochplan

    workload = load(name, SETTINGS)
    poochplan.plan(profiled(workload, name, iterations=1), "60%", evaluations=200).save(path, force=True)


def steps_of(kind: str, name: str, plan_file: Path, asked: Connection) -> None:
    """Runs an in-core step each time it is asked to, until it is told to end."""
    import torch

    import poochplan
    from poochplan.tensors.host_memory import freed_memory_given_back

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


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Seconds of steps after a session over those of steps without, and the same of the kind ``held``."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        planner = context.Process(target=write_plan, args=(name, plan_file))
        planner.start()
        planner.join()
        ours: dict[str, Connection] = {}
        for kind in KINDS:
            ours[kind], theirs = context.Pipe()
            context.Process(target=steps_of, args=(kind, name, plan_file, theirs), daemon=True).start()
            ours[kind].recv()
    steps = {kind: _stepping(connection) for kind, connection in ours.items()}
    found = {
        f"{kind}_over_untouched": compared(in_pairs(steps["untouched"], steps[kind], pairs))
        for kind in ("after", "held")
    }
    for connection in ours.values():
        connection.send(False)
    return found


def _stepping(connection: Connection) -> Step:
    def step() -> Seconds:
        connection.send(True)
        seconds: Seconds = connection.recv()
        return seconds

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt2", help="name of a file in configs/")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps (default: 20)")
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    found = facts_of_run(arguments) | measure(arguments.workload, arguments.pairs)
    print(json.dumps(found, indent=1))
    write_results(arguments.output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
