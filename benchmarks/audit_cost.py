"""What the audit costs: planned steps with it over planned steps without, in pairs, in one session.

    OMP_NUM_THREADS=1 python -m benchmarks.audit_cost --networks gpt2 resnet50 [-o FILE.json]

Plans are for 60% of the in-core peak, without an arena. "beside": the budget has room for kept values. "checksums":
steps are not metered, so nothing is kept beside.
"""

from __future__ import annotations

from typing import Any

import msgspec

import poochplan
from benchmarks.facts import Row, parser_of, taken
from benchmarks.pairs import Seconds, compared, in_pairs, load, one_step, profiled
from poochplan.runtime.engine.audit import OnAudit
from poochplan.runtime.session import Session
from poochplan.workload import Workload

NETWORKS: dict[str, dict[str, str]] = {"gpt2": {}, "resnet50": {"batch_size": "4"}, "unet3d": {}, "char_rnn": {}}
SHARE, EVALUATIONS, ROOM, WARM = "60%", 100, 1.2, 4


def measured(name: str, pairs: int) -> list[Row]:
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
            pairs_with, pairs_without = in_pairs(without, with_it, pairs), in_pairs(without, without, pairs)
            report = session.report().total
        row: Row = {"network": name, "how": how, "audited_values": report.audited_values}
        rows.append(row | {"with_over_without": compared(pairs_with), "without_over_without": compared(pairs_without)})
    return rows


def _step(session: Session, workload: Workload, on_audit: OnAudit) -> Seconds:
    session._on_audit = on_audit
    session._engine.audit.compares_unplanned = on_audit is not OnAudit.OFF
    return one_step(workload)


def main() -> None:
    parser = parser_of(__doc__, networks=list(NETWORKS), pairs=40)
    arguments = parser.parse_args()
    taken(arguments, arguments.networks, lambda name: measured(name, arguments.pairs))


if __name__ == "__main__":
    main()
