"""A plan and a run of it: what was promised and what was found, and where steps left the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pandas as pd

from poochplan.errors import UsageError
from poochplan.formats.plan import Departure, Plan
from poochplan.formats.queries import OUTSIDE

from .figures import Figure, figure_data
from .run_record import RunRecord


@dataclass(frozen=True)
class RunDifferences:
    """Bytes and seconds never agree to the digit; a run differs where it left the plan or its budget."""

    figures: list[Figure]
    is_over_budget: bool
    departures: tuple[Departure, ...]
    reasons: tuple[str, ...]
    """Of every time that the plan was not followed, also where a step went on with it."""
    contradiction: str
    difference: str | None
    """From in-core, bit by bit."""

    def __bool__(self) -> bool:
        return bool(self.is_over_budget or self.reasons or self.departures or self.difference)

    def frame(self) -> pd.DataFrame:
        """One row per departure: ``step``, ``layer``, ``planned``, ``found``; the index is the point."""
        rows = [
            {
                "point": f"{one.at} {one.index}",
                "step": str(one.step),
                "layer": (one.layer or OUTSIDE) if one.value else "-",
                "planned": f"{one.value}: {one.planned}" if one.value else one.planned,
                "found": one.found,
            }
            for one in self.departures
        ]
        return pd.DataFrame(rows, columns=["point", "step", "layer", "planned", "found"]).set_index("point")

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "figures": figure_data(self.figures),
            "over_budget": self.is_over_budget,
            "departures": msgspec.to_builtins(self.departures),
            "reasons": list(self.reasons),
            "contradiction": self.contradiction,
            "difference": self.difference,
        }


def run_differences(plan: Plan, run: RunRecord) -> RunDifferences:
    """Sets the run beside its plan.

    Raises
    ------
    UsageError
        The run followed another plan.
    """
    if run.plan_fingerprint != plan.fingerprint:
        raise UsageError(
            f"expected a run of this plan ({plan.fingerprint}), found one of plan {run.plan_fingerprint}; name the "
            "plan that pooch run was given"
        )
    prediction = plan.prediction
    return RunDifferences(
        figures=[
            Figure("budget, peak", plan.budget_bytes, run.measured_peak_bytes, "bytes"),
            Figure("peak", run.predicted_peak_bytes, run.measured_peak_bytes, "bytes"),
            Figure("step", prediction.step_s, run.planned_step_s, "s"),
            Figure("in-core step", prediction.in_core_step_s, run.in_core_step_s, "s"),
            Figure("overhead", prediction.overhead, run.measured_overhead, "share"),
            Figure("stall", prediction.stall_s, run.stall_s, "s"),
            Figure("replay", prediction.replay_s, run.replay_s, "s"),
            Figure("bytes out", prediction.out_bytes, run.out_bytes, "bytes"),
            Figure("bytes in", prediction.in_bytes, run.in_bytes, "bytes"),
        ],
        is_over_budget=run.measured_peak_bytes is not None and run.measured_peak_bytes > run.budget_bytes,
        departures=run.departures,
        reasons=run.fallback_reasons,
        contradiction=run.contradiction,
        difference=run.difference,
    )
