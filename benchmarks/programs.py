"""Random training programs under plans: bitwise as in-core, and never above the predicted peak.

``tests/programs`` draws a program from each seed: views, writes in place, several forwards, two backwards, hooks,
autocast, checkpoint inside, exceptions, buffers, kept state, steps other than the profiled one. Each is profiled once
and run under four plans (three random, the planner's own near the smallest budget) on the CPU device and on the
adversarial one. After every step all gradients, parameters, buffers and generator states are compared with in-core
training; the metered peak of each followed step is compared with the predicted one.

With ``--arena`` each program's steps run twice over, under the same plans, served from an arena: whatever a step does,
it has to be bitwise the one in-core. With ``--windows`` they run twice over as well, unmetered, with an arena and
without, under random plans that record in short windows.

With ``--casts`` they have casts and clones, and run under random plans that hold what these read in place of their
larger results (``tests/programs/other_trials.py``).

With ``--late`` they have blocks that begin to write late, most past the dispatcher; some draw their layers, or hold a
log. Gradients may differ before the audit's bound, if it is told by then (``tests/programs/late_trial.py``).

With ``--state`` they are loops with torch's optimizers under random plans that stream their state
(``tests/programs/state_trial.py``).

With ``--mutants`` the runtime is broken on purpose, in one place at a time (those of ``tests/runtime/test_mutants.py``
and of the rules in ``test_rules.py``), and it is told which program notices first.

    python -m benchmarks.programs -o benchmarks/results/programs.json          # 1,000 programs, some 20 minutes
    python -m benchmarks.programs -o benchmarks/results/programs.json          # goes on; delete the file to begin anew
    python -m benchmarks.programs --seeds 44:45                                # one program
    python -m benchmarks.programs --arena --seeds 0:150 -o benchmarks/results/programs-arena.json
    python -m benchmarks.programs --windows --seeds 0:500 -o benchmarks/results/programs-windows.json \
        --always "exception in forward" views "several forwards a step"
    python -m benchmarks.programs --casts --seeds 0:500 -o benchmarks/results/programs-casts.json
    python -m benchmarks.programs --late --seeds 0:300 -o benchmarks/results/programs-late.json
    python -m benchmarks.programs --state --seeds 0:300 -o benchmarks/results/programs-state.json
    python -m benchmarks.programs --mutants --seeds 0:40 -o benchmarks/results/programs-mutants.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.facts import facts_of_run, parser_of, write_results
from tests.programs.drawing import Feature, Program, draw
from tests.programs.late_trial import late_trial
from tests.programs.mutated import all_mutants, caught_by, ready
from tests.programs.other_trials import cast_trial, served_trial, windowed_trial
from tests.programs.state_trial import state_trial
from tests.programs.trial import KINDS, Outcome, trial, warm_up

SAVE_EVERY = 20


def kind_of(problem: str) -> str:
    return next((kind for kind, starts in KINDS.items() if problem.startswith(starts)), "copies not waited for")


def run_programs(
    seeds: range,
    output: str | None,
    facts: dict[str, Any],
    tried: Callable[[Program], Outcome] = trial,
    always: Collection[Feature] = (),
) -> dict[str, Any]:
    """Tries the programs; writes what was found every now and then, and begins where such a file ends."""
    found = _begun(seeds, output, facts)
    counts, features = Counter(found["counts"]), Counter(found["features"])
    for seed in range(found["next_seed"], seeds.stop):
        program, start_s = draw(seed, always), time.perf_counter()
        outcome = tried(program)
        counts += outcome.counts
        features.update(map(str, program.features))
        for problem in outcome.problems:
            print(problem, flush=True)
        found["problems"] += outcome.problems
        found["seconds"] = round(found["seconds"] + time.perf_counter() - start_s, 1)
        found |= {"next_seed": seed + 1, "counts": dict(counts), "features": dict(features)}
        found["wrong"] = dict.fromkeys(KINDS, 0) | Counter(map(kind_of, found["problems"]))
        if (seed + 1) % SAVE_EVERY == 0 or seed + 1 == seeds.stop:
            write_results(output, found)
            print(f"{seed + 1 - seeds.start} programs, {len(found['problems'])} problems", file=sys.stderr, flush=True)
    return found


def _begun(seeds: range, output: str | None, facts: dict[str, Any]) -> dict[str, Any]:
    """What the file holds, if it is of these seeds and not at their end; all commits that had a part are named."""
    fresh = {"first_seed": seeds.start, "next_seed": seeds.start, "seconds": 0.0}
    path = Path(output) if output else None
    if path is not None and path.exists():
        held: dict[str, Any] = json.loads(path.read_text())
        if held["first_seed"] == seeds.start and held["next_seed"] < seeds.stop:
            commits = dict.fromkeys((*held["commit"].split(", "), facts["commit"]))
            return held | {"commit": ", ".join(commits)}
    return facts | fresh | {"wrong": {}, "counts": {}, "features": {}, "problems": []}


def run_mutants(seeds: range) -> dict[str, Any]:
    """Which program notices each mutant first, of each group."""
    programs = [ready(draw(seed)) for seed in seeds]
    print(f"{len(programs)} programs are ready", file=sys.stderr, flush=True)
    rows = []
    for group, mutants in all_mutants().items():
        for name, mutant in mutants.items():
            seed, problem = caught_by(mutant, programs)
            rows.append({"group": group, "mutant": name, "caught_by_seed": seed, "because": problem})
            print(
                f"{group}: {name}: {'not caught' if seed is None else f'program {seed}: {problem[:100]}'}", flush=True
            )
    summary = {
        group: {
            "mutants": sum(row["group"] == group for row in rows),
            "caught": sum(row["group"] == group and row["caught_by_seed"] is not None for row in rows),
        }
        for group in all_mutants()
    }
    print(summary)
    return {"programs": len(programs), "summary": summary, "mutants": rows}


def main() -> int:
    parser = parser_of(
        __doc__,
        seeds=(None, "FIRST:END; None is 0:1000, with --mutants 0:40"),
        mutants=(False, "which programs notice a broken runtime"),
        arena=(False, "steps are served from an arena"),
        windows=(False, "steps are unmetered, and recorded in short windows"),
        casts=(False, "plans hold what casts and clones read"),
        state=(False, "loops with torch's optimizers, whose state is streamed"),
        late=(False, "blocks begin to write late, past the dispatcher"),
    )
    parser.add_argument("--always", type=Feature, nargs="+", default=(), help="features that every program has")
    arguments = parser.parse_args()
    first, end = map(int, (arguments.seeds or ("0:40" if arguments.mutants else "0:1000")).split(":"))
    torch.set_num_threads(1)
    warm_up(draw(first))
    facts = facts_of_run(arguments)
    if arguments.mutants:
        write_results(arguments.output, facts | run_mutants(range(first, end)))
        return 0
    others = (
        (arguments.windows, windowed_trial),
        (arguments.arena, served_trial),
        (arguments.casts, cast_trial),
        (arguments.late, late_trial),
        (arguments.state, lambda program: state_trial(program.seed)),
    )
    tried = next((one for is_asked, one in others if is_asked), trial)
    found = run_programs(range(first, end), arguments.output, facts, tried, arguments.always)
    print(json.dumps({"wrong": found["wrong"], "counts": found["counts"], "seconds": found["seconds"]}))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
