"""The fluid models: their construction, decisions from PLAN, and the rows of decisions, of returns before a value's own
use, and of the link.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from poochplan.formats.occupancy import Codes
from poochplan.planner.search.fluid import Early, FluidModel, Request, Stretch, is_written_out, running_sums
from poochplan.planner.search.memory_constraints import add_memory
from poochplan.planner.search.solvers import Cancel, SolverLimits, Term, solve_linear
from poochplan.planner.search.time_constraints import add_time
from poochplan.planner.simulator.evaluator import KEEP, RECOMPUTE, SWAP
from poochplan.planner.simulator.problem import Problem


def build_fluid_model(problem: Problem, request: Request) -> FluidModel:
    """The model that ``request`` asks for, complete."""
    model = FluidModel(problem, request)
    _add_decisions(model)
    _add_early_returns(model)
    _add_link(model)
    add_time(model)
    add_memory(model)
    return model


def solve_fluid(
    problem: Problem,
    request: Request,
    solver: str,
    limits: SolverLimits,
    *,
    relaxed: bool = False,
    cancel: Cancel | None = None,
) -> tuple[Codes | None, float | None]:
    """The codes of the best decisions by PLAN, and its objective: overhead in seconds by the fluid model; None for what
    the solver did not find. Values outside ``request.candidates`` are kept.

    ``relaxed`` solves without integrality and takes for each value the decision with the largest share.
    ``limits.absolute_gap`` is in seconds.
    """
    started_s = time.perf_counter()
    model = build_fluid_model(problem, request)
    scaled = replace(limits.since(started_s), absolute_gap=limits.absolute_gap / model.time_unit_s)
    found = solve_linear(model.linear.arrays(), solver, scaled, relaxed=relaxed, cancel=cancel)
    objective_s = None if found.objective is None else found.objective * model.time_unit_s
    if found.values is None:
        return None, objective_s
    keep, swap, recompute = model.shares(found.values)
    codes = np.where(recompute >= np.maximum(swap, keep), RECOMPUTE, np.where(swap >= keep, SWAP, KEEP))
    return codes.astype(np.int8), objective_s


SWAP_PREFERENCE = 1e-4
"""Weight of link time in PLAN's objective, so that no value is moved without gain."""


def _add_decisions(model: FluidModel) -> None:
    problem, request, linear = model.problem, model.request, model.linear
    link = problem.link
    for value in request.candidates:
        swap_cost = recompute_cost = 0.0
        if not model.is_bound:
            out_s, in_s = problem.out_seconds(value), problem.in_seconds(value)
            slowed_s = out_s * link.interference_out / (1 + link.interference_out)
            slowed_s += in_s * link.interference_in / (1 + link.interference_in)
            swap_cost = (slowed_s + SWAP_PREFERENCE * (out_s + in_s)) / model.time_unit_s + model.swap_time(value)
            recompute_cost = SWAP_PREFERENCE * model.replay_time[value]
        model.swap[value] = linear.column(1.0, cost=swap_cost, integer=True)
        if problem.replay.replays[value] is not None:
            if model.record_s and not model.is_bound:  # as if it shared no op and no window with others
                recorded = len(problem.replay.recorded_for([value]))
                recompute_cost += model.record_s * recorded / model.time_unit_s
            model.recompute[value] = linear.column(1.0, cost=recompute_cost, integer=True)
            linear.row([(model.swap[value], 1), (model.recompute[value], 1)], high=1)
    for value in model.recompute:
        for source in problem.replay.of(value).inputs:
            model.consumers.setdefault(source, []).append(value)
    if request.host_bytes is not None:
        host = [(column, model.moved[value]) for value, column in model.swap.items()]
        linear.row(host, high=request.host_bytes / model.unit)


DENSE_SHARE = 0.01
"""For values above this share of the bytes, BOUND has a column at each slot for whether they are back."""
MANY_VALUES, DENSE_SHARE_OF_MANY = 300, 0.05
"""The same share if there are more values than this: on ResNeXt the other columns took three quarters of the time and
did not raise the bound."""


def _add_early_returns(model: FluidModel) -> None:
    """Adds columns "back by this slot", and rows "the inputs of a replay are back by then"."""
    before_death = _slots_before_an_input_goes(model)
    order = sorted(model.request.candidates, key=lambda value: model.use_slot[value])
    for value in order:
        if model.is_bound and (model.use_slot[value] == model.slots.count or value in model.problem.copies):
            continue  # never used in backward: in BOUND it comes back at no cost, and at any time
        wanted = set()
        for user in model.consumers.get(value, ()):
            wanted.add(model.use_slot[user])
            wanted.update(early.slot for early in model.early.get(user, ()))
            wanted.update(before_death.get(user, ()))
        wanted = {slot for slot in wanted if slot < model.use_slot[value]}
        window = sorted(wanted | before_death.get(value, set()))[-model.window :]
        # For a large value, BOUND has a column at every slot.
        share = DENSE_SHARE_OF_MANY if model.problem.value_count > MANY_VALUES else DENSE_SHARE
        if model.is_bound and value in model.recompute and model.resident[value] > share * model.all_bytes:
            window = sorted({*window, *range(model.slots.first_backward, model.use_slot[value])})
        _add_early_columns(model, value, window, wanted)
    for value in model.request.candidates:
        for user in model.consumers.get(value, ()):
            _add_ready_rows(model, value, user)


def _slots_before_an_input_goes(model: FluidModel) -> dict[int, set[int]]:
    """Per recomputable value: slots of the last uses of its inputs, if these come before its own use.

    A replay at such a slot needs no claim on the input. BOUND adds the last slot before the value's own use: if the
    value is not back by then, its inputs were claimed until then.
    """
    problem, found = model.problem, dict[int, set[int]]()
    for source, users in model.consumers.items():
        slot = model.slots.at_tick(int(problem.freed[source]))
        for user in users:
            if model.slots.first_backward <= slot < model.use_slot[user]:
                found.setdefault(user, set()).add(slot)
                if model.is_bound:
                    found[user].add(model.use_slot[user] - 1)
    return found


def _add_early_columns(model: FluidModel, value: int, window: list[int], wanted: set[int]) -> None:
    linear = model.linear
    returns: list[Early] = []
    last_replayed = last_fetched = None
    for slot in window:
        replayed = linear.column(1.0) if value in model.recompute else None
        fetched = linear.column(1.0) if slot in wanted and not model.is_bound else None
        if replayed is not None and last_replayed is not None:
            linear.row([(last_replayed, 1), (replayed, -1)], high=0)
        if fetched is not None and last_fetched is not None:
            linear.row([(last_fetched, 1), (fetched, -1)], high=0)
        last_replayed, last_fetched = replayed, fetched if fetched is not None else last_fetched
        returns.append(Early(slot, replayed, fetched))
    if last_replayed is not None:
        linear.row([(last_replayed, 1), (model.recompute[value], -1)], high=0)
    if last_fetched is not None:
        linear.row([(last_fetched, 1), (model.swap[value], -1)], high=0)
    if returns:
        model.early[value] = returns


def _add_ready_rows(model: FluidModel, value: int, user: int) -> None:
    """Adds rows: if ``user`` is replayed by a slot, ``value`` is kept, replayed by then, or fetched by then."""
    own = model.early.get(value, ())
    done = [(early.slot, early.replayed) for early in model.early.get(user, ())]
    done.append((model.use_slot[user], model.recompute[user]))
    for slot, is_back in done:
        if is_back is None or slot >= model.use_slot[value]:
            continue
        terms: list[Term] = [(is_back, 1.0)]
        if value in model.recompute:
            terms.append((model.recompute[value], 1.0))
        if model.is_bound:
            # The first return at or after the slot is no stricter, and a swapped value may not have left yet.
            found = next((early for early in own if early.slot >= slot and early.replayed is not None), None)
            if found is None:
                continue
            assert found.replayed is not None
            terms.append((found.replayed, -1.0))
        else:
            terms.append((model.swap[value], 1.0))
            found = next((early for early in own if early.slot == slot), None)
            if found is not None:
                terms += [(column, -1.0) for column in (found.replayed, found.fetched) if column is not None]
        model.linear.row(terms, high=1)


def _add_link(model: FluidModel) -> None:
    """Adds, slot by slot, the backlog of bytes that are not yet out, and the bytes that are back before their use."""
    linear, slots, link = model.linear, model.slots, model.problem.link
    out_rate, in_rate = model.out_rate, model.in_rate
    saved, needed = dict[int, list[Term]](), dict[int, list[Term]]()
    for value, column in model.swap.items():
        saved.setdefault(model.save_slot[value], []).append((column, model.moved[value]))
        needed.setdefault(model.use_slot[value], []).append((column, model.moved[value]))
    seconds = (slots.seconds / model.time_unit_s).tolist()
    longer_out = 1.0 if model.is_bound else 1 + link.interference_out
    longer_in = 1.0 if model.is_bound else 1 + link.interference_in
    # A half-duplex link shares its bandwidth between both directions.
    shared = 0.0 if model.is_bound else (1 - link.duplex) / link.duplex * out_rate / in_rate
    for slot in range(slots.count):
        extra = linear.column(model.longest, cost=1.0)
        not_out = linear.column(model.all_bytes)
        model.extra.append(extra)
        model.not_out.append(not_out)
        left, spare = list[Term](), 0.0
        if slot > 0:
            left.append((model.not_out[slot - 1], 1.0))
            if slot - 1 in model.arriving and shared:
                left.append((model.arriving[slot - 1], shared))
            spare = seconds[slot - 1] * longer_out * out_rate
            if slot in saved:  # link time that was idle before the save point cannot be used after it
                backlog = linear.column(model.all_bytes)
                linear.row([*left, (backlog, -1.0)], high=spare)
                left, spare = [(backlog, 1.0)], 0.0
        linear.row([*left, *saved.get(slot, ()), (not_out, -1.0), (extra, -out_rate)], high=spare)
        if slot >= slots.first_backward:
            _add_inward(model, slot, needed.get(slot, []), in_rate, seconds[slot] * longer_in * in_rate)
    _add_early_fetches(model)


def _add_inward(model: FluidModel, slot: int, needed: list[Term], rate: float, spare: float) -> None:
    linear = model.linear
    ahead = linear.column(model.all_bytes)
    arriving = linear.column(min(model.all_bytes, spare))
    during_extra = linear.column(model.all_bytes)
    terms = [(ahead, 1.0), (during_extra, -1.0), *needed]
    if slot - 1 in model.ahead:
        terms += [(model.ahead[slot - 1], -1.0), (model.arriving[slot - 1], -1.0)]
    linear.row(terms, low=0, high=0)
    linear.row([(during_extra, 1.0), (model.extra[slot], -rate)], high=0)
    model.ahead[slot], model.arriving[slot] = ahead, arriving


def _add_early_fetches(model: FluidModel) -> None:
    """A value fetched for a replay stays until its own use: adds a row at each slot that may have such a fetch."""
    marks = sorted({early.slot for returns in model.early.values() for early in returns if early.fetched is not None})
    spans = []
    for value, returns in model.early.items():
        fetches = [(bisect_left(marks, early.slot), early.fetched) for early in returns if early.fetched is not None]
        ends = [*(start for start, _ in fetches), bisect_left(marks, model.use_slot[value])][1:]
        for (start, column), stop in zip(fetches, ends, strict=True):
            spans.append(Stretch(start, stop, column, model.moved[value]))
    sums = running_sums(model, len(marks), spans)
    places: Iterable[int] = range(len(marks))
    if is_written_out(model):  # by value: the reference plans were made in this order
        places = dict.fromkeys(place for span in spans for place in range(span.start, span.stop))
    for place in places:
        if sums[place]:
            fetched: list[Term] = [(column, -size) for column, size in sums[place]]
            model.linear.row([(model.ahead[marks[place]], 1.0), *fetched], low=0)
