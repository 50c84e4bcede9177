"""``pooch plan``: makes a plan for a profile and a budget. ``pooch sweep``: every policy at every budget.

They need neither torch nor the device.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from poochplan.errors import GapError, InfeasibleError, PoochError, UsageError
from poochplan.formats.plan import Plan, SolveStatus
from poochplan.formats.profile import Profile
from poochplan.planner.arena.step_layout import Laid, kept_in_arena
from poochplan.planner.planning import in_arena, plan, share_that_holds, smallest_budget
from poochplan.planner.search.allowance import Progress
from poochplan.planner.sweep import Solving, SweepPoint, all_policies, compare_policies, default_budgets, sweep
from poochplan.planner.whatif import for_machine
from poochplan.report.frontier import Frontier, draw_frontier, frontier_frame, frontier_of, frontier_table, policy_table
from poochplan.report.palette import write_picture
from poochplan.report.pictures import draw_decisions
from poochplan.report.tables import decision_data, decisions_by_layer, first_rows, summary_table, write_csv
from poochplan.report.timeline import draw_timeline, timeline_of
from poochplan.units import format_bytes

from .base import Verb
from .options import gap_problem, memory_budget, parse_budget_within, smallest_within_memory

LAYERS_SHOWN = 12


class PlanVerb(Verb):
    name = "plan"
    help = """
Finds the plan with the shortest step whose simulated peak is within the budget. Shows its cost, and its gap to the
proven bound. Runs on any machine. Exit code 3: no plan fits, and the message names the smallest budget that has one.
Exit code 4: the plan was written, but its gap is above --max-gap, or Ctrl-C ended the search.

<profile>
--budget SIZE: 60% or 0.6 of the in-core peak, 8GiB, 800MB, or bytes (default: what --device-memory leaves)
| --min: plan for the smallest budget that has a plan
<on>
-o, --output >FILE: plan to write (default: PROFILE's name, .plan.json)
<solver>
<time limit>
<evaluations>
<gaps>
--seed N >=0 =0: seed of the search's random walks (default: {})
--threads N: threads of the search; with 2, one of them proves the bound (default: 2; 1 with --evaluations)
--host-budget SIZE: most bytes swapped to the host (default: what the profile's host had left, within its cgroup; no
  limit for a profile on the CPU, or for another machine)
--ranks-per-host N =1: plan for each of N processes on one host, which share --host-budget and the link evenly
  (default: {})
--policy NAME =ilp: ilp: integer program and local search (default). all: compares every policy and writes the plan of
  ilp. Or one baseline alone: checkpoint-greedy, earliest-first, greedy, keep-all, latest-first, pooch (of the PoocH
  paper), recompute-all, seq2seq, sqrt-n, superneurons, swap-all, swap-all-on-demand, tflms, vdnn
--without NAMES: with commas, what the plan may not do: sources, hold these in place of larger copies; state, move
  optimizer state to the host between steps (default: it may do both)
--timeline >FILE.png: draw the planned step: streams and memory over time
--picture >FILE.png: draw the decisions: a strip of layers
<arena>
<machine>

pooch plan profile.json --budget 60% -o plan.json
pooch plan profile.json --budget 8GiB --timeline plan.png --picture decisions.png
pooch plan profile.json --min -o least.plan.json
pooch plan profile.json --budget 60% --max-gap 1%
pooch plan profile.json --budget 60% --arena off
pooch plan profile.json --device-memory 16GiB --link pcie3 --compute-scale 0.1
pooch plan profile.json --budget 60% --ranks-per-host 8 --host-budget 1TiB
pooch plan profile.json --budget 60% --without sources
pooch plan profile.json --budget 60% --policy all
pooch plan profile.json --budget 60% --evaluations 100000 --seed 1
pooch plan profile.json --budget 0.45 --solver PULP_CBC_CMD --time-limit 300 --json | jq .overhead
"""

    def run(self) -> dict[str, Any]:
        options = self.options
        budget_bytes = memory_budget(options)
        if budget_bytes is None and options.budget is None and not options.min:
            raise UsageError("expected --budget, --min or --device-memory, found none of them; see `pooch plan --help`")
        _settle_arena(options)
        path = options.output or self.output(default_plan_name(options.profile))
        profile = for_machine(Profile.load(options.profile), **self.given("link", "device_memory", "compute_scale"))
        for line in profile.advice():
            print(f"advice: {line}", file=sys.stderr)
        if options.min:
            budget_bytes = smallest_within_memory(profile, options)
        elif options.budget is not None:
            budget_bytes = parse_budget_within(options.budget, profile, options)
        assert budget_bytes is not None, "one of the three is given"
        made = self._made(profile, budget_bytes)
        made.save(path, force=options.force)
        kept = None
        if made.device == "cpu" and in_arena(profile, options.arena):  # a runtime may serve the plan from an arena
            with self.progress("laying out the step with everything kept"):
                kept = kept_in_arena(profile)
        self._show(made, kept)
        self.show(f"Wrote {path}")
        self.write(options.timeline, write_picture, lambda: draw_timeline(timeline_of(profile, made)))
        self.write(options.picture, write_picture, lambda: draw_decisions(made))
        data = plan_data(made, path)
        data["kept_arena_bytes"] = kept.layout.arena_bytes if kept else None
        data["kept_arena_peak_bytes"] = kept.peak_bytes if kept else None
        if options.policy == "all":
            with self.progress("comparing policies"):
                rows = compare_policies(profile, made)
            self.show(policy_table(rows))
            data["policies"] = [asdict(row) for row in rows]
        self.problem = gap_problem(options, [made.solve.gap], f"the plan was written to {path}")
        if made.solve.status is SolveStatus.INTERRUPTED:
            self.problem = GapError(
                "an interrupt ended the search before the plan was within --gap of its proven bound; the best plan "
                f"found was written to {path}; run it again for a better one"
            )
        return data

    def _made(self, profile: Profile, budget_bytes: int) -> Plan:
        options = self.options
        with self.progress("planning") as tell:
            return plan(
                profile,
                budget_bytes,
                time_limit_s=options.time_limit,
                policy="ilp" if options.policy == "all" else options.policy,
                watch=lambda progress: tell(
                    progress_line(progress), share_done(progress, options.evaluations or options.time_limit)
                ),
                keep_interrupted=True,
                **self.given("solver", "gap", "threads", "host_budget", "ranks_per_host", "evaluations", "seed"),
                **self.given("arena", "on"),
                without=options.without or (),
            )

    def _show(self, made: Plan, kept: Laid | None) -> None:
        self.show(summary_table(made.title, {**made.rows(), **kept_row(made, kept)}))
        by_layer = decisions_by_layer(made)
        moved = by_layer[(by_layer["swap"] + by_layer["recompute"]) > 0]
        columns = ("swap", "recompute", "keep")
        self.show(*first_rows("Values not kept, by layer", moved, columns, LAYERS_SHOWN, of=" layers"))


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
    left = f"{progress.left:,.0f} simulations left" if progress.is_counted else f"{progress.left:.0f} s left"
    return f"best so far {progress.overhead:+.2%}, at most {progress.gap:.2%} slower than any possible plan, {left}"


def share_done(progress: Progress, allowed: float) -> float:
    """The used share of the simulations or seconds that the search may take."""
    return min(1.0, max(0.0, 1 - progress.left / allowed))


def default_plan_name(profile_path: str) -> Path:
    """``name.plan.json`` beside ``name.profile.json``."""
    path = Path(profile_path)
    if path.is_dir():
        raise UsageError(f"{path}: expected a profile, found a folder; name a file in it")
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
        "on": plan.on,
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


class SweepVerb(Verb):
    name = "sweep"
    help = """
Plans the profiled step for each budget with each policy, several at a time, and judges all plans by the same simulator.
A policy without a plan within a budget gets a row that says so, with the smallest peak it reached. If interrupted, it
writes the finished rows. Runs on any machine.

<profile>
-o, --output >FILE: CSV to write (default: PROFILE's name, .sweep.csv)
--png >FILE.png: draw overhead against budget, a line for each policy
--budgets SIZES: with commas: 50%,60%,8GiB
| --points N >=2 =9: number of budgets, evenly from the smallest that has a plan to the in-core peak (default: {})
--policies NAMES: with commas: ilp,greedy (default: all)
<solver>
<time limit>
<gaps>
--processes N: plans made at a time (default: one per core)
<on>
<arena>
<machine>

pooch sweep profile.json -o sweep.csv --png sweep.png
pooch sweep profile.json --budgets 50%,60%,8GiB --policies ilp,greedy
pooch sweep profile.json --arena off    # every policy judged by its peak alone, ilp too
pooch sweep profile.json --points 12 --link pcie3 --compute-scale 0.1 --png pcie3.png --json | jq .points
"""

    def run(self) -> dict[str, Any]:
        options = self.options
        plan_path = default_plan_name(options.profile)
        csv = options.output or self.output(plan_path.with_name(f"{plan_path.name.removesuffix('plan.json')}sweep.csv"))
        memory_budget(options)
        profile = for_machine(Profile.load(options.profile), **self.given("link", "device_memory", "compute_scale"))
        smallest, budgets = self._budgets(profile)
        policies = all_policies() if options.policies in (None, ["all"]) else tuple(options.policies)
        finished: list[SweepPoint] = []
        try:
            self._sweep(profile, budgets, policies, finished)
        except KeyboardInterrupt:
            self._keep_finished(frontier_of(profile, finished, smallest, policies), csv)
            raise
        frontier = frontier_of(profile, finished, smallest, policies)
        write_csv(frontier_frame(frontier), csv, force=options.force)
        self.show(frontier_table(frontier), f"Wrote {csv}")
        self.write(options.png, write_picture, lambda: draw_frontier(frontier))
        self.problem = _points_problem(frontier, csv) or gap_problem(
            options, [point.gap for point in frontier.points], f"all of them were written to {csv}"
        )
        return frontier_data(frontier, profile, csv)

    def _budgets(self, profile: Profile) -> tuple[int, tuple[int, ...]]:
        """Bytes of the smallest budget with a plan, and of the budgets to plan for, in ascending order.

        Raises ``UsageError`` for an invalid budget, and ``InfeasibleError`` if no default budget has a plan.
        """
        options = self.options
        if options.budgets is not None:
            named = {parse_budget_within(text, profile, options, "--budgets") for text in options.budgets}
            return smallest_budget(profile, arena=options.arena), tuple(sorted(named))
        smallest = smallest_within_memory(profile, options)
        most_bytes = memory_budget(options)
        return smallest, default_budgets(profile, options.points, most_bytes, **self.given("arena", "on"))

    def _sweep(
        self, profile: Profile, budgets: tuple[int, ...], policies: tuple[str, ...], finished: list[SweepPoint]
    ) -> None:
        """Fills ``finished``; an interrupted sweep has the cells that are in it."""
        options = self.options
        solving = Solving(time_limit_s=options.time_limit, **self.given("solver", "gap", "arena", "on"))
        with self.progress(f"{len(policies)} policies within {len(budgets)} budgets") as say:

            def note(point: SweepPoint, done: int, total: int) -> None:
                finished.append(point)
                last = f"{point.policy} within {format_bytes(point.budget_bytes)}"
                say(f"{done} of {total} done, last {last}", done / total)

            sweep(profile, budgets, policies, solving=solving, processes=options.processes, finished=note)

    def _keep_finished(self, frontier: Frontier, csv: Path) -> None:
        """Writes the rows of an interrupted sweep; the picture is left out."""
        if not frontier.points:
            self.show("Interrupted before any plan was finished: nothing was written")
            return
        write_csv(frontier_frame(frontier), csv, force=self.options.force)
        self.show(f"Wrote {csv}: only the {len(frontier.points)} rows that were finished when it was interrupted")


def frontier_data(frontier: Frontier, profile: Profile, csv: Path) -> dict[str, Any]:
    """The data of ``pooch sweep --json``: the workload's figures, and one point for each row of the CSV."""
    return {
        "csv": str(csv),
        "workload": frontier.workload,
        "in_core_peak_bytes": frontier.in_core_peak_bytes,
        "in_core_step_s": profile.times.plain_step_s or sum(op.duration_s for op in profile.ops),
        "smallest_budget_bytes": frontier.smallest_budget_bytes,
        "assumed": list(profile.assumed),
        "points": [point.columns() for point in frontier.points],
    }


def _points_problem(frontier: Frontier, csv: Path) -> PoochError | None:
    """The error if a plan failed, or no policy has a plan. The file was written anyway."""
    points = frontier.points
    failed = [point for point in points if point.failed]
    if failed:
        first = failed[0]
        return PoochError(
            f"{len(failed)} of {len(points)} plans failed, first {first.policy} within "
            f"{format_bytes(first.budget_bytes)} ({first.outcome}); the others were written to {csv}"
        )
    if not any(point.feasible for point in points):
        smallest = frontier.smallest_budget_bytes
        return InfeasibleError(
            f"no policy has a plan within any of these budgets: expected at least {smallest} bytes "
            f"({format_bytes(smallest)}); the least memory of each policy was written to {csv}",
            smallest_budget_bytes=smallest,
        )
    return None
