"""Plans that no clock decides, of every instance: what must come out again, to the bit, after code has only moved.

    python -m benchmarks.reference_plans -o benchmarks/results/reference-plans.json
    python -m benchmarks.reference_plans --check benchmarks/results/reference-plans.json
    python -m benchmarks.reference_plans --check FILE --only seq2seq  # cases with that in their name

``--check`` makes the plans again, names every difference and ends with exit code 1 where there is one.
A case is an instance, the share that its budget keeps (as in ``planning.py``) and a policy. Its record holds digests of
decisions and schedule, what is predicted, and the bound; floats as ``repr`` writes them. Every plan is made with one
thread, a count of simulations and a seed. Another processor or other versions of numpy or HiGHS may round
otherwise: a file is checked where it was made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.facts import facts_of_run, parser_of, write_results
from benchmarks.plans import INSTANCES, budget_of, stored
from poochplan import Plan, plan
from poochplan.errors import InfeasibleError
from poochplan.planner.policies import policy_names

EVALUATIONS = 5000
"""Of each plan; greedy and pooch, which are asked for theirs, count by themselves."""
SEED = 20
GAP, LARGE_GAP = 0.001, 0.04
"""The first is small, so that the search does not end before its stages have run."""
LARGE = "gpt-96"
"""Each of its models takes half a minute to solve: the search may end early."""
KEPT, TIGHT, ROOMY = 0.5, 0.1, 0.9
"""The last is for policies alone, some of which need much room."""
TIGHT_DEVICE, NOT_TIGHT = "v100", "bert-large"
"""Where the tight budget is planned for too; the plans of the network excepted take long."""
WITH_POLICIES = ("resnet50-b256-a100", "seq2seq-h200")
PREDICTED = (
    "peak_bytes", "first_step_peak_bytes", "in_core_step_s", "step_s", "stall_s", "replay_s", "interference_s",
    "runtime_s", "out_bytes", "in_bytes", "host_bytes",
)  # fmt: skip
ACTIONS = ("at", "index", "swap_out", "release", "prefetch", "replay", "record")


class Case(NamedTuple):
    instance: str
    kept: float
    policy: str = "ilp"

    @property
    def name(self) -> str:
        return f"{self.instance} {self.kept:.0%} {self.policy}"


def all_cases() -> list[Case]:
    """The slowest first, so that processes end together."""
    names = sorted(path.name.removesuffix(".json.gz") for path in INSTANCES.glob("*.json.gz"))
    names.sort(key=lambda name: not name.startswith(LARGE))
    cases = [Case(name, KEPT) for name in names]
    tight = [name for name in names if name.endswith(TIGHT_DEVICE) and not name.startswith(NOT_TIGHT)]
    cases += [Case(name, TIGHT) for name in tight]
    return cases + [Case(name, ROOMY, policy) for name in WITH_POLICIES for policy in policy_names()]


def make(case: Case) -> tuple[str, dict[str, Any], float]:
    """The case's name, the record of its plan, and the seconds that it took."""
    started_s = time.perf_counter()
    profile = stored(case.instance)
    budget_bytes = budget_of(profile, case.kept)
    try:
        gap = LARGE_GAP if case.instance.startswith(LARGE) else GAP
        made = plan(profile, budget_bytes, gap=gap, policy=case.policy, evaluations=EVALUATIONS, seed=SEED)
        record = {"budget_bytes": budget_bytes, **record_of(made)}
    except InfeasibleError as error:
        record = {"budget_bytes": budget_bytes, "infeasible_below_bytes": error.smallest_budget_bytes}
    return case.name, record, time.perf_counter() - started_s


def record_of(made: Plan) -> dict[str, Any]:
    """All of a plan that must not change."""
    values = [[value.name, str(value.decision), value.size_bytes, value.host_offset] for value in made.values]
    schedule = [[getattr(point, action) for action in ACTIONS] for point in made.schedule]
    return {
        "policy": made.solve.policy,
        "status": made.solve.status,
        "rounds": made.solve.rounds,
        "decisions": digest(values),
        "schedule": digest(schedule),
        "record_from_start": made.record_from_start,
        **{name: _exact(getattr(made.prediction, name)) for name in PREDICTED},
        "objective_s": _exact(made.solve.objective_s),
        "bound_s": _exact(made.solve.bound_s),
    }


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def _exact(number: float | None) -> int | str | None:
    return repr(number) if isinstance(number, float) else number


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each field of each case that is not as expected."""
    lines = []
    for name, record in found.items():
        if name not in expected:
            lines.append(f"{name}: expected no such case; make the file again")
            continue
        for field in sorted({*expected[name], *record}):
            before, now = expected[name].get(field), record.get(field)
            if before != now:
                lines.append(f"{name}: {field}: expected {before}, found {now}")
    return lines


def main() -> int:
    parser = parser_of(__doc__, jobs=(2, "processes; the plans are the same with any"))
    parser.add_argument("--check", metavar="FILE", type=Path, help="compare with this file, and name every difference")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name holds this")
    arguments = parser.parse_args()
    expected = json.loads(arguments.check.read_text())["cases"] if arguments.check else {}
    cases = [case for case in all_cases() if arguments.only in case.name]
    found: dict[str, Any] = {}
    started_s = time.perf_counter()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(make, case) for case in cases]):
            name, record, wall_s = done.result()
            found[name] = record
            print(f"{wall_s:6.1f} s  {name}  {record.get('status', 'infeasible')}", file=sys.stderr, flush=True)
    print(f"{len(found)} cases in {time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    facts = facts_of_run(argparse.Namespace(evaluations=EVALUATIONS, seed=SEED, gap=GAP))
    write_results(arguments.output, {**facts, "cases": {case.name: found[case.name] for case in cases}})
    if not arguments.check:
        return 0
    lines = differences(expected, found)
    missing = [name for name in expected if arguments.only in name and name not in found]
    lines += [f"{name}: expected a plan, found no such case" for name in missing]
    print("\n".join(lines) or f"{len(found)} plans are as they were")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
