"""``pooch run``: trains a workload for some steps under a plan, measures them, and compares them with in-core steps."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from poochplan.errors import DivergenceError, InputFileError, PoochError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet, plans_of
from poochplan.formats.profile import Profile
from poochplan.formats.queries import OUTSIDE
from poochplan.formats.run_record import RunRecord
from poochplan.report.palette import write_picture
from poochplan.report.pictures import draw_step_memory, step_memory_of
from poochplan.report.tables import summary_table
from poochplan.report.timeline import draw_timeline, timeline_of, write_trace
from poochplan.units import parse_bytes

from .base import ShowProgress, Verb
from .options import DEFAULT_MARGIN, over_budget, parse_overrides

if TYPE_CHECKING:
    from poochplan.online.ranks import Ranks
    from poochplan.runtime.arena.step_arena import ArenaMode
    from poochplan.verify import BuildWorkload
    from poochplan.workload import LoadedWorkload, Workload

COMPILED_RUNS = 4
"""Runs of a compiled model: in-core, under the plan, in-core again for its time, and once more if bits differ."""


class RunVerb(Verb):
    name = "run"
    has_ranks = True
    force_help = "overwrite output files that exist, and run a plan whose times are a roofline's"
    help = """
Builds the workload, runs training steps under the plan, and compares measured peak and step time with the predicted
ones. With --check the same steps also run in-core from the same seed. Loss, gradients, buffers and parameters of each
step must then be bitwise equal (exit code 1 if not). The step time is the median over --timed further steps, which are
neither metered nor compared. Exit code 5: a metered step exceeded the budget. Exit code 6: steps diverged from the
plan. With --compile Inductor compiles the model with the plan inside its graphs (CPU, with a C++ compiler). Under
torchrun every rank wraps the workload's model for data-parallel training and follows the plan; rank 0 reports each
rank, and the figures of the worst.

<workload>
--plan FILE... @plans: file that pooch plan wrote; repeatable: each step then follows the plan for its inputs
--compile: compile the model by Inductor with the plan inside its graphs; --check then compares with the same model
  compiled without a plan
--budget SIZE: with --compile, instead of --plan: profile and plan first, within bytes such as 8GiB, or a share of the
  compiled in-core peak such as 60%
--iterations N: with --compile and --budget: timed steps of each profile (default: 2 without a plan, then 3)
--time-limit S =30: with --compile and --budget: seconds of the plan's search (default: {})
--save-plan >FILE.json: with --compile and --budget: plan to write, for --compile --plan FILE
-o, --output >FILE: JSON to write: the measurements, and where steps diverged
--steps N =3: metered steps (default: {})
--timed N =3: further steps, for the step time (default: {})
--check: run in-core too, and compare bit by bit
<of workload>
--cap: on CUDA: limit the allocator to the budget and --margin
--margin SIZE: with --cap: bytes above the budget (default: 512MiB)
--arena auto|on|off =auto: on the CPU: planned steps allocate from one arena. auto: if it is within the budget and there
  is a C++ compiler; on: always, or an error; off: never (default: {})
<spill dir>
--on-divergence warn|error =warn: if a step differs from the profiled one: warn and swap everything from there on, or
  end with an error (default: {})
--on-audit warn|error|off =warn: if a released value does not come back as it was: warn and keep it from then on, end
  with an error, or compare none (default: {})
--timeline >FILE.png: draw the planned step: streams and memory over time
--trace >FILE.json: measure one more step, op by op, and write it for Perfetto (ui.perfetto.dev) or chrome://tracing
--picture >FILE.png: measure one more step, op by op, and draw its live memory, the predicted one, and what holds the
  peak
--profile FILE: the plan's profile, for --timeline and --picture (default: found beside the plan)

pooch run unet3d --plan plan.json --check
pooch run train.py:workload --plan plan.json --steps 10 --set batch_size=64 --on-divergence error
pooch run unet3d --plan plan.json --profile profile.json --timeline run.png --picture memory.png
pooch run gpt2 --plan gpu-plan.json --check --cap --margin 256MiB
pooch run unet3d --plan plan.json -o run.json --trace trace.json && pooch diff plan.json run.json
pooch run gpt2 --plan plan.json --check --arena on --timed 10
pooch run train.py:workload --plan batch32.plan.json --plan batch64.plan.json --set batch_size=48
pooch run gpt2 --compile --budget 60% --check --save-plan compiled.plan.json
torchrun --standalone --nproc-per-node 2 -m poochplan run gpt2 --plan plan.json --check
"""

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
        plans = self._plans()
        every = plans_of(plans)
        self.write(options.save_plan, Plan.save, lambda: every[0])
        if self._ranks is not None:
            self._ranks.check_same(msgspec.json.encode(every))
        build, in_core = self._builders(every[0])
        self._cap_bytes = self._cap(every)
        drawn = next((name for name in ("timeline", "picture") if getattr(options, name) is not None), "")
        profile = self._profile(plans, f"--{drawn}") if drawn else None
        plan, record = self._measure(plans, build, in_core)
        if self._ranks is not None:
            from poochplan.verify import worst_of

            record = worst_of(self._ranks.gathered(record))
        steps = f"{options.steps} steps and {options.timed} timed ones"
        self.show(summary_table(f"{plan.workload}: {steps} under the plan", record.rows(plan)))
        if profile is not None:
            overhead = record.measured_overhead if record.in_core_step_measured else None
            measured: dict[str, Any] = {
                "measured_peak_bytes": record.measured_peak_bytes,
                "measured_overhead": overhead,
            }
            self.write(options.timeline, write_picture, lambda: draw_timeline(timeline_of(profile, plan, **measured)))
        self.write(options.output, RunRecord.save, lambda: record)
        if options.trace is not None or options.picture is not None:
            self._trace(plans, build, profile)
        self.problem = _problem_of(record)
        data: dict[str, Any] = msgspec.to_builtins(record)
        return data

    def _trace(self, plans: Plan | PlanSet, build: BuildWorkload, profile: Profile | None) -> None:
        """Measures one more step, writes it, and draws it next to the predicted one."""
        from poochplan.tracing import traced_step

        options = self.options
        with self.progress("tracing a step"):
            seed = options.seed + self.rank
            traced = traced_step(build, plans, seed=seed, spill_dir=options.spill_dir, force=options.force)
        self.write(options.trace, write_trace, lambda: traced)
        if profile is not None and isinstance(plans, Plan):
            self.write(options.picture, write_picture, lambda: draw_step_memory(step_memory_of(profile, plans, traced)))

    def _load(self, device: str) -> LoadedWorkload:
        from poochplan.workload import load_workload

        return load_workload(self.options.workload, parse_overrides(self.options), device)

    def _builders(self, plan: Plan) -> tuple[BuildWorkload, BuildWorkload | None]:
        """Functions that make the workload that follows the plan, and the in-core workload if that is another one."""
        parse_overrides(self.options)  # raises errors before anything runs

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
                f"--cap: expected a plan for cuda, whose allocator takes a limit, found one for {plans[0].device}; "
                "leave it out"
            )
        margin_bytes = parse_bytes(options.margin or DEFAULT_MARGIN, "--margin", least=0)
        return max(plan.budget_bytes for plan in plans) + margin_bytes

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
        beside = sorted((*folder.glob("*profile.json"), *folder.glob("*profile.json.gz")))
        for path in [named] if named else beside:
            with contextlib.suppress(*() if named else (InputFileError,)):  # a broken file beside it does not matter
                profile = Profile.load(path)
                if profile.ops_fingerprint == plan.profile_fingerprint:
                    return profile
        found = f"{named} is of another step" if named else f"none of the profiles in {folder} is"
        raise UsageError(f"{drawn}: expected the profile that the plan was made from, {found}; name it with --profile")

    def _measure(
        self, plans: Plan | PlanSet, build: BuildWorkload, in_core_build: BuildWorkload | None
    ) -> tuple[Plan, RunRecord]:
        """The plan that the steps followed, and their measurements."""
        from poochplan import verify
        from poochplan.profiler.assembly.assemble import this_host, versions_here

        options = self.options
        shared: dict[str, Any] = {
            "timed_steps": options.timed,
            "seed": options.seed + self.rank,
            "cap_bytes": self._cap_bytes,
            **self.given("steps", "spill_dir", "on_divergence", "on_audit", "arena", "force"),
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
        plan = planned.plan
        assert plan is not None, "it was given"
        why_not = _why_not_served(options.arena, plan)
        made_by = versions_here(plan.device)
        return plan, verify.run_record(planned, made_by, this_host(), comparison=compared, why_not_served=why_not)


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


def _made_plan(load: Callable[[], LoadedWorkload], options: argparse.Namespace, say: ShowProgress) -> Plan:
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


def _compiled(build: BuildWorkload, plan: Plan | None) -> BuildWorkload:
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
    from poochplan.runtime.arena.step_arena import why_no_step_arena
    from poochplan.runtime.metering.allocated import step_scope

    if mode == "off":
        return "--arena off"
    reason = why_no_step_arena(mode, plan.device, [plan])
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
    peak_bytes = run.reserved_peak_bytes if run.on == "reserved" else run.measured_peak_bytes
    if run.is_over and peak_bytes is not None:
        why = "; a step left the plan" if run.fallbacks else ""
        remedy = "profile the step as it is trained and plan again, or plan with a smaller budget"
        return over_budget(run.budget_bytes, peak_bytes, f"{why}; {remedy}")
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
