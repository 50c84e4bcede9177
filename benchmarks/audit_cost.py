"""What the audit costs: the seconds inside its own code over those of the step, and steps with it over steps without.

    OMP_NUM_THREADS=1 python -m benchmarks.audit_cost --networks gpt2 resnet50 [-o FILE.json]

"inside": each call of the audit is timed, over all planned steps, with what it compares and what it only notes; the
clock's own time is in it. The pairs, in the same session, are noisy, and tell whether something was forgotten. Plans
are for 60% of the in-core peak, without an arena. "beside": the budget has room for kept values. "checksums": steps are
not metered, so nothing is kept beside.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import msgspec
import numpy as np

import poochplan
from benchmarks.facts import Row, parser_of, taken
from benchmarks.pairs import Seconds, compared, in_pairs, load, one_step, profiled
from poochplan.runtime.engine.audit import Audit, OnAudit
from poochplan.runtime.session import Session
from poochplan.workload import Workload

NETWORKS: dict[str, dict[str, str]] = {"gpt2": {}, "resnet50": {"batch_size": "16"}, "unet3d": {}, "char_rnn": {}}
SHARE, EVALUATIONS, ROOM, WARM = "60%", 100, 1.2, 4
CALLED = ["step_begins", "step_ends", "is_kept", "leaves", "leaves_out", "passes", "point", "saved_again", "comes_back"]
"""What the engine and the session call of the audit in each step."""


@contextlib.contextmanager
def timed_audit() -> Iterator[list[float]]:
    """The seconds of each call of the audit, until the list is emptied."""
    found, ordinary = list[float](), {name: getattr(Audit, name) for name in CALLED}

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                found.append(time.perf_counter() - start_s)

        return run

    for name, call in ordinary.items():
        setattr(Audit, name, timed(call))
    try:
        yield found
    finally:
        for name, call in ordinary.items():
            setattr(Audit, name, call)


def inside(session: Session, workload: Workload, steps: int) -> Row:
    """The share of each step that is inside the audit: its seconds on the wall over the processor's seconds of the
    thread that trains. So a busy machine, or a step that waits for copies, makes the share larger and never smaller.
    """
    shares, calls, compared = list[float](), list[int](), list[int]()
    with timed_audit() as taken_s:
        for _ in range(steps):
            before = session.report().total.audited_values
            taken_s.clear()
            start_s = time.thread_time()
            _step(session, workload, OnAudit.WARN)
            step_s = time.thread_time() - start_s
            shares.append(sum(taken_s) / step_s)
            calls.append(len(taken_s))
            compared.append(session.report().total.audited_values - before)
    low, high = np.percentile(shares, [2.5, 97.5])
    quartiles = [round(float(one), 5) for one in np.percentile(shares, [25, 75])]
    spread = {"quartiles": quartiles, "from_2.5_to_97.5": [round(float(low), 5), round(float(high), 5)]}
    means = {"mean": round(float(np.mean(shares)), 5), "calls": median(calls), "values": float(np.mean(compared))}
    return {"steps": steps, "median": round(median(shares), 5)} | spread | means


def measured(name: str, pairs: int, steps: int) -> list[Row]:
    workload = load(name, NETWORKS[name])
    plan = poochplan.plan(profiled(workload, name, iterations=1), SHARE, evaluations=EVALUATIONS)
    roomy = msgspec.structs.replace(plan, budget_bytes=int(ROOM * plan.budget_bytes))
    rows = []
    for how, one in (("beside", roomy), ("checksums", plan)):
        kept_beside: Any = {"meter": "first-steps" if how == "beside" else "never"}
        with poochplan.apply(one, workload.model, arena="off", **kept_beside) as session:

            def with_it(session: Session = session) -> Seconds:
                return _step(session, workload, OnAudit.WARN)

            def without(session: Session = session) -> Seconds:
                return _step(session, workload, OnAudit.OFF)

            for _ in range(WARM):
                one_step(workload)
            inside_it = inside(session, workload, steps)
            pairs_with, pairs_without = in_pairs(without, with_it, pairs), in_pairs(without, without, pairs)
            report = session.report().total
        row: Row = {"network": name, "how": how, "audited_values": report.audited_values, "inside": inside_it}
        rows.append(row | {"with_over_without": compared(pairs_with), "without_over_without": compared(pairs_without)})
    return rows


def _step(session: Session, workload: Workload, on_audit: OnAudit) -> Seconds:
    session._on_audit = on_audit
    session._engine.audit.compares_unplanned = on_audit is not OnAudit.OFF
    return one_step(workload)


def main() -> None:
    parser = parser_of(__doc__, networks=list(NETWORKS), pairs=40, steps=300)
    arguments = parser.parse_args()
    taken(arguments, arguments.networks, lambda name: measured(name, arguments.pairs, arguments.steps))


if __name__ == "__main__":
    main()
