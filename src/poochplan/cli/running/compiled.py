"""``pooch run --compile``: the plan of a compiled model, made or of before, and the models of runs under it."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from poochplan.cli.base import Say, at_least, positive
from poochplan.errors import UsageError

if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.verify import Build
    from poochplan.workload import LoadedWorkload

RUNS = 4
"""In-core, under the plan, in-core again to be timed, and once more where bits differ."""


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the model by Inductor with the plan inside its graphs; with --check the same model compiled "
        "without a plan is the in-core one",
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="with --compile, in place of --plan: profile and plan first, within bytes such as 8GiB, or a share of "
        "the compiled in-core peak such as 60%%",
    )
    parser.add_argument(
        "--iterations",
        type=at_least(1),
        metavar="N",
        help="with --compile and --budget: timed steps of each profile (default: 2 of the step as it is, then 3)",
    )
    parser.add_argument(
        "--time-limit",
        type=positive,
        default=30.0,
        metavar="S",
        help="with --compile and --budget: seconds of the plan's search (default: 30)",
    )
    parser.add_argument(
        "--save-plan", metavar="FILE", help="with --compile and --budget: JSON to write, for --compile --plan FILE"
    )


def check_compile(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` where the options of a compiled run do not go together, or there is nothing to follow."""
    plans, is_compiled = options.plans or (), options.compile
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


@contextlib.contextmanager
def room_to_compile() -> Iterator[None]:
    """A block in which a model is built and compiled for each of the runs that are compared."""
    from poochplan.torch_private.compiler_internals import more_compiles

    with more_compiles(RUNS):
        yield


def made_plan(load: Callable[[], LoadedWorkload], options: argparse.Namespace, say: Say) -> Plan:
    """The plan that ``poochplan.compile`` makes for a workload of its own; nothing of that is left."""
    import msgspec

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


def with_plan_inside(build: Build, plan: Plan) -> Build:
    """Makes the same workloads, their models compiled with the plan's replays."""
    from poochplan.compiling.compile import compile
    from poochplan.workload import Workload

    def compiled() -> Workload:
        workload = build()
        compile(workload.model, plan=plan)
        return workload

    return compiled


def with_inductor(build: Build) -> Build:
    """Makes the same workloads, their models compiled as they are."""
    from poochplan.workload import Workload

    def compiled() -> Workload:
        workload = build()
        workload.model.compile(dynamic=False)
        return workload

    return compiled
