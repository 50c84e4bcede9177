"""``pooch run``: trains a workload for some steps under a plan, measures them, and compares them with in-core steps."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from poochplan.errors import BudgetExceededError, DivergenceError, InputFileError, PoochError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.formats.run_record import RunRecord
from poochplan.report.palette import write_picture
from poochplan.report.pictures import draw_step_memory, step_memory_of
from poochplan.report.runs import run_record, worst_of
from poochplan.report.tables import summary_table
from poochplan.report.timeline import draw_timeline, timeline_of, write_trace
from poochplan.units import format_bytes, parse_bytes

from .base import Say, Verb
from .options import (
    DEFAULT_MARGIN,
    add_spill_dir,
    add_workload,
    add_workload_arguments,
    at_least,
    parse_overrides,
    positive,
)

if TYPE_CHECKING:
    from poochplan.online.ranks import Ranks
    from poochplan.runtime.arena.serving import ArenaMode
    from poochplan.verify import Build
    from poochplan.workload import LoadedWorkload, Workload

COMPILED_RUNS = 4
"""Runs of a compiled model: in-core, under the plan, in-core again for its time, and once more if bits differ."""


class RunVerb(Verb):
    """Runs steps under a plan. With ``--check`` it also runs them in-core and compares the results bit by bit."""

    name = "run"
    has_ranks = True
    description = (
        "Builds the workload, runs training steps under the plan, and compares measured peak and step time with the "
        "predicted ones. With --check the same steps also run in-core from the same seed. Loss, gradients, buffers "
        "and parameters of each step must then be bitwise equal (exit code 1 if not). The step time is the median "
        "over --timed further steps, which are neither metered nor compared. Exit code 5: a metered step exceeded "
        "the budget. Exit code 6: steps diverged from the plan. With --compile Inductor compiles the model with the "
        "plan inside its graphs (CPU, with a C++ compiler). Under torchrun every rank wraps the workload's model for "
        "data-parallel training and follows the plan; rank 0 reports each rank, and the figures of the worst."
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
  torchrun --standalone --nproc-per-node 2 -m poochplan run gpt2 --plan plan.json --check
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_workload(parser)
        parser.add_argument(
            "--plan",
            dest="plans",
            action="append",
            metavar="FILE",
            help="file that pooch plan wrote; repeatable: each step then follows the plan for its inputs",
        )
        _add_compile_arguments(parser)
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="JSON to write: the measurements, and where steps diverged"
        )
        parser.add_argument("--steps", type=at_least(1), default=3, metavar="N", help="metered steps (default: 3)")
        parser.add_argument(
            "--timed", type=at_least(1), default=3, metavar="N", help="further steps, for the step time (default: 3)"
        )
        parser.add_argument("--check", action="store_true", help="run in-core too, and compare bit by bit")
        parser.add_argument(
            "--certificate",
            metavar="FILE.json",
            help="with --check: write digests of the results of each step, in-core and planned, versions and flags",
        )
        add_workload_arguments(parser)
        parser.add_argument(
            "--cap", action="store_true", help="on CUDA: limit the allocator to the budget and --margin"
        )
        parser.add_argument(
            "--margin",
            metavar="SIZE",
            help=f"with --cap: bytes above the budget (default: {DEFAULT_MARGIN})",
        )
        parser.add_argument(
            "--arena",
            choices=("auto", "on", "off"),
            default="auto",
            help="on the CPU: planned steps allocate from one arena. auto: if it is within the budget and there is a "
            "C++ compiler; on: always, or an error; off: never (default: auto)",
        )
        add_spill_dir(parser)
        parser.add_argument(
            "--on-divergence",
            choices=("warn", "error"),
            default="warn",
            help="if a step differs from the profiled one: warn and swap everything from there on, or end with an "
            "error (default: warn)",
        )
        parser.add_argument(
            "--timeline", metavar="FILE.png", help="draw the planned step: streams and memory over time"
        )
        parser.add_argument(
            "--trace",
            metavar="FILE.json",
            help="measure one more step, op by op, and write it for Perfetto (ui.perfetto.dev) or chrome://tracing",
        )
        parser.add_argument(
            "--picture",
            metavar="FILE.png",
            help="measure one more step, op by op, and draw its live memory, the predicted one, and what holds "
            "the peak",
        )
        parser.add_argument(
            "--profile",
            metavar="FILE",
            help="the plan's profile, for --timeline and --picture (default: found beside the plan)",
        )

    _ranks: Ranks | None = None

    def run(self) -> dict[str, Any]:
        _check_compile(self.options, self.rank_count)
        if not self.options.compile:
            with self.ranks() as self._ranks:
                return self._run()
        from poochplan.torch_private.compiler_internals import more_compiles

        with more_compiles(COMPILED_RUNS):
            return self._run()

    def _run(self) -> dict[str, Any]:
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
        self.save(every[0], plan_path)
        if self._ranks is not None:
            self._ranks.check_same(msgspec.json.encode(every))
        build, in_core = self._builders(every[0])
        self._cap_bytes = self._cap(every)
        drawn = "--timeline" if timeline is not None else "--picture" if picture is not None else ""
        profile = self._profile(plans, drawn) if drawn else None
        plan, record = self._measure(plans, build, in_core, certificate_path)
        if self._ranks is not None:
            record = worst_of(self._ranks.gathered(record))
        steps = f"{options.steps} steps and {options.timed} timed ones"
        self.show(summary_table(f"{plan.workload}: {steps} under the plan", record.rows(plan)))
        if timeline is not None and profile is not None and self.rank == 0:
            overhead = record.measured_overhead if record.in_core_step_measured else None
            shown = timeline_of(
                profile, plan, measured_peak_bytes=record.measured_peak_bytes, measured_overhead=overhead
            )
            self.wrote(write_picture(draw_timeline(shown), timeline, force=options.force))
        self.save(record, record_path)
        if trace_path is not None or picture is not None:
            self._trace(plans, build, trace_path, picture, profile)
        self.problem = _problem_of(record)
        data: dict[str, Any] = msgspec.to_builtins(record)
        return data

    def _trace(
        self, plans: Plan | PlanSet, build: Build, path: Path | None, picture: Path | None, profile: Profile | None
    ) -> None:
        """Measures one more step, writes it, and draws it next to the predicted one."""
        from poochplan.tracing import traced_step

        options = self.options
        with self.progress("tracing a step"):
            seed = options.seed + self.rank
            traced = traced_step(build, plans, seed=seed, spill_dir=options.spill_dir, force=options.force)
        if self.rank > 0:
            return
        if path is not None:
            self.wrote(write_trace(traced, path, force=options.force))
        if picture is not None and profile is not None and not isinstance(plans, PlanSet):
            figure = draw_step_memory(step_memory_of(profile, plans, traced))
            self.wrote(write_picture(figure, picture, force=options.force))

    def _load(self, device: str) -> LoadedWorkload:
        from poochplan.workload import load_workload

        return load_workload(self.options.workload, parse_overrides(self.options.settings), device)

    def _builders(self, plan: Plan) -> tuple[Build, Build | None]:
        """Functions that make the workload that follows the plan, and the in-core workload if that is another one."""
        parse_overrides(self.options.settings)  # raises errors before anything runs

        def build() -> Workload:
            workload = self._load(plan.device).workload
            if self._ranks is None:
                return workload
            from poochplan.online.ranks import data_parallel

            return data_parallel(workload)

        return (_compiled(build, plan), _compiled(build, None)) if self.options.compile else (build, None)

    def _cap(self, plans: Sequence[Plan]) -> int | None:
        """Bytes of ``--cap``; raises ``UsageError`` if no device allocator can be limited."""
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
        options = self.options
        if options.budget is not None:
            with self.progress("compiling") as say:
                return _made_plan(lambda: self._load("cpu"), options, say)
        first, *others = options.plans
        return PlanSet.load(first, *others) if others else Plan.load(first)

    def _profile(self, plan: Plan | PlanSet, drawn: str) -> Profile:
        """The plan's profile: the given file, or the one next to the plan.

        ``drawn`` is the option that requests a picture, for messages.
        """
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
                with contextlib.suppress(InputFileError):  # other broken files in the folder do not matter
                    profiles.append(Profile.load(path))
        for profile in profiles:
            if profile.ops_fingerprint == plan.profile_fingerprint:
                return profile
        found = f"{named} is of another step" if named else f"none of the profiles in {folder} is"
        raise UsageError(f"{drawn}: expected the profile that the plan was made from, {found}; name it with --profile")

    def _measure(
        self, plans: Plan | PlanSet, build: Build, in_core_build: Build | None, certificate: Path | None
    ) -> tuple[Plan, RunRecord]:
        """The plan that the steps followed, and their measurements. The comparison is written to ``certificate``."""
        from poochplan import verify
        from poochplan.profiler.assembly.assemble import this_host, versions_here

        options = self.options
        shared: dict[str, Any] = {
            "steps": options.steps,
            "timed_steps": options.timed,
            "seed": options.seed + self.rank,
            "spill_dir": Path(options.spill_dir) if options.spill_dir else None,
            "on_divergence": options.on_divergence,
            "cap_bytes": self._cap_bytes,
            "arena": options.arena,
            "force": options.force,
        }
        compared = None
        with self.progress("running") as say:
            if options.check:
                on_any = bool if self._ranks is None else self._ranks.on_any
                compared = verify.check(
                    build, plans, in_core_build=in_core_build, on_any=on_any, progress=say, **shared
                )
                planned = compared.planned
            else:
                planned = verify.run_planned(build, plans, record=False, progress=say, **shared)
        if compared is not None and certificate is not None:
            self.save(verify.certificate_of(compared, options.seed), certificate)
        plan = planned.plan
        assert plan is not None, "it was given"
        why_not = _why_not_served(options.arena, plan)
        made_by = versions_here(plan.device)
        return plan, run_record(planned, made_by, this_host(), comparison=compared, why_not_served=why_not)


def _add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the model by Inductor with the plan inside its graphs; --check then compares with the same model "
        "compiled without a plan",
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="with --compile, instead of --plan: profile and plan first, within bytes such as 8GiB, or a share of "
        "the compiled in-core peak such as 60%%",
    )
    parser.add_argument(
        "--iterations",
        type=at_least(1),
        metavar="N",
        help="with --compile and --budget: timed steps of each profile (default: 2 without a plan, then 3)",
    )
    parser.add_argument(
        "--time-limit",
        type=positive,
        default=30.0,
        metavar="S",
        help="with --compile and --budget: seconds of the plan's search (default: 30)",
    )
    parser.add_argument(
        "--save-plan", metavar="FILE", help="with --compile and --budget: plan to write, for --compile --plan FILE"
    )


def _check_compile(options: argparse.Namespace, rank_count: int) -> None:
    """Raises ``UsageError`` if options of a compiled run contradict each other, or there is no plan to follow."""
    plans, is_compiled = options.plans or (), options.compile
    if is_compiled and rank_count > 1:
        raise UsageError(f"--compile: expected one process, found {rank_count} ranks; run it without torchrun")
    if options.budget is not None and not is_compiled:
        raise UsageError("--budget: expected --compile beside it, found none; pooch plan makes a plan without it")
    if options.save_plan is not None and (not is_compiled or options.budget is None):
        raise UsageError("--save-plan: expected --compile and --budget beside it, whose plan it writes; add them")
    if is_compiled and options.budget is not None and plans:
        raise UsageError("--compile: expected --budget or --plan, found both; leave one out")
    if is_compiled and options.budget is None and not plans:
        raise UsageError("--compile: expected --budget or --plan beside it, found neither; add --budget 60%")
    if not is_compiled and not plans:
        raise UsageError("expected --plan FILE, or --compile with --budget, found neither; name the plan to follow")
    if is_compiled and len(plans) > 1:
        raise UsageError(
            f"--compile: expected one plan, found {len(plans)}; graphs are compiled with one plan's replays"
        )
    drawn = next((name for name in ("timeline", "picture") if getattr(options, name) is not None), "")
    if is_compiled and drawn:
        raise UsageError(
            f"--{drawn}: expected no --compile, whose profile is of no file, found it; --trace shows a measured step"
        )


def _made_plan(load: Callable[[], LoadedWorkload], options: argparse.Namespace, say: Say) -> Plan:
    """The plan that ``poochplan.compile`` makes with its own copy of the workload, which is then dropped."""
    from poochplan.compiling.compile import compile
    from poochplan.torch_private.compiler_internals import forget_compiled
    from poochplan.verify import seed_everything

    seed_everything(options.seed)
    loaded = load()
    workload = loaded.workload
    plan = compile(
        workload.model,
        workload.step,
        optimizer=workload.optimizer,
        budget=options.budget,
        spill_dir=options.spill_dir,
        iterations=options.iterations,
        time_limit_s=options.time_limit,
        progress=say,
    ).plan
    assert plan is not None, "compile() gives a session that has its plan"
    del workload
    plan = msgspec.structs.replace(plan, workload=loaded.name)
    del loaded
    forget_compiled()
    gc.collect()
    return plan


def _compiled(build: Build, plan: Plan | None) -> Build:
    """Makes the same workloads, their models compiled with the plan's replays, or as they are."""

    def compiled() -> Workload:
        from poochplan.compiling.compile import compile

        workload = build()
        if plan is None:
            workload.model.compile(dynamic=False)
        else:
            compile(workload.model, plan=plan)
        return workload

    return compiled


def _why_not_served(mode: ArenaMode, plan: Plan) -> str:
    """Why the steps could not be served from an arena, in one line; empty if they could."""
    from poochplan.runtime.arena.serving import why_not_served
    from poochplan.runtime.metering.allocated import step_scope

    if mode == "off":
        return "--arena off"
    reason = why_not_served(mode, plan.device, [plan])
    if not reason and step_scope() is None:
        return "the compiled allocator could not be built; pooch doctor --build says why"
    return reason


def _problem_of(run: RunRecord) -> PoochError | None:
    """The error for the exit code of a run that was measured completely."""
    if run.difference is not None:
        return PoochError(
            f"not bitwise equal to in-core: {run.difference}; "
            "please report this with the plan, and train in-core meanwhile"
        )
    peak_bytes = run.measured_peak_bytes
    if run.is_over and peak_bytes is not None:
        why = "; a step left the plan" if run.fallbacks else ""
        return BudgetExceededError(
            f"over the budget: expected at most {run.budget_bytes} bytes ({format_bytes(run.budget_bytes)}), found a "
            f"step of {peak_bytes} bytes ({format_bytes(peak_bytes)}){why}; profile the step as it is trained and plan "
            "again, or plan with a smaller budget",
            peak_bytes=peak_bytes,
        )
    if run.left_steps:
        why = run.fallback_reasons[0]
        if run.departures:
            first = run.departures[0]
            why = f"in {first.layer or OUTSIDE}, expected {first.planned}, found {first.found}"
        return DivergenceError(
            f"{run.left_steps} of {run.steps} steps left the plan: {why}; profile the step as it is trained, "
            "and plan again"
        )
    return None
