"""``pooch show``, ``pooch diff`` and ``pooch simulate``: verbs that read files. They need neither torch nor the
device.
"""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table

from poochplan.errors import PoochError, UsageError
from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import Profile
from poochplan.peak import explain_peak, simulate_plan
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import Simulation
from poochplan.report import tables
from poochplan.report.differences import differences
from poochplan.report.palette import write_picture
from poochplan.report.pictures import draw_decisions, draw_peak
from poochplan.report.timeline import predicted_trace, write_trace
from poochplan.units import format_bytes, format_copies, format_seconds

from .base import Verb

MOST_COSTLY = 12
"""Most layers of the overhead."""


class ShowVerb(Verb):
    name = "show"
    help = """
Reads a file of pooch profile, pooch plan or pooch run -o. Shows its model, inputs and device, the machine and versions
that made it, peaks, budget and times, decisions by layer, and notes. Several plans are shown as a set, as pooch run
uses them. --picture draws what holds the in-core peak of a profile, layer by layer, or the decisions of a plan. Runs on
any machine.

FILE... @files: profile, plan or run; or several plans as a set
--layers N >=0 =20: show at most N layers (default: {})
--picture >FILE.png: draw a profile's peak, stacked by layer and kind, or a plan's decisions, a strip of layers

pooch show plan.json
pooch show profile.json --layers 5
pooch show batch32.plan.json batch64.plan.json
pooch show plan.json --picture decisions.png
pooch show plan.json --json | jq .versions.torch
"""

    def run(self) -> dict[str, Any]:
        first, *others = self.options.files
        if others:
            self._refuse_picture(f"{1 + len(others)} files")
            return self._show_set()
        found = tables.load_any(first)
        if not isinstance(found, Profile | Plan):
            self._refuse_picture("a forward pass" if isinstance(found, PassProfile) else f"a {found.kind}")
        self.show(tables.summary_table(found.title, tables.file_rows(found)), *self._layers(found))
        if isinstance(found, Profile):
            self.write(self.options.picture, write_picture, lambda: draw_peak(explain_peak(found)))
        elif isinstance(found, Plan):
            self.write(self.options.picture, write_picture, lambda: draw_decisions(found))
        return tables.file_data(found)

    def _layers(self, found: tables.Inspected) -> list[Table]:
        columns: tuple[str, ...]
        if isinstance(found, Profile):
            title, layers = "What layers save and cost", found.to_frame("layers")
            columns = ("saved_bytes", "forward_s", "backward_s", "swap_s", "recompute_s")
        elif isinstance(found, Plan):
            title, layers = "Decisions by layer", tables.decisions_by_layer(found)
            columns = ("swap", "recompute", "keep")
        else:
            return []
        return tables.first_rows(title, layers, columns, self.options.layers)

    def _refuse_picture(self, found: str) -> None:
        if self.options.picture is not None:
            raise UsageError(
                f"--picture: expected one profile or one plan to draw, found {found}; pooch run --picture draws the "
                "memory of a run"
            )

    def _show_set(self) -> dict[str, Any]:
        plans = []
        for path in self.options.files:
            found = tables.load_any(path)
            if not isinstance(found, Plan):
                raise UsageError(f"{path}: expected a plan, found a {found.kind}; show that file alone")
            plans.append(found)
        checked = PlanSet(plans)
        columns = ("budget_bytes", "peak_bytes", "step_s", "overhead")
        title = f"Set of {len(plans)} plans for {plans[0].workload}; a step follows the one for its inputs"
        self.show(tables.frame_table(title, tables.set_frame(checked.plans), columns))
        return {"plans": [tables.file_data(plan) for plan in plans]}


class DiffVerb(Verb):
    name = "diff"
    help = """
Compares two plans: budget, predicted peak and step, values with different decisions, and points with different actions.
Or two profiles: the step, the machine, memory and times. Or a plan and a file of pooch run -o: predicted and measured
figures, and the point and layer at which a step diverged. Exit codes are those of diff: 0 the same, 1 different (a run:
it diverged, exceeded its budget or lost the in-core bits), 2 trouble.

A @first: plan, profile, or run
B @second: a file of the same kind, or a run of plan A
--rows N =12: rows of each table (default: {})

pooch diff plan-60.json plan-70.json
pooch diff monday.profile.json tuesday.profile.json
pooch run train.py:workload --plan plan.json -o run.json ; pooch diff plan.json run.json
pooch diff plan.json other.json --json | jq .values
"""

    def run(self) -> dict[str, Any]:
        options = self.options
        try:
            first, second = tables.load_any(options.first), tables.load_any(options.second)
        except PoochError as error:  # exit code 1 would mean that the files differ
            raise UsageError(str(error)) from None
        found = differences(first, second)
        names = (options.first, options.second)
        self.show(*found.shown(names if max(map(len, names)) <= 30 else ("A", "B"), options.rows))
        if not found:
            self.show("They say the same." if first.kind == second.kind else "The run kept to its plan.")
        self.exit_code = int(bool(found))
        figures = [figure._asdict() for figure in found.figures]
        return {"first": first.kind, "second": second.kind, "differs": bool(found), "figures": figures, **found.data}


class SimulateVerb(Verb):
    name = "simulate"
    help = """
Simulates the profiled step under the plan, as the planner does. Shows its time and its peak, the causes of the overhead
by layer, and what holds the peak. --trace also writes it op by op for Perfetto. Runs on any machine.

<profile>
PLAN: file that pooch plan made from it
--trace >FILE.json: trace events to write: compute, both links, the launching thread, live bytes
--picture >FILE.png: draw what holds the peak: bytes by layer and kind

pooch simulate profile.json plan.json
pooch simulate profile.json plan.json --trace trace.json    # open it at https://ui.perfetto.dev
pooch simulate profile.json plan.json --picture peak.png
pooch simulate profile.json plan.json --json | jq .layers
"""

    def run(self) -> dict[str, Any]:
        options = self.options
        profile, plan = Profile.load(options.profile), Plan.load(options.plan)
        if elsewhere := [one for one in plan.assumed if one not in profile.assumed]:
            raise UsageError(
                f"PLAN: expected one for the machine of {options.profile}, found one for another "
                f"({'; '.join(elsewhere)}); pooch show has its figures, and pooch plan --timeline draws it"
            )
        simulation = simulate_plan(Problem.of(profile, plan), plan)
        self.show(tables.summary_table(f"Predicted step of {plan.workload}", _simulated_rows(plan, simulation)))
        layers = tables.overhead_by_layer(profile, plan)
        costly = layers[layers["overhead_s"] > 0].head(MOST_COSTLY)
        if not costly.empty:
            title = f"Where the overhead comes from ({len(costly)} of {len(layers)} layers)"
            self.show(tables.frame_table(title, costly, ("swap", "recompute", "stall_s", "replay_s", "overhead_s")))
        peak = explain_peak(profile, plan)
        self.show(str(peak))
        self.write(options.picture, write_picture, lambda: draw_peak(peak))
        self.write(options.trace, write_trace, lambda: predicted_trace(profile, plan))
        held = {"moment": peak.moment, "held_by": peak.by_kind(), "held_in": peak.by_layer()}
        return _simulated_data(profile, plan, simulation) | {"layers": tables.plain_rows(layers), "peak": held}


def _simulated_rows(plan: Plan, simulation: Simulation) -> dict[str, str]:
    in_core_s = plan.prediction.in_core_step_s
    causes = msgspec.structs.replace(
        plan.prediction,
        stall_s=simulation.stall_s,
        replay_s=simulation.replay_s,
        interference_s=simulation.interference_s,
    ).causes_text
    return {
        "step": f"{format_seconds(simulation.step_s)} ({plan.prediction.in_core_text})",
        "overhead": f"{simulation.step_s / in_core_s - 1 if in_core_s > 0 else 0.0:+.1%}",
        "of that": causes,
        "peak": f"{format_bytes(simulation.peak_bytes)}, in {simulation.peak_layer or 'no layer'}",
        "peak of the first step": format_bytes(simulation.first_step_peak_bytes),
        "budget": f"{format_bytes(plan.budget_bytes)}, on {plan.counted_text}",
        **plan.arena_rows(),
        "bytes swapped": format_copies(simulation.out_bytes, simulation.in_bytes),
    }


def _simulated_data(profile: Profile, plan: Plan, simulation: Simulation) -> dict[str, Any]:
    predicted = ("memory", "live_peak_bytes", "arena_bytes", "arena_live_bytes", "arena_peak_bytes")
    memory = ("peak_bytes", "first_step_peak_bytes", "peak_layer", "out_bytes", "in_bytes")
    seconds = ("step_s", "stall_s", "replay_s", "interference_s", "runtime_s")
    return {
        "workload": plan.workload,
        "budget_bytes": plan.budget_bytes,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_step_s": plan.prediction.in_core_step_s,
        **{name: getattr(plan.prediction, name) for name in predicted},
        **{name: getattr(simulation, name) for name in (*memory, *seconds)},
    }
