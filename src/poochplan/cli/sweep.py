"""``pooch sweep``: every policy at every budget. It needs neither torch nor the device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from poochplan.errors import InfeasibleError, PoochError, UsageError
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.sweep import Solving, SweepPoint, all_policies, default_budgets, sweep
from poochplan.report.frontier import Frontier, draw_frontier, frontier_of, frontier_table, write_frontier
from poochplan.report.palette import write_picture
from poochplan.units import format_bytes

from .base import Verb
from .options import (
    add_arena_argument,
    add_machine_arguments,
    add_search_arguments,
    at_least,
    gap_problem,
    memory_budget,
    most_gap,
    parse_budget_within,
    profile_for,
    smallest_within_memory,
)
from .plan import default_plan_name


class SweepVerb(Verb):
    """Plans with each policy for a range of budgets, and writes the frontier."""

    name = "sweep"
    description = (
        "Plans the profiled step for each budget with each policy, several at a time, and judges all plans by the "
        "same simulator. A policy without a plan within a budget gets a row that says so, with the smallest peak it "
        "reached. If interrupted, it writes the finished rows. Runs on any machine."
    )
    examples = """\
  pooch sweep profile.json -o sweep.csv --png sweep.png
  pooch sweep profile.json --budgets 50%,60%,8GiB --policies ilp,greedy
  pooch sweep profile.json --arena off    # every policy judged by its peak alone, ilp too
  pooch sweep profile.json --points 12 --link pcie3 --compute-scale 0.1 --png pcie3.png --json | jq .points
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("profile", metavar="PROFILE", help="file that pooch profile wrote")
        parser.add_argument("-o", "--output", metavar="FILE", help="CSV to write (default: PROFILE's name, .sweep.csv)")
        parser.add_argument("--png", metavar="FILE.png", help="draw overhead against budget, a line for each policy")
        budgets = parser.add_mutually_exclusive_group()
        budgets.add_argument("--budgets", metavar="SIZES", help="with commas: 50%%,60%%,8GiB")
        budgets.add_argument(
            "--points",
            type=at_least(2),
            default=9,
            metavar="N",
            help="number of budgets, evenly from the smallest that has a plan to the in-core peak (default: 9)",
        )
        parser.add_argument("--policies", metavar="NAMES", help="with commas: ilp,greedy (default: all)")
        parser.add_argument("--solver", metavar="NAME", help="a PuLP solver (default: HiGHS, or CBC without it)")
        add_search_arguments(parser, is_counted=False)
        parser.add_argument(
            "--processes", type=at_least(1), metavar="N", help="plans made at a time (default: one per core)"
        )
        add_arena_argument(parser)
        add_machine_arguments(parser)

    def run(self) -> dict[str, Any]:
        options, most = self.options, most_gap(self.options)
        csv = self.output(options.output or default_sweep_name(options.profile))
        picture = self.output(options.png, suffix=".png")
        assert csv is not None
        memory_budget(options)
        profile = profile_for(Profile.load(options.profile), options)
        smallest, budgets = self._budgets(profile)
        policies = (
            all_policies() if options.policies in (None, "all") else tuple(_listed(options.policies, "--policies"))
        )
        finished: list[SweepPoint] = []
        try:
            self._sweep(profile, budgets, policies, finished)
        except KeyboardInterrupt:
            self._keep_finished(frontier_of(profile, finished, smallest, policies), csv)
            raise
        frontier = frontier_of(profile, finished, smallest, policies)
        self._write(frontier, csv, picture)
        self.problem = _points_problem(frontier, csv) or gap_problem(
            [point.gap for point in frontier.points], most, f"all of them were written to {csv}"
        )
        return frontier_data(frontier, profile, csv)

    def _budgets(self, profile: Profile) -> tuple[int, tuple[int, ...]]:
        """Bytes of the smallest budget with a plan, and of the budgets to plan for, in ascending order.

        Raises ``UsageError`` for an invalid budget, and ``InfeasibleError`` if no default budget has a plan.
        """
        options = self.options
        if options.budgets is not None:
            listed = _listed(options.budgets, "--budgets")
            named = {parse_budget_within(text, profile, options, "--budgets") for text in listed}
            return smallest_budget(profile, arena=options.arena), tuple(sorted(named))
        smallest = smallest_within_memory(profile, options)
        return smallest, default_budgets(profile, options.points, memory_budget(options), arena=options.arena)

    def _sweep(
        self, profile: Profile, budgets: tuple[int, ...], policies: tuple[str, ...], finished: list[SweepPoint]
    ) -> None:
        """Fills ``finished``; an interrupted sweep has the cells that are in it."""
        options = self.options
        solving = Solving(solver=options.solver, time_limit_s=options.time_limit, gap=options.gap, arena=options.arena)
        with self.progress(f"{len(policies)} policies within {len(budgets)} budgets") as say:

            def note(point: SweepPoint, done: int, total: int) -> None:
                finished.append(point)
                last = f"{point.policy} within {format_bytes(point.budget_bytes)}"
                say(f"{done} of {total} done, last {last}", done / total)

            sweep(profile, budgets, policies, solving=solving, processes=options.processes, finished=note)

    def _write(self, frontier: Frontier, csv: Path, picture: Path | None) -> None:
        write_frontier(frontier, csv, force=self.options.force)
        self.show(frontier_table(frontier))
        self.wrote(csv)
        if picture is not None:
            self.wrote(write_picture(draw_frontier(frontier), picture, force=self.options.force))

    def _keep_finished(self, frontier: Frontier, csv: Path) -> None:
        """Writes the rows of an interrupted sweep; the picture is left out."""
        if not frontier.points:
            self.show("Interrupted before any plan was finished: nothing was written")
            return
        write_frontier(frontier, csv, force=self.options.force)
        self.show(f"Wrote {csv}: only the {len(frontier.points)} rows that were finished when it was interrupted")


def default_sweep_name(profile_path: str) -> Path:
    """``name.sweep.csv`` beside ``name.profile.json``."""
    path = default_plan_name(profile_path)
    return path.with_name(path.name.removesuffix("plan.json") + "sweep.csv")


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


def _listed(text: str, what: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{what}: expected names or sizes with commas between them, found {text!r}")
    return parts


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
