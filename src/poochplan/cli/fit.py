"""``pooch fit``: the largest value of a workload's parameter that trains within a memory, and its overhead."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poochplan.errors import BudgetExceededError, PoochError, UsageError
from poochplan.units import format_bytes

from .base import Verb
from .options import (
    DEFAULT_MARGIN,
    MARGIN_NEEDS_MEMORY,
    add_machine_arguments,
    add_search_arguments,
    add_spill_dir,
    add_workload,
    add_workload_arguments,
    at_least,
    gap_problem,
    most_gap,
    parse_overrides,
    parse_share,
)

if TYPE_CHECKING:
    from poochplan.fitting.fit import Fit


class FitVerb(Verb):
    """Searches for the largest value, plans several values up to it, and runs the result if this machine can."""

    name = "fit"
    description = (
        "Finds the largest value of one whole-number parameter of the workload that trains within --device-memory: "
        "batch size, layers, image size, sequence length. Profiles without memory tell what a value takes. The value "
        "found fits, and the next ones are shown not to fit. The table has peaks, overhead with its proven bound, "
        "and throughput, from the largest in-core value up. Without --roofline and --link the question is about this "
        "machine: real profiles decide, and --run steps of the value run under its plan."
    )
    examples = """\
  pooch fit resnet50 --vary batch_size --roofline v100 --link nvlink2
  pooch fit gpt2 --vary layers --roofline a100 --device-memory 40GiB --max-overhead 30% -o plan.json
  pooch fit gpt2 --vary batch_size --device-memory 300MiB
  pooch fit train.py:workload --vary image_size --device-memory 8GiB --set batch_size=4 --csv fit.csv --picture fit.png
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_workload(parser)
        parser.add_argument("--vary", required=True, metavar="NAME", help="the parameter, such as batch_size")
        parser.add_argument("--from", dest="low", type=at_least(1), default=1, metavar="N", help="smallest value (1)")
        parser.add_argument(
            "--to", dest="high", type=at_least(1), metavar="N", help="largest value (default: 20 doublings)"
        )
        parser.add_argument(
            "--max-overhead", metavar="SHARE", help="largest overhead of the plan, such as 30%% (default: any)"
        )
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="plan of the value found; its profile is written beside it"
        )
        parser.add_argument("--csv", metavar="FILE", help="CSV of the table")
        parser.add_argument("--picture", metavar="FILE.png", help="draw peaks and throughput against the value")
        add_workload_arguments(parser)
        parser.add_argument(
            "--roofline",
            metavar="DEVICE",
            help="v100, a100, h100, h200, p100, titan-x, cpu-core, or FLOPS,BYTES such as 50e12,2e12: no step is run",
        )
        add_machine_arguments(parser)
        add_search_arguments(parser)
        parser.add_argument(
            "--run", dest="steps", type=at_least(0), default=2, metavar="N", help="steps to run here (default: 2)"
        )
        add_spill_dir(parser)

    def run(self) -> dict[str, Any]:
        from poochplan.report.fits import draw_fit, fit_data, fit_lines, fit_table, write_fit
        from poochplan.report.palette import write_picture

        options, most = self.options, most_gap(self.options)
        path, csv = self.output(options.output, suffix=".json"), self.output(options.csv)
        beside = None if path is None else self.output(profile_name(path))
        picture = self.output(options.picture, suffix=".png")
        found = self._search()
        self.show(fit_table(found), *fit_lines(found))
        if path is not None and beside is not None:
            self.wrote(found.profile.save(beside, force=options.force))
            self.wrote(found.plan.save(path, force=options.force))
        if csv is not None:
            self.wrote(write_fit(found, csv, force=options.force))
        if picture is not None:
            self.wrote(write_picture(draw_fit(found), picture, force=options.force))
        self.problem = _trial_problem(found) or gap_problem([found.plan.solve.gap], most, "the table is above")
        return fit_data(found) | {"plan": None if path is None else str(path)}

    def _search(self) -> Fit:
        options, overrides = self.options, parse_overrides(self.options.settings)
        most_overhead = None if options.max_overhead is None else parse_share(options.max_overhead, "--max-overhead")
        is_here = options.roofline is None and options.link is None and options.compute_scale is None
        if options.device_memory is None and options.margin is not None and options.roofline is None:
            raise UsageError(MARGIN_NEEDS_MEMORY)
        from poochplan.fitting.fit import fit

        with self.progress(f"fitting {options.vary}") as say:
            return fit(
                options.workload,
                options.vary,
                options.device_memory,
                roofline=options.roofline,
                link=options.link,
                compute_scale=options.compute_scale,
                margin=options.margin or ("0" if is_here else DEFAULT_MARGIN),
                max_overhead=most_overhead,
                settings=overrides,
                low=options.low,
                high=options.high,
                time_limit_s=options.time_limit,
                gap=options.gap,
                evaluations=options.evaluations,
                steps=options.steps,
                seed=options.seed,
                spill_dir=options.spill_dir,
                progress=say,
            )


def profile_name(plan_path: Path) -> Path:
    """``name.profile.json`` beside ``name.plan.json``."""
    name = plan_path.name.removesuffix(".json").removesuffix("plan")
    return plan_path.with_name(f"{name}profile.json" if not name or name.endswith(".") else f"{name}.profile.json")


def _trial_problem(found: Fit) -> PoochError | None:
    """The error for a trial run that differed from in-core, or exceeded its budget."""
    trial = found.trial
    if trial is None:
        return None
    if trial.difference is not None:
        return PoochError(f"not bitwise equal to in-core: {trial.difference}; please report this with the plan")
    if not trial.is_within and trial.peak_bytes is not None:
        return BudgetExceededError(
            f"over the budget: expected at most {found.budget_bytes} bytes ({format_bytes(found.budget_bytes)}), found "
            f"a step of {trial.peak_bytes} bytes ({format_bytes(trial.peak_bytes)}); name less memory, or a --margin",
            peak_bytes=trial.peak_bytes,
        )
    return None
