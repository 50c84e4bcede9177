"""``pooch diff``: what differs between two plans, two profiles, or a plan and a run of it; needs no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from poochplan.cli.base import Verb, at_least
from poochplan.errors import PoochError, UsageError

if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.formats.profile import Profile
    from poochplan.report.inspection.any_file import Inspected
    from poochplan.report.inspection.run_record import RunRecord

SHOWN = 12


class DiffVerb(Verb):
    """Sets two files beside each other."""

    name = "diff"
    summary = "say what differs between two plans, two profiles, or a plan and a run that left it"
    description = (
        "Of two plans: budget, predicted peak and step, the values that are decided about differently, and the points "
        "at which other things happen. Of two profiles: the step, the machine, memory and times. Of a plan and the "
        "file of pooch run -o: promised and found, and at which point, in which layer, a step left the plan. Exit "
        "codes are those of diff: 0 the same, 1 they differ (a run: it left the plan, its budget or the in-core bits), "
        "2 trouble."
    )
    examples = """\
  pooch diff plan-60.json plan-70.json
  pooch diff monday.profile.json tuesday.profile.json
  pooch run train.py:workload --plan plan.json -o run.json ; pooch diff plan.json run.json
  pooch diff plan.json other.json --json | jq .values
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("first", metavar="A", help="plan, profile, or run")
        parser.add_argument("second", metavar="B", help="the same, or a run of plan A")
        parser.add_argument(
            "--rows", type=at_least(1), default=SHOWN, metavar="N", help=f"rows of each table (default: {SHOWN})"
        )

    def run(self) -> dict[str, Any]:
        from poochplan.formats.plan import Plan
        from poochplan.formats.profile import Profile
        from poochplan.report.inspection.any_file import load_any
        from poochplan.report.inspection.run_record import RunRecord

        options = self.options
        try:
            first, second = load_any(options.first), load_any(options.second)
        except PoochError as error:  # 1 would say that they differ
            raise UsageError(str(error)) from None
        if isinstance(first, Plan) and isinstance(second, Plan):
            return self._done(first, second, self._plans(first, second))
        if isinstance(first, Profile) and isinstance(second, Profile):
            return self._done(first, second, self._profiles(first, second))
        if isinstance(first, Plan) and isinstance(second, RunRecord):
            return self._done(first, second, self._run_of(first, second))
        if isinstance(first, RunRecord) and isinstance(second, Plan):
            return self._done(first, second, self._run_of(second, first))
        raise UsageError(
            f"expected two plans, two profiles, or a plan and a run of it, found a {first.kind} and a {second.kind}"
        )

    def _done(self, first: Inspected, second: Inspected, found: tuple[bool, dict[str, Any]]) -> dict[str, Any]:
        differs, data = found
        if not differs:
            self.show("They say the same." if first.kind == second.kind else "The run kept to its plan.")
        self.exit_code = int(differs)
        return {"first": first.kind, "second": second.kind, "differs": differs, **data}

    def _plans(self, first: Plan, second: Plan) -> tuple[bool, dict[str, Any]]:
        import pandas as pd

        from poochplan.report.inspection.figures import figure_table
        from poochplan.report.inspection.plan_diff import plan_differences
        from poochplan.report.tables import frame_table

        found, rows = plan_differences(first, second), self.options.rows
        if found.figures:
            self.show(figure_table("Plans", found.figures, self._names))
        if found.values:
            layers = found.by_layer()
            title = f"Decisions that changed, by layer ({min(rows, len(layers))} of {len(layers)})"
            headings = {"change": "change", "values": "values", "size_bytes": "bytes"}
            self.show(frame_table(title, layers.head(rows), headings))
            values = pd.DataFrame(found.values[:rows]).set_index("name")
            title = f"The largest of these values ({len(values)} of {len(found.values)})"
            headings = {"layer": "layer", "first": "A", "second": "B", "size_bytes": "bytes"}
            self.show(frame_table(title, values, headings))
        if found.points:
            self.show(f"Points at which other things happen ({min(rows, len(found.points))} of {len(found.points)}):")
            for point in found.points[:rows]:
                self.show(f"  {point.at} {point.number}: {point.first}\n    then: {point.second}")
        if not found.same_step:
            self.show("The plans are for steps that save or use other values: their points do not compare.")
        return bool(found), found.data()

    def _profiles(self, first: Profile, second: Profile) -> tuple[bool, dict[str, Any]]:
        from poochplan.report.inspection.figures import figure_table
        from poochplan.report.inspection.profile_diff import profile_differences
        from poochplan.report.tables import frame_table

        found, rows = profile_differences(first, second), self.options.rows
        if found.figures:
            self.show(figure_table("Profiles", found.figures, self._names))
        if found.first_op:
            self.show(f"The steps part at {found.first_op}")
        if len(found.layers):
            title = f"Layers, by the change of their seconds ({min(rows, len(found.layers))} of {len(found.layers)})"
            headings = {"saved_bytes": "A saves", "then_bytes": "B saves", "step_s": "A takes", "then_s": "B takes"}
            self.show(frame_table(title, found.layers.head(rows), headings))
        return bool(found), found.data()

    def _run_of(self, plan: Plan, run: RunRecord) -> tuple[bool, dict[str, Any]]:
        from poochplan.report.inspection.figures import figure_table
        from poochplan.report.inspection.run_diff import run_differences
        from poochplan.report.tables import frame_table

        found, rows = run_differences(plan, run), self.options.rows
        over = ": OVER THE BUDGET" if found.is_over_budget else ""
        self.show(figure_table(f"Plan and run of {run.workload}{over}", found.figures, ("promised", "found")))
        if found.departures:
            title = f"Where steps left the plan ({min(rows, len(found.departures))} of {len(found.departures)})"
            headings = {"step": "step", "layer": "layer", "planned": "planned", "found": "found"}
            self.show(frame_table(title, found.frame().head(rows), headings, fold=True))
        for reason in found.reasons:
            self.show(f"Not followed: {reason}")
        for what in (found.contradiction, found.difference):
            if what:
                self.show(f"Note: {what}")
        return bool(found), found.data()

    @property
    def _names(self) -> tuple[str, str]:
        """The files', or A and B where these are long."""
        names = (self.options.first, self.options.second)
        return names if max(map(len, names)) <= 30 else ("A", "B")
