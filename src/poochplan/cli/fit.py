"""``pooch fit``: the largest value of a workload's parameter that trains within a memory, and its overhead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from poochplan.errors import PoochError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile

from .base import Verb
from .options import DEFAULT_MARGIN, MARGIN_NEEDS_MEMORY, gap_problem, over_budget, parse_overrides

if TYPE_CHECKING:
    from poochplan.fitting.fit import Fit


class FitVerb(Verb):
    name = "fit"
    help = """
Finds the largest value of one whole-number parameter of the workload that trains within --device-memory: batch size,
layers, image size, sequence length. Profiles without memory tell what a value takes. The value found fits, and the next
ones are shown not to fit. The table has peaks, overhead with its proven bound, and throughput, from the largest in-core
value up. Without --roofline and --link the question is about this machine: real profiles decide, and --run steps of the
value run under its plan.

<workload>
--vary NAME!: the parameter, such as batch_size
--from N =1 @low: smallest value ({})
--to N @high: largest value (default: 20 doublings)
--max-overhead SHARE: largest overhead of the plan, such as 30% (default: any)
-o, --output >FILE.json: plan of the value found; its profile is written beside it
--csv >FILE: CSV of the table
--picture >FILE.png: draw peaks and throughput against the value
<of workload>
--roofline DEVICE: v100, a100, h100, h200, p100, titan-x, cpu-core, or FLOPS,BYTES such as 50e12,2e12: no step is run
<machine>
<time limit>
<evaluations>
<gaps>
--run N >=0 =2 @steps: steps to run here (default: {})
<spill dir>

pooch fit resnet50 --vary batch_size --roofline v100 --link nvlink2
pooch fit gpt2 --vary layers --roofline a100 --device-memory 40GiB --max-overhead 30% -o plan.json
pooch fit gpt2 --vary batch_size --device-memory 300MiB
pooch fit train.py:workload --vary image_size --device-memory 8GiB --set batch_size=4 --csv fit.csv --picture fit.png
"""

    def run(self) -> dict[str, Any]:
        from poochplan.report.fits import draw_fit, fit_data, fit_frame, fit_lines, fit_table
        from poochplan.report.palette import write_picture
        from poochplan.report.tables import write_csv

        options = self.options
        beside = None if options.output is None else self.output(profile_name(options.output))
        found = self._search()
        self.show(fit_table(found), *fit_lines(found))
        self.write(beside, Profile.save, lambda: found.profile)
        self.write(options.output, Plan.save, lambda: found.plan)
        self.write(options.csv, write_csv, lambda: fit_frame(found))
        self.write(options.picture, write_picture, lambda: draw_fit(found))
        self.problem = _trial_problem(found) or gap_problem(options, [found.plan.solve.gap], "the table is above")
        return fit_data(found) | {"plan": None if options.output is None else str(options.output)}

    def _search(self) -> Fit:
        options, overrides = self.options, parse_overrides(self.options)
        is_here = options.roofline is None and options.link is None and options.compute_scale is None
        if options.device_memory is None and options.margin is not None and options.roofline is None:
            raise UsageError(MARGIN_NEEDS_MEMORY)
        from poochplan.fitting.fit import fit

        with self.progress(f"fitting {options.vary}") as say:
            return fit(
                options.workload,
                options.vary,
                margin=options.margin or ("0" if is_here else DEFAULT_MARGIN),
                settings=overrides,
                time_limit_s=options.time_limit,
                progress=say,
                **self.given("device_memory", "roofline", "link", "compute_scale", "max_overhead", "low", "high"),
                **self.given("gap", "evaluations", "steps", "seed", "spill_dir"),
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
        return over_budget(found.budget_bytes, trial.peak_bytes, "; name less memory, or a --margin")
    return None
