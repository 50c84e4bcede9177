"""``pooch show``: what a profile, a plan, a set of plans or a run is; needs neither torch nor the device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from poochplan.cli.base import Verb
from poochplan.errors import UsageError

if TYPE_CHECKING:
    from poochplan.formats.passes.pass_profile import PassProfile
    from poochplan.formats.plan import Plan
    from poochplan.formats.profile import Profile
    from poochplan.report.inspection.run_record import RunRecord

LAYERS_SHOWN = 20


class ShowVerb(Verb):
    """Shows files that the other verbs wrote."""

    name = "show"
    summary = "say what a profile, a plan or a run is: for what, made where, peaks, times, decisions by layer, notes"
    description = (
        "Reads a file that pooch profile, pooch plan or pooch run -o wrote, and says what it is for (model, inputs, "
        "device), where and with which versions it was made, its peaks, budget and times, what is decided by layer, "
        "and its notes. Several plans are shown as the set that they make for pooch run. With --picture, who holds the "
        "in-core peak of a profile is drawn, layer by layer, or what a plan decides. Runs on any machine."
    )
    examples = """\
  pooch show plan.json
  pooch show profile.json --layers 5
  pooch show batch32.plan.json batch64.plan.json
  pooch show plan.json --picture decisions.png
  pooch show plan.json --json | jq .versions.torch
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        from poochplan.cli.base import at_least

        parser.add_argument("files", metavar="FILE", nargs="+", help="profile, plan or run; or several plans of a set")
        parser.add_argument(
            "--layers",
            type=at_least(0),
            default=LAYERS_SHOWN,
            metavar="N",
            help=f"show at most N layers (default: {LAYERS_SHOWN})",
        )
        parser.add_argument(
            "--picture",
            metavar="FILE.png",
            help="draw a profile's peak, stacked by layer and kind, or a plan's decisions, a strip of layers",
        )

    def run(self) -> dict[str, Any]:
        from poochplan.formats.passes.pass_profile import PassProfile
        from poochplan.formats.plan import Plan
        from poochplan.formats.profile import Profile
        from poochplan.report.inspection.any_file import load_any

        first, *others = self.options.files
        picture = self.output(self.options.picture, suffix=".png")
        if others:
            self._refuse_picture(f"{1 + len(others)} files")
            return self._show_set()
        found = load_any(first)
        if isinstance(found, Profile):
            data = self._show_profile(found)
        elif isinstance(found, Plan):
            data = self._show_plan(found)
        elif isinstance(found, PassProfile):
            self._refuse_picture("a forward pass")
            return self._show_pass(found)
        else:
            self._refuse_picture("a run")
            return self._show_run(found)
        if picture is not None:
            from poochplan.report.peak import explain_peak
            from poochplan.report.pictures import draw_decisions, draw_peak, write_picture

            figure = draw_peak(explain_peak(found)) if isinstance(found, Profile) else draw_decisions(found)
            self.wrote(write_picture(figure, picture, force=self.options.force))
        return data

    def _refuse_picture(self, found: str) -> None:
        if self.options.picture is not None:
            raise UsageError(
                f"--picture: expected one profile or one plan to draw, found {found}; pooch run --picture draws the "
                "memory of a run"
            )

    def _show_profile(self, profile: Profile) -> dict[str, Any]:
        from poochplan.report.inspection.file_rows import profile_file_data, profile_file_rows
        from poochplan.report.tables import frame_table, summary_table

        self.show(summary_table(f"Profile of {profile.workload}", profile_file_rows(profile)))
        layers = profile.to_frame("layers")
        top = layers.head(self.options.layers)
        if not top.empty:
            headings = {"saved_bytes": "saved", "forward_s": "forward", "backward_s": "backward", "swap_s": "swap"}
            headings |= {"recompute_s": "recompute"}
            self.show(frame_table(f"What layers save and cost ({len(top)} of {len(layers)})", top, headings))
        return profile_file_data(profile)

    def _show_plan(self, plan: Plan) -> dict[str, Any]:
        from poochplan.report.inspection.file_rows import plan_file_data, plan_file_rows
        from poochplan.report.layer_table import decisions_by_layer
        from poochplan.report.tables import frame_table, summary_table

        self.show(summary_table(f"Plan for {plan.workload}", plan_file_rows(plan)))
        layers = decisions_by_layer(plan)
        top = layers.head(self.options.layers)
        if not top.empty:
            headings = {"swap": "swap", "recompute": "recompute", "keep": "keep"}
            self.show(frame_table(f"Decisions by layer ({len(top)} of {len(layers)})", top, headings))
        return plan_file_data(plan)

    def _show_pass(self, found: PassProfile) -> dict[str, Any]:
        from poochplan.report.inspection.file_rows import pass_file_rows
        from poochplan.report.tables import summary_table

        self.show(summary_table(f"Forward pass of {found.workload}", pass_file_rows(found)))
        return found.data()

    def _show_run(self, run: RunRecord) -> dict[str, Any]:
        import msgspec

        from poochplan.report.inspection.file_rows import run_file_rows
        from poochplan.report.tables import summary_table

        self.show(summary_table(f"Run of {run.workload}", run_file_rows(run)))
        data: dict[str, Any] = msgspec.to_builtins(run)
        return data

    def _show_set(self) -> dict[str, Any]:
        from poochplan.formats.plan import Plan
        from poochplan.formats.plan_set import PlanSet
        from poochplan.report.inspection.any_file import load_any
        from poochplan.report.inspection.file_rows import plan_file_data, set_frame
        from poochplan.report.tables import frame_table

        plans = []
        for path in self.options.files:
            found = load_any(path)
            if not isinstance(found, Plan):
                raise UsageError(f"{path}: expected a plan, found a {found.kind}; show that file alone")
            plans.append(found)
        checked = PlanSet(plans)
        headings = {"budget_bytes": "budget", "peak_bytes": "peak", "step_s": "step", "overhead": "overhead"}
        title = f"Set of {len(plans)} plans for {plans[0].workload}; a step follows the one for its inputs"
        self.show(frame_table(title, set_frame(checked.plans), headings))
        return {"plans": [plan_file_data(plan) for plan in plans]}
