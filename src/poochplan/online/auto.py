"""auto: an unmodified training loop, profiled, planned and run within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch

from poochplan.errors import UsageError, check_choice
from poochplan.formats.files import cache_folder
from poochplan.formats.profile import Link
from poochplan.planner.arena.reserved import On
from poochplan.planner.simulator.evaluator import begin_build
from poochplan.profiler.link import known_link, measure_link
from poochplan.profiler.live.loop_observer import LoopObserver
from poochplan.profiler.live.step_kinds import Loop
from poochplan.profiler.live.study import StudyOptions
from poochplan.profiler.request import checked_device
from poochplan.profiler.trials.machine_facts import on_worker_thread, unmeasured, with_cached_cost, with_known_cost
from poochplan.runtime.active_plan import OverBudget
from poochplan.runtime.arena.step_arena import ArenaMode, step_arena_for
from poochplan.runtime.attachment import together
from poochplan.runtime.devices.cpu import choose_spill_dir
from poochplan.runtime.devices.opening import check_cap, open_device
from poochplan.runtime.engine.audit import OnAudit
from poochplan.runtime.messages import Messages
from poochplan.runtime.session import Session
from poochplan.sessions import PLANNER, made_in_any_case
from poochplan.tensors.optimizers import Optimizers, listed
from poochplan.units import parse_budget, parse_rate

from .background import BackgroundBuild
from .before_plan import BeforePlan, Mode, Unplanned, ranks_here
from .known_plans import KnownPlans
from .plan_cache import PlanCache
from .planning_process import PlanRequest
from .studied_plans import StudiedPlans

Models = torch.nn.Module | Mapping[str, torch.nn.Module]
MOST_PERCENT = 100
"""A number up to this is implausible as an amount of bytes."""


@made_in_any_case
def auto(
    model: Models,
    optimizer: Optimizers = None,
    *,
    budget: str | int | float,
    cache: str | Path | None = None,
    spill_dir: str | Path | None = None,
    throttle: str | float | None = None,
    link: Link | None = None,
    time_limit_s: float = 10.0,
    on_over_budget: Literal["warn", "error", "replan"] = "replan",
    before_plan: Mode | None = None,
    on_refusal: Mode = "in-core",
    arena: ArenaMode = "auto",
    cap_bytes: int | None = None,
    on: On | None = None,
    on_audit: Literal["warn", "error", "off"] = "warn",
    quiet: bool = False,
) -> Session:
    """A session around an unmodified training loop: ``with auto(model, optimizer, budget="8GiB") as session:``.

    The first steps are profiled as they run. No step is repeated or restored, and every step is correct
    while it is profiled. A second process makes the plan. From then on steps follow it and the budget holds.
    Until then steps run in-core while the device's memory has room, and swap from there on.

    Parameters
    ----------
    model: unmodified, on one device; several models as a mapping from names. For data-parallel training the wrapped
        model, on every rank: rank 0 profiles and plans, and all ranks begin to follow a plan at the same step.
    optimizer: the loop's; other optimizers of the model's parameters are found when they step.
    budget: bytes, text such as ``"8GiB"``, or a share of the in-core peak such as ``"60%"``.
    cache: a folder for profiles and plans, by default in the user's cache folder. The next identical run follows
        its plan at once.
    spill_dir, throttle: as for :func:`poochplan.profile`.
    link: use this link instead of measuring it. By default the one cached by ``pooch link``; otherwise it is
        measured, on the CPU by the process that plans.
    time_limit_s: for the planner's search.
    on_over_budget: if a step that follows its plan exceeds the budget, for example because of new memory outside the
        step, ``"replan"`` reports it and makes a new plan, ``"warn"`` reports it, and
        ``"error"`` raises :class:`~poochplan.errors.BudgetExceededError` after it.
    before_plan: how steps without a plan run. ``"in-core"``: while memory has room (nine tenths of the free memory,
        minus known future needs), then swapped. ``"swap"``: every saved value is swapped, which is slow, and the
        budget holds from the first step on if that is possible. The default is in-core, and swap with
        ``on_over_budget="error"``.
    on_refusal: how steps run if no plan fits the budget, with the same choices. One line names the smallest budget.
    arena: on the CPU, whether steps that follow a plan allocate from one arena, and whether plans are made for that:
        the budget then covers the arena and everything outside it. It needs the compiled allocator, which is built in
        the background if necessary; no step is profiled until that has ended. ``"auto"``: an arena if that can be
        built; ``"on"``: it is an error if not; ``"off"``: no arena.
    cap_bytes: hard limit of the CUDA allocator within the block, from the first step on. A step that needs more is
        an out-of-memory error.
    on: what the budget covers, as for :func:`poochplan.plan`: on a GPU by default all that torch's allocator takes
        from it, as ``nvidia-smi`` shows beside the context.
    on_audit: as for :func:`poochplan.apply`. With ``"warn"`` another plan is made that keeps the value.
    quiet: print nothing on stderr but warnings.

    Raises
    ------
    UsageError
        An argument is invalid, the models are not on one device, there is no such device, or ``arena`` is
        ``"on"`` and there can be none.
    SpillError
        The spill directory cannot be used.
    """
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    if not models:
        raise UsageError("models: expected at least one, found none")
    if wrong := [type(one).__name__ for one in models.values() if not isinstance(one, torch.nn.Module)]:
        raise UsageError(f"model: expected a torch.nn.Module, found {wrong[0]}; give the model itself")
    whole = together(models)
    where = checked_device(whole, None, None, 1)
    check_cap(cap_bytes, where)
    if on not in (None, "allocated", "reserved") or (on == "reserved" and where.type != "cuda"):
        raise UsageError(f'on: expected "allocated", or "reserved" for a model on a GPU, found {on!r} on {where.type}')
    before_plan = before_plan or ("swap" if on_over_budget == "error" else "in-core")
    check_choice("on_over_budget", on_over_budget, tuple(OverBudget))
    check_choice("arena", arena, get_args(ArenaMode))
    check_choice("on_audit", on_audit, tuple(OnAudit))
    check_choice("before_plan", before_plan, tuple(Unplanned))
    check_choice("on_refusal", on_refusal, tuple(Unplanned))
    before, refused = Unplanned(before_plan), Unplanned(on_refusal)
    check_budget(budget)  # here, not in the middle of the loop
    rate = None if throttle is None else parse_rate(throttle, "throttle")
    folder = choose_spill_dir(spill_dir) if where.type == "cpu" else None

    def measured() -> Link:
        """On the CPU later, in the process that plans."""
        return unmeasured(rate) if where.type == "cpu" else measure_link(where, folder, rate)

    messages, policy = Messages(is_quiet=quiet), OverBudget(on_over_budget)
    begin_build()
    spills = None if folder is None else str(folder)
    request = PlanRequest(time_limit_s, arena, spills, ranks=ranks_here(), on=on)
    measures_here = before is Unplanned.IN_CORE
    entries = Path(cache) if cache is not None else cache_folder() / "auto"
    kept = PlanCache(entries, whole, where, budget, arena, link, rate, on)
    known = KnownPlans(budget, request, kept, messages, policy, refused, measures_here=measures_here)
    loop = Loop(whole, listed(optimizer), where)
    unplanned = BeforePlan(before, refused, loop)
    with_costs = with_known_cost if where.type == "cpu" else with_cached_cost
    options = StudyOptions(
        link=lambda: on_worker_thread(lambda: link or known_link(where, folder, rate) or measured()),
        fits=lambda one: unplanned.has_room(one.in_core_peak_bytes, known.budget_of(one)),
        room=lambda one: unplanned.room_of(known.budget_of(one)),
        has_arena=lambda: not known.book.had_plan,
        with_costs=lambda one, kept: with_costs(one, where, kept),
    )
    plans = StudiedPlans(loop, known, BackgroundBuild(arena, where, messages), unplanned, messages)
    return Session(
        models,
        where,
        lambda: open_device(where, folder, rate),
        plans,
        LoopObserver(loop, options, plans, folder),
        on_over_budget=policy,
        cap_bytes=cap_bytes,
        planner=PLANNER,
        step_arena=step_arena_for(arena, where.type, PLANNER.pack),
        messages=messages,
        on_audit=OnAudit(on_audit),
        optimizers=listed(optimizer),
    )


def check_budget(budget: str | int | float) -> None:
    """Raises ``UsageError`` for a budget that cannot be read, and for a few bytes where a share was meant."""
    parse_budget(budget, 1 << 60)
    if not isinstance(budget, str) and 1 < budget <= MOST_PERCENT:
        raise UsageError(f'budget: expected "60%", "8GiB" or bytes, found {budget}; did you mean "{budget}%"?')
