"""What ``pooch run`` has to say of its steps: why no arena served them, and what the exit code is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poochplan.errors import BudgetExceededError, DivergenceError, PoochError
from poochplan.units import format_bytes

if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.report.runs import RunSummary
    from poochplan.runtime.serving import ArenaMode


def why_not_served_text(mode: ArenaMode, plan: Plan) -> str:
    """Why the steps could not be served from an arena, in one line; empty where they could."""
    from poochplan.runtime.metering.allocated import step_scope
    from poochplan.runtime.serving import why_not_served

    if mode == "off":
        return "--arena off"
    reason = why_not_served(mode, plan.device, [plan])
    if not reason and step_scope() is None:
        return "the compiled allocator could not be built; pooch doctor --build says why"
    return reason


def problem_of(plan: Plan, summary: RunSummary) -> PoochError | None:
    """What the exit code has to say although all was measured."""
    if summary.difference is not None:
        return PoochError(
            f"not bitwise equal to in-core: {summary.difference}; "
            "please report this with the plan, and train in-core meanwhile"
        )
    if summary.is_over(plan):
        assert summary.peak_bytes is not None
        why = "; a step left the plan" if summary.fallbacks else ""
        return BudgetExceededError(
            f"over the budget: expected at most {plan.budget_bytes} bytes ({format_bytes(plan.budget_bytes)}), found a "
            f"step of {summary.peak_bytes} bytes ({format_bytes(summary.peak_bytes)}){why}; profile the step as it is "
            "trained and plan again, or plan with a smaller budget",
            peak_bytes=summary.peak_bytes,
        )
    if summary.left_steps:
        why = summary.fallback_reasons[0]
        if summary.departures:
            from poochplan.formats.queries import OUTSIDE

            first = summary.departures[0]
            why = f"in {first.layer or OUTSIDE}, expected {first.planned}, found {first.found}"
        return DivergenceError(
            f"{summary.left_steps} of {summary.steps} steps left the plan: {why}; profile the step as it is trained, "
            "and plan again"
        )
    return None
