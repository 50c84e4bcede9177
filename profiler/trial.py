"""Plans that nobody solved, for steps that the profiler runs under the runtime's engine."""

from __future__ import annotations

from ..planner.schema import Plan, PlannedValue, PointActions, Prediction, Solve
from .schema import Link, ModelSignature


def trial_plan(
    kind: str,
    link: Link,
    model: ModelSignature,
    *,
    values: tuple[PlannedValue, ...] = (),
    handles: tuple[int, ...] = (),
    uses: tuple[int, ...] = (),
    schedule: tuple[PointActions, ...] = (),
) -> Plan:
    """A plan for the device ``kind`` that promises nothing; without values it plans nothing."""
    return Plan(
        workload="",
        profile_fingerprint="",
        budget_bytes=0,
        device=kind,  # type: ignore[arg-type]
        solve=Solve(
            policy="trial",
            solver="none",
            status="not needed",
            objective_s=None,
            bound_s=None,
            gap=None,
            wall_s=0.0,
            rounds=0,
        ),
        prediction=Prediction(
            peak_bytes=0,
            first_step_peak_bytes=0,
            in_core_peak_bytes=0,
            in_core_step_s=0.0,
            step_s=0.0,
            overhead=0.0,
            stall_s=0.0,
            replay_s=0.0,
            interference_s=0.0,
            out_bytes=0,
            in_bytes=0,
            host_bytes=0,
        ),
        link=link,
        record_from_start=bool(values),
        model=model,
        values=values,
        handles=handles,
        uses=uses,
        schedule=schedule,
    )
