"""``pooch plan``: makes a plan for a profile and a budget. It needs neither torch nor the device."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from poochplan.errors import GapError, UsageError
from poochplan.formats.plan import Plan, SolveStatus
from poochplan.formats.profile import Profile
from poochplan.planner.arena.step_layout import Laid, kept_in_arena
from poochplan.planner.planning import in_arena, plan, share_that_holds
from poochplan.planner.search.allowance import Progress
from poochplan.planner.sweep import compare_policies
from poochplan.planner.whatif import shared
from poochplan.report.files_shown import decision_data
from poochplan.report.frontier import policy_table
from poochplan.report.palette import write_picture
from poochplan.report.pictures import draw_decisions
from poochplan.report.tables import decisions_by_layer, frame_table, summary_table
from poochplan.report.timeline import draw_timeline, timeline_of
from poochplan.units import format_bytes

from .base import Verb
from .options import (
    add_arena_argument,
    add_machine_arguments,
    add_search_arguments,
    at_least,
    chosen_budget,
    gap_problem,
    most_gap,
    profile_for,
    require_budget,
)

LAYERS_SHOWN = 12


class PlanVerb(Verb):
    """Finds the fastest plan that fits the budget, and writes it."""

    name = "plan"
    description = (
        "Finds the plan with the shortest step whose simulated peak is within the budget. Shows its cost, and its "
        "gap to the proven bound. Runs on any machine. Exit code 3: no plan fits, and the message names the smallest "
        "budget that has one. Exit code 4: the plan was written, but its gap is above --max-gap, or Ctrl-C ended the "
        "search."
    )
    examples = """\
  pooch plan profile.json --budget 60% -o plan.json
  pooch plan profile.json --budget 8GiB --timeline plan.png --picture decisions.png
  pooch plan profile.json --min -o least.plan.json
  pooch plan profile.json --budget 60% --max-gap 1%
  pooch plan profile.json --budget 60% --arena off
  pooch plan profile.json --device-memory 16GiB --link pcie3 --compute-scale 0.1
  pooch plan profile.json --budget 60% --ranks-per-host 8 --host-budget 1TiB
  pooch plan profile.json --budget 60% --policy all
  pooch plan profile.json --budget 60% --evaluations 100000 --seed 1
  pooch plan profile.json --budget 0.45 --solver PULP_CBC_CMD --time-limit 300 --json | jq .overhead
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("profile", metavar="PROFILE", help="file that pooch profile wrote")
        budget = parser.add_mutually_exclusive_group()
        budget.add_argument(
            "--budget",
            metavar="SIZE",
            help="60%% or 0.6 of the in-core peak, 8GiB, 800MB, or bytes (default: what --device-memory leaves)",
        )
        budget.add_argument("--min", action="store_true", help="plan for the smallest budget that has a plan")
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="plan to write (default: PROFILE's name, .plan.json)"
        )
        parser.add_argument("--solver", metavar="NAME", help="a PuLP solver (default: HiGHS, or CBC without it)")
        add_search_arguments(parser)
        parser.add_argument(
            "--seed", type=at_least(0), default=0, metavar="N", help="seed of the search's random walks (default: 0)"
        )
        parser.add_argument(
            "--threads",
            type=at_least(1),
            metavar="N",
            help="threads of the search; with 2, one of them proves the bound (default: 2; 1 with --evaluations)",
        )
        parser.add_argument("--host-budget", metavar="SIZE", help="most bytes swapped to the host (default: no limit)")
        parser.add_argument(
            "--ranks-per-host",
            type=at_least(1),
            default=1,
            metavar="N",
            help="plan for each of N processes on one host, which share --host-budget and the link evenly (default: 1)",
        )
        parser.add_argument(
            "--policy",
            default="ilp",
            metavar="NAME",
            help="ilp: integer program and local search (default). all: compares every policy and writes the plan of "
            "ilp. Or one baseline alone: checkpoint-greedy, earliest-first, greedy, keep-all, latest-first, pooch (of "
            "the PoocH paper), recompute-all, seq2seq, sqrt-n, superneurons, swap-all, swap-all-on-demand, tflms, vdnn",
        )
        parser.add_argument(
            "--timeline", metavar="FILE.png", help="draw the planned step: streams and memory over time"
        )
        parser.add_argument("--picture", metavar="FILE.png", help="draw the decisions: a strip of layers")
        add_arena_argument(parser)
        add_machine_arguments(parser)

    def run(self) -> dict[str, Any]:
        options = self.options
        require_budget(options)
        _settle_arena(options)
        most = most_gap(options)
        path = self.output(options.output or default_plan_name(options.profile))
        timeline = self.output(options.timeline, suffix=".png")
        picture = self.output(options.picture, suffix=".png")
        assert path is not None
        profile = profile_for(Profile.load(options.profile), options)
        self.advise(profile.advice())
        budget_bytes = chosen_budget(profile, options)
        with self.progress("planning") as tell:
            made = plan(
                profile,
                budget_bytes,
                solver=options.solver,
                time_limit_s=options.time_limit,
                gap=options.gap,
                threads=options.threads,
                host_budget=options.host_budget,
                ranks_per_host=options.ranks_per_host,
                evaluations=options.evaluations,
                seed=options.seed,
                policy="ilp" if options.policy == "all" else options.policy,
                watch=lambda progress: tell(
                    progress_line(progress), share_done(progress, options.evaluations or options.time_limit)
                ),
                keep_interrupted=True,
                arena=options.arena,
            )
        made.save(path, force=options.force)
        profile = shared(profile, options.ranks_per_host)
        kept = self._kept(profile, made)
        self._show(made, kept)
        self.wrote(path)
        if timeline is not None:
            figure = draw_timeline(timeline_of(profile, made))
            self.wrote(write_picture(figure, timeline, force=options.force))
        if picture is not None:
            self.wrote(write_picture(draw_decisions(made), picture, force=options.force))
        data = plan_data(made, path) | kept_data(kept)
        if options.policy == "all":
            data["policies"] = self._compare(profile, made)
        self.problem = _interrupt(made, path) or gap_problem([made.solve.gap], most, f"the plan was written to {path}")
        return data

    def _compare(self, profile: Profile, made: Plan) -> list[dict[str, Any]]:
        """Shows every policy's plan for the budget; returns the figures as data."""
        with self.progress("comparing policies"):
            rows = compare_policies(profile, made)
        self.show(policy_table("Policies, those that fit first", rows))
        return [asdict(row) for row in rows]

    def _kept(self, profile: Profile, made: Plan) -> Laid | None:
        """The arena of the step that keeps everything, if a runtime may serve the plan from an arena."""
        if made.device != "cpu" or not in_arena(profile, self.options.arena):
            return None
        with self.progress("laying out the step with everything kept"):
            return kept_in_arena(profile)

    def _show(self, made: Plan, kept: Laid | None) -> None:
        self.show(summary_table(f"Plan for {made.workload}", {**made.rows(), **kept_row(made, kept)}))
        by_layer = decisions_by_layer(made)
        moved = by_layer[(by_layer["swap"] + by_layer["recompute"]) > 0]
        if moved.empty:
            return
        title = f"Values not kept, by layer ({min(LAYERS_SHOWN, len(moved))} of {len(moved)} layers)"
        headings = {"swap": "swap", "recompute": "recompute", "keep": "keep"}
        self.show(frame_table(title, moved.head(LAYERS_SHOWN), headings))


def _settle_arena(options: argparse.Namespace) -> None:
    """Switches the arena off for policies other than the ILP, whose budgets cover the peak alone."""
    if options.policy in ("ilp", "all"):
        return
    if options.arena == "on":
        raise UsageError(
            f"--arena on: expected --policy ilp, which alone plans for an arena, found {options.policy}; leave one out"
        )
    options.arena = "off"


def progress_line(progress: Progress) -> str:
    """The search's progress in one line."""
    left = f"{progress.left:,.0f} simulations left" if progress.is_counted else f"{progress.left:.0f} s left"
    return f"best {progress.overhead:+.2%}, proven within {progress.gap:.2%} of the best there is, {left}"


def share_done(progress: Progress, allowed: float) -> float:
    """The used share of the simulations or seconds that the search may take."""
    return min(1.0, max(0.0, 1 - progress.left / allowed))


def default_plan_name(profile_path: str) -> Path:
    """``name.plan.json`` beside ``name.profile.json``."""
    path = Path(profile_path)
    name = path.name.removesuffix(".gz").removesuffix(".json")
    name = name.removesuffix(".profile")
    return path.with_name("plan.json" if name in ("profile", "") else f"{name}.plan.json")


def plan_data(plan: Plan, path: Path) -> dict[str, Any]:
    """The data of ``pooch plan --json``: budget, prediction, decisions and the facts of the search."""
    prediction: dict[str, Any] = msgspec.to_builtins(plan.prediction)
    return {
        "plan": str(path),
        "workload": plan.workload,
        "budget_bytes": plan.budget_bytes,
        **prediction,
        "arena_within_budget": plan.holds_arena,
        "decisions": decision_data(plan),
        "solve": msgspec.to_builtins(plan.solve),
        "estimate": plan.estimate,
        "assumed": list(plan.assumed),
        "notes": list(plan.notes),
    }


def kept_row(plan: Plan, kept: Laid | None) -> dict[str, str]:
    """A row for the step that keeps everything in an arena: its bytes, and the budget for it. Empty without one."""
    if kept is None:
        return {}
    in_core_bytes = plan.prediction.in_core_peak_bytes
    text = f"the same step from one arena of {format_bytes(kept.layout.arena_bytes)}"
    if kept.peak_bytes > plan.budget_bytes:
        share = share_that_holds(max(kept.peak_bytes, in_core_bytes), in_core_bytes).replace(".00%", "%")
        text = f"--budget {share}: {text}"
    return {"everything kept": text}


def kept_data(kept: Laid | None) -> dict[str, Any]:
    """Data of the arena that would hold the step with everything kept; None if it was not computed."""
    return {
        "kept_arena_bytes": kept.layout.arena_bytes if kept else None,
        "kept_arena_peak_bytes": kept.peak_bytes if kept else None,
    }


def _interrupt(plan: Plan, path: Path) -> GapError | None:
    """The error if Ctrl-C ended the search."""
    if plan.solve.status is not SolveStatus.INTERRUPTED:
        return None
    return GapError(
        "an interrupt ended the search before the plan was within --gap of its proven bound; the best plan found "
        f"was written to {path}; run it again for a better one"
    )
