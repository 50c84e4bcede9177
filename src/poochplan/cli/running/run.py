"""``pooch run``: trains a workload for some steps under a plan, measures them, and checks them against in-core."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poochplan.cli.base import SPILL_DIR_HELP, Verb, at_least, parse_overrides
from poochplan.cli.machine import DEFAULT_MARGIN
from poochplan.cli.plan import draw
from poochplan.cli.profile import add_workload, add_workload_arguments
from poochplan.errors import InputFileError, UsageError
from poochplan.units import parse_bytes

from .compiled import (
    add_compile_arguments,
    check_compile,
    made_plan,
    room_to_compile,
    with_inductor,
    with_plan_inside,
)
from .outcome import problem_of, why_not_served_text

if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.formats.plan_set import PlanSet
    from poochplan.formats.profile import Profile
    from poochplan.report.runs import RunSummary
    from poochplan.verify import Build
    from poochplan.workload import LoadedWorkload, Workload


class RunVerb(Verb):
    """Runs steps under a plan; with ``--check`` also in-core, and compares bit by bit."""

    name = "run"
    summary = "train for some steps under a plan, measure them, and check the gradients"
    description = (
        "Builds the workload, runs training steps under the plan, and sets measured peak and step time beside the "
        "predicted ones. With --check the same steps also run in-core from the same seed, and the loss, every "
        "gradient, every buffer and every parameter of each step must be bitwise equal (exit code 1 if not). Step "
        "times are medians over --timed further steps, which are neither metered nor compared. Exit code 5: a metered "
        "step took more than the budget; 6: steps left their plan. With --compile the model is compiled by Inductor, "
        "the plan inside its graphs (CPU, a C++ compiler)."
    )
    force_help = "overwrite output files that exist, and run a plan whose times are a roofline's"
    examples = """\
  pooch run unet3d --plan plan.json --check
  pooch run unet3d --plan plan.json --check --certificate certificate.json
  pooch run train.py:workload --plan plan.json --steps 10 --set batch_size=64 --on-divergence error
  pooch run unet3d --plan plan.json --profile profile.json --timeline run.png --picture memory.png
  pooch run gpt2 --plan gpu-plan.json --check --cap --margin 256MiB
  pooch run unet3d --plan plan.json -o run.json --trace trace.json && pooch diff plan.json run.json
  pooch run gpt2 --plan plan.json --check --arena on --timed 10
  pooch run train.py:workload --plan batch32.plan.json --plan batch64.plan.json --set batch_size=48
  pooch run gpt2 --compile --budget 60% --check --save-plan compiled.plan.json
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_workload(parser)
        parser.add_argument(
            "--plan",
            dest="plans",
            action="append",
            metavar="FILE",
            help="file that pooch plan wrote; repeatable, each step then follows the plan for its inputs",
        )
        add_compile_arguments(parser)
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="JSON to write: what was found, and where steps left it"
        )
        parser.add_argument("--steps", type=at_least(1), default=3, metavar="N", help="metered steps (default: 3)")
        parser.add_argument(
            "--timed", type=at_least(1), default=3, metavar="N", help="further steps, for the step time (default: 3)"
        )
        parser.add_argument("--check", action="store_true", help="run in-core too, and compare bit by bit")
        parser.add_argument(
            "--certificate",
            metavar="FILE.json",
            help="with --check: write digests of what each step left in-core and under the plan, versions and flags",
        )
        add_workload_arguments(parser)
        parser.add_argument(
            "--cap", action="store_true", help="on CUDA: let the allocator take no more than the budget"
        )
        parser.add_argument(
            "--margin",
            metavar="SIZE",
            help=f"with --cap: so much above the budget (default: {DEFAULT_MARGIN})",
        )
        parser.add_argument(
            "--arena",
            choices=("auto", "on", "off"),
            default="auto",
            help="on the CPU: serve the blocks of planned steps from one arena, as the plan lays them out. auto: where "
            "it is within the budget and there is a C++ compiler; on: or an error (default: auto)",
        )
        parser.add_argument("--spill-dir", metavar="DIR", help=SPILL_DIR_HELP)
        parser.add_argument(
            "--on-divergence",
            choices=("warn", "error"),
            default="warn",
            help="when a step is not the profiled one: warn and swap everything from there on, or end with an error "
            "(default: warn)",
        )
        parser.add_argument(
            "--timeline", metavar="FILE.png", help="draw the planned step: streams and memory over time"
        )
        parser.add_argument(
            "--trace",
            metavar="FILE.json",
            help="measure one step more, op by op, and write it for Perfetto (ui.perfetto.dev) or chrome://tracing",
        )
        parser.add_argument(
            "--picture",
            metavar="FILE.png",
            help="measure one step more, op by op, and draw its live memory against the predicted one, and who holds "
            "the peak",
        )
        parser.add_argument(
            "--profile",
            metavar="FILE",
            help="the plan's profile, for --timeline and --picture (default: found beside the plan)",
        )

    def run(self) -> dict[str, Any]:
        check_compile(self.options)
        with room_to_compile() if self.options.compile else contextlib.nullcontext():
            return self._run()

    def _run(self) -> dict[str, Any]:
        import msgspec

        from poochplan.formats.plan_set import PlanSet
        from poochplan.profiler.assembly.host import this_host, versions_here

        options = self.options
        timeline = self.output(options.timeline, suffix=".png")
        picture = self.output(options.picture, suffix=".png")
        record_path, trace_path = self.output(options.output), self.output(options.trace, suffix=".json")
        plan_path = self.output(options.save_plan, suffix=".json")
        certificate_path = self.output(options.certificate, suffix=".json")
        if certificate_path is not None and not options.check:
            raise UsageError("--certificate: expected --check beside it, which compares the steps; add --check")
        plans = self._plans()
        every = plans.plans if isinstance(plans, PlanSet) else (plans,)
        if plan_path is not None:
            self.wrote(every[0].save(plan_path, force=options.force))
        build, in_core = self._builders(every[0])
        self._cap_bytes = self._cap(every)
        drawn = "--timeline" if timeline is not None else "--picture" if picture is not None else ""
        profile = self._profile(plans, drawn) if drawn else None
        plan, summary = self._measure(plans, build, in_core, certificate_path)
        self._show(plan, summary)
        if timeline is not None and profile is not None:
            measured = None if summary.in_core_step_s is None else summary.overhead(plan)
            draw(profile, plan, timeline, options.force, summary.peak_bytes, measured)
            self.wrote(timeline)
        record = summary.record(plan, versions_here(plan.device), this_host())
        if record_path is not None:
            self.wrote(record.save(record_path, force=options.force))
        if trace_path is not None or picture is not None:
            self._trace(plans, build, trace_path, picture, profile)
        data: dict[str, Any] = msgspec.to_builtins(record)
        problem = problem_of(plan, summary)
        if problem is not None:
            if options.json:
                self.print_json(data)
            raise problem
        return data

    def _trace(
        self, plans: Plan | PlanSet, build: Build, path: Path | None, picture: Path | None, profile: Profile | None
    ) -> None:
        """Measures one step more, writes it, and draws it beside the predicted one."""
        from poochplan.formats.plan_set import PlanSet
        from poochplan.report.inspection.trace_events import write_trace
        from poochplan.report.pictures import draw_step_memory, step_memory_of, write_picture
        from poochplan.tracing import traced_step

        options = self.options
        with self.progress("tracing a step"):
            traced = traced_step(build, plans, seed=options.seed, spill_dir=options.spill_dir, force=options.force)
        if path is not None:
            self.wrote(write_trace(traced, path, force=options.force))
        if picture is not None and profile is not None and not isinstance(plans, PlanSet):
            figure = draw_step_memory(step_memory_of(profile, plans, traced))
            self.wrote(write_picture(figure, picture, force=options.force))

    def _load(self, device: str) -> LoadedWorkload:
        from poochplan.workload import load_workload

        return load_workload(self.options.workload, parse_overrides(self.options.settings), device)

    def _builders(self, plan: Plan) -> tuple[Build, Build | None]:
        """What makes the workload that follows the plan, and the in-core one where that is another."""
        parse_overrides(self.options.settings)  # what is wrong with them is said before anything runs

        def build() -> Workload:
            return self._load(plan.device).workload

        return (with_plan_inside(build, plan), with_inductor(build)) if self.options.compile else (build, None)

    def _cap(self, plans: Sequence[Plan]) -> int | None:
        """Bytes of ``--cap``; raises ``UsageError`` where there is no allocator to cap."""
        options = self.options
        if not options.cap:
            if options.margin is not None:
                raise UsageError("--margin: expected --cap beside it, found none; add --cap, or leave --margin out")
            return None
        if plans[0].device != "cuda":
            raise UsageError(
                f"--cap: expected a plan for cuda, whose allocator takes a limit, found one for {plans[0].device}"
            )
        margin = options.margin or DEFAULT_MARGIN
        return max(plan.budget_bytes for plan in plans) + (
            0 if margin.strip() == "0" else parse_bytes(margin, "--margin")
        )

    def _plans(self) -> Plan | PlanSet:
        from poochplan.formats.plan import Plan
        from poochplan.formats.plan_set import PlanSet

        options = self.options
        if options.budget is not None:
            with self.progress("compiling") as say:
                return made_plan(lambda: self._load("cpu"), options, say)
        first, *others = options.plans
        return PlanSet.load(first, *others) if others else Plan.load(first)

    def _profile(self, plan: Plan | PlanSet, drawn: str) -> Profile:
        """The profile that the plan was made from: the one that was named, or the one beside the plan.

        ``drawn`` is the option that asks for a picture, for messages.
        """
        from poochplan.formats.plan_set import PlanSet
        from poochplan.formats.profile import Profile

        if isinstance(plan, PlanSet):
            raise UsageError(
                f"{drawn}: expected one plan to draw, found {len(plan.plans)}; give one --plan, or draw each with "
                "pooch plan --timeline"
            )
        if plan.assumed:
            raise UsageError(
                f"{drawn}: expected a plan for this machine, found one for another "
                f"({'; '.join(plan.assumed)}); draw that one with pooch plan --timeline"
            )
        named = self.options.profile
        folder = Path(self.options.plans[0]).parent
        if named:
            profiles = [Profile.load(named)]
        else:
            profiles = []
            for path in sorted((*folder.glob("*profile.json"), *folder.glob("*profile.json.gz"))):
                with contextlib.suppress(InputFileError):  # a broken neighbour is not this command's business
                    profiles.append(Profile.load(path))
        for profile in profiles:
            if profile.ops_fingerprint == plan.profile_fingerprint:
                return profile
        found = f"{named} is of another step" if named else f"none of the profiles in {folder} is"
        raise UsageError(f"{drawn}: expected the profile that the plan was made from, {found}; name it with --profile")

    def _measure(
        self, plans: Plan | PlanSet, build: Build, in_core_build: Build | None, certificate: Path | None
    ) -> tuple[Plan, RunSummary]:
        """What was measured, and the plan that the steps followed; what was compared is written to ``certificate``."""
        from poochplan import verify
        from poochplan.report.runs import RunSummary

        options = self.options
        shared: dict[str, Any] = {
            "steps": options.steps,
            "timed_steps": options.timed,
            "seed": options.seed,
            "spill_dir": Path(options.spill_dir) if options.spill_dir else None,
            "on_divergence": options.on_divergence,
            "cap_bytes": self._cap_bytes,
            "arena": options.arena,
            "force": options.force,
        }
        compared, in_core = None, None
        with self.progress("running") as say:
            if options.check:
                compared = verify.check(build, plans, in_core_build=in_core_build, progress=say, **shared)
                planned = compared.planned
                in_core = compared.in_core
            else:
                planned = verify.run_planned(build, plans, record=False, progress=say, **shared)
        if compared is not None and certificate is not None:
            found = verify.certificate_of(compared, options.seed)
            self.wrote(found.save(certificate, force=options.force))
        assert planned.plan is not None
        why_not = why_not_served_text(options.arena, planned.plan)
        return planned.plan, RunSummary.of(planned, in_core=in_core, comparison=compared, why_not_served=why_not)

    def _show(self, plan: Plan, summary: RunSummary) -> None:
        from poochplan.report.tables import summary_table

        steps = f"{self.options.steps} steps and {self.options.timed} timed ones"
        self.show(summary_table(f"{plan.workload}: {steps} under the plan", summary.rows(plan)))
        contradiction = summary.contradiction(plan)
        if contradiction:
            self.show(f"Note: {contradiction}")
