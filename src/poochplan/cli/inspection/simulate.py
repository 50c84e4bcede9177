"""``pooch simulate``: the step that a plan predicts, as a table or as a trace; needs neither torch nor the device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from poochplan.cli.base import Verb

if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.formats.profile import Profile
    from poochplan.planner.simulator.simulate import Simulation

LAYERS_SHOWN = 12


class SimulateVerb(Verb):
    """Runs a plan through the simulator once more and shows what it does."""

    name = "simulate"
    summary = "show the step that a plan predicts: time, memory, and where the overhead comes from"
    description = (
        "Simulates the profiled step under the plan, as planning does, and shows its time, its peak and what the "
        "overhead consists of, by layer, and who holds the peak. With --trace it is also written op by op, for "
        "Perfetto. Runs on any machine."
    )
    examples = """\
  pooch simulate profile.json plan.json
  pooch simulate profile.json plan.json --trace trace.json    # open it at https://ui.perfetto.dev
  pooch simulate profile.json plan.json --picture peak.png
  pooch simulate profile.json plan.json --json | jq .layers
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("profile", metavar="PROFILE", help="file that pooch profile wrote")
        parser.add_argument("plan", metavar="PLAN", help="file that pooch plan made from it")
        parser.add_argument(
            "--trace",
            metavar="FILE.json",
            help="trace events to write: compute, both links, the launching thread, live bytes",
        )

        parser.add_argument(
            "--picture",
            metavar="FILE.png",
            help="draw who holds the peak: bytes by layer and kind",
        )

    def run(self) -> dict[str, Any]:
        from poochplan.formats.plan import Plan
        from poochplan.formats.profile import Profile
        from poochplan.report.layer_table import overhead_by_layer, simulate_plan
        from poochplan.report.peak import explain_peak
        from poochplan.report.tables import frame_table, plain_rows, summary_table

        options = self.options
        trace = self.output(options.trace, suffix=".json")
        picture = self.output(options.picture, suffix=".png")
        profile, plan = Profile.load(options.profile), Plan.load(options.plan)
        simulation = simulate_plan(profile, plan)
        self.show(summary_table(f"Predicted step of {plan.workload}", _rows(plan, simulation)))
        layers = overhead_by_layer(profile, plan)
        costly = layers[layers["overhead_s"] > 0].head(LAYERS_SHOWN)
        if not costly.empty:
            title = f"Where the overhead comes from ({len(costly)} of {len(layers)} layers)"
            headings = {"swap": "swap", "recompute": "recompute", "stall_s": "stall", "replay_s": "replay"}
            self.show(frame_table(title, costly, headings | {"overhead_s": "overhead"}))
        peak = explain_peak(profile, plan)
        self.show(str(peak))
        if picture is not None:
            from poochplan.report.pictures import draw_peak, write_picture

            self.wrote(write_picture(draw_peak(peak), picture, force=options.force))
        if trace is not None:
            from poochplan.report.inspection.step_trace import predicted_trace
            from poochplan.report.inspection.trace_events import write_trace

            self.wrote(write_trace(predicted_trace(profile, plan), trace, force=options.force))
        held = {"moment": peak.moment, "held_by": peak.by_kind(), "held_in": peak.by_layer()}
        return _data(profile, plan, simulation) | {"layers": plain_rows(layers), "peak": held}


def _rows(plan: Plan, simulation: Simulation) -> dict[str, str]:
    from poochplan.report.tables import arena_row, counted_text, overhead_text, runtime_text, swapped_text
    from poochplan.units import format_bytes, format_seconds

    in_core_s = plan.prediction.in_core_step_s
    return {
        "step": f"{format_seconds(simulation.step_s)} ({plan.prediction.in_core_text})",
        "overhead": overhead_text(simulation.step_s / in_core_s - 1 if in_core_s > 0 else 0.0),
        "of that": f"stall {format_seconds(simulation.stall_s)}, replay {format_seconds(simulation.replay_s)}, "
        f"interference {format_seconds(simulation.interference_s)}{runtime_text(plan.prediction)}",
        "peak": f"{format_bytes(simulation.peak_bytes)}, in {simulation.peak_layer or 'no layer'}",
        "peak of the first step": format_bytes(simulation.first_step_peak_bytes),
        "budget": f"{format_bytes(plan.budget_bytes)}, on {counted_text(plan)}",
        **arena_row(plan),
        "bytes swapped": swapped_text(simulation.out_bytes, simulation.in_bytes),
    }


def _data(profile: Profile, plan: Plan, simulation: Simulation) -> dict[str, Any]:
    return {
        "workload": plan.workload,
        "budget_bytes": plan.budget_bytes,
        "in_core_peak_bytes": profile.in_core_peak_bytes,
        "in_core_step_s": plan.prediction.in_core_step_s,
        "peak_bytes": simulation.peak_bytes,
        "first_step_peak_bytes": simulation.first_step_peak_bytes,
        "peak_layer": simulation.peak_layer,
        "memory": plan.prediction.memory,
        "live_peak_bytes": plan.prediction.live_peak_bytes,
        "arena_bytes": plan.prediction.arena_bytes,
        "arena_live_bytes": plan.prediction.arena_live_bytes,
        "arena_peak_bytes": plan.prediction.arena_peak_bytes,
        "step_s": simulation.step_s,
        "stall_s": simulation.stall_s,
        "replay_s": simulation.replay_s,
        "interference_s": simulation.interference_s,
        "runtime_s": simulation.runtime_s,
        "out_bytes": simulation.out_bytes,
        "in_bytes": simulation.in_bytes,
    }
