"""The fluid models' memory rows: at each tick that could exceed the budget, the live bytes fit.

After a slot's points, the bytes that decisions control only grow, because values die in forward. So a tick needs no row
if a later tick of its slot has no fewer fixed bytes. Ticks of points have rows only in PLAN, where replays may run:
bytes that BOUND counts by the end of a slot's points may arrive after these ticks.

Whole buffers: a large value leaves and returns in one piece, not byte by byte as in the fluid rows. A buffer is
released only when its copy is complete, and allocated in full when its copy back is issued. For values that are a small
part of the budget the difference is negligible, so they stay fluid. Values move at slots of a grid: PLAN moves large
values only there, and BOUND uses the more favourable of the two neighbouring slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np

from poochplan.formats.occupancy import Ints, occupancy
from poochplan.planner.search.fluid import FluidModel, Stretch, running_sums
from poochplan.planner.search.solvers import Term
from poochplan.planner.simulator.problem import Problem


def add_memory(model: FluidModel) -> None:
    problem, death, saved = model.problem, model.problem.forward_death, model.save_slot
    live = problem.born, np.maximum(death, problem.freed), problem.rounded_bytes
    movable, free = _gap_bytes(model, model.request.candidates), _gap_bytes(model, model.request.free)
    fixed = problem.base_bytes + occupancy(problem.tick_count, live) - movable - free
    inside = _inside_replays(model)
    ticks = _row_ticks(model, fixed, movable, inside)
    slots = [model.slots.at_tick(tick) for tick in ticks]
    kept = _kept_columns(model, ticks)
    early = running_sums(model, len(ticks), [*_claims(model, ticks), *_returned(model, ticks, slots)])
    may_be_out = [  # while forward still holds them
        Stretch(bisect_left(slots, saved[value]), bisect_right(ticks, int(death[value])), column, model.moved[value])
        for value, column in model.swap.items()
    ]
    alive = running_sums(model, len(ticks), may_be_out)
    if model.request.whole:
        grid = _grid(model, ticks)
        for value in model.request.whole:
            _add_steps(model, value, grid)
            _add_copy_times(model, value)
        _add_totals(model)
    for row, (tick, slot) in enumerate(zip(ticks, slots, strict=True)):
        room = (model.request.budget_bytes - float(fixed[tick])) / model.unit
        terms: list[Term] = [(kept[row], 1.0), *inside.get(tick, ()), *early[row]]
        terms += model.replayed_ahead.get(slot, ())
        added = list[tuple[list[Term], list[Term]]]()
        if not model.request.whole or model.is_bound:  # both kinds of row hold for every plan
            ahead = [(columns[slot], 1.0) for columns in (model.ahead, model.arriving) if slot in columns]
            added.append((ahead, [(model.not_out[slot], 1.0), *((column, -size) for column, size in alive[row])]))
        if model.request.whole:
            added.append(_resident(model, tick, slot))
        for more, if_positive in added:
            model.linear.row([*terms, *more], high=room)
            model.linear.row([*terms, *more, *if_positive], high=room)


def _gap_bytes(model: FluidModel, values: tuple[int, ...]) -> Ints:
    """Per tick: bytes of those of ``values`` that a decision may have moved away."""
    gaps = np.array([_gap(model, value) for value in values], dtype=np.int64).reshape(-1, 2)
    return occupancy(model.problem.tick_count, (gaps[:, 0], gaps[:, 1], model.problem.rounded_bytes[list(values)]))


def _gap(model: FluidModel, value: int) -> tuple[int, int]:
    """First and last tick at which a decision moves a value's bytes."""
    problem = model.problem
    end = int(problem.first_use[value]) - 1
    if problem.first_use_point[value] < 0:
        end = int(min(max(problem.forward_death[value], problem.freed[value]), problem.tick_count - 1))
    return int(min(problem.forward_death[value] + 1, end + 1)), end


def _row_ticks(model: FluidModel, fixed: Ints, movable: Ints, inside: dict[int, list[Term]]) -> list[int]:
    slots, rows = model.slots, set[int]()
    over = fixed + movable > model.request.budget_bytes
    ends = [*slots.start_tick[1:].tolist(), model.problem.tick_count]
    for slot in range(slots.count):
        best = -1
        for tick in range(ends[slot] - 1, int(slots.last_point_tick[slot]), -1):
            if fixed[tick] > best:
                best = int(fixed[tick])
                if over[tick]:
                    rows.add(tick)
    for tick, terms in inside.items():
        most = sum(coefficient for _, coefficient in terms if coefficient > 0) * model.unit
        if fixed[tick] + movable[tick] + most > model.request.budget_bytes:
            rows.add(tick)
    return sorted(rows)


def _kept_columns(model: FluidModel, ticks: list[int]) -> list[int]:
    """Per row tick: bytes of kept candidates between their forward death and their first use."""
    columns = [model.linear.column(model.all_bytes) for _ in ticks]
    enter: dict[int, list[tuple[int, float]]] = {}
    for value in model.request.candidates:
        first, end = _gap(model, value)
        start, stop = int(np.searchsorted(ticks, first)), int(np.searchsorted(ticks, end + 1))
        if start < stop:
            enter.setdefault(start, []).append((value, 1.0))
            enter.setdefault(stop, []).append((value, -1.0))
    for index, column in enumerate(columns):
        terms: list[Term] = [(column, 1.0)]
        constant = 0.0
        if index > 0:
            terms.append((columns[index - 1], -1.0))
        for value, sign in enter.get(index, ()):
            scaled = sign * model.resident[value]
            constant += scaled
            terms.append((model.swap[value], scaled))
            if value in model.recompute:
                terms.append((model.recompute[value], scaled))
        model.linear.row(terms, low=constant, high=constant)
    return columns


def _returned(model: FluidModel, ticks: list[int], slots: list[int]) -> list[Stretch]:
    """Recomputed values that are back before their own need."""
    spans = []
    for value in sorted(model.early, key=lambda value: (model.early[value][0].slot, value)):
        returns = model.early[value]
        if value not in model.recompute:
            continue
        end = bisect_left(ticks, int(model.first_use[value]))
        starts = [bisect_left(slots, early.slot) for early in returns]
        for early, start, stop in zip(returns, starts, [*starts[1:], end], strict=True):
            assert early.replayed is not None
            spans.append(Stretch(start, min(stop, end), early.replayed, model.returned[value]))
    return spans


def _claims(model: FluidModel, ticks: list[int]) -> list[Stretch]:
    """Inputs that later replays need after the inputs' own last use, from one late consumer's use to the next.

    BOUND counts a claim up to the last slot before the consumer's use, and only if the replay is not done by then.
    """
    problem, linear = model.problem, model.linear
    claims: list[Stretch] = []
    for value, users in model.consumers.items():
        if value in problem.copies:
            claims += _source_claims(model, ticks, value, users)
            continue
        if model.is_bound and problem.first_use_point[value] < 0:
            continue
        late = sorted((int(model.first_use[u]), u) for u in users if model.first_use[u] > problem.freed[value])
        if model.is_bound:
            back = {user: returns[-1].slot for user, returns in model.early.items()}
            late = [(tick, user) for tick, user in late if back.get(user, -1) == model.use_slot[user] - 1]
        after: int | None = None
        for index in reversed(range(len(late))):
            tick, user = late[index]
            first = late[index - 1][0] + 1 if index else int(problem.freed[value]) + 1
            held = linear.column(1.0)
            terms: list[Term] = [(held, 1.0), (model.recompute[user], -1.0)]
            done = model.replayed_by(user, model.use_slot[user] - 1)
            if done is not None:
                terms.append((done, 1.0))
            linear.row(terms, low=0)
            if after is not None:
                linear.row([(held, 1.0), (after, -1.0)], low=0)
            last = min(tick, problem.tick_count - 1)
            if model.is_bound:
                last = int(model.slots.start_tick[model.use_slot[user]]) - 1 if tick < problem.tick_count else first - 1
            claims.append(Stretch(bisect_left(ticks, first), bisect_right(ticks, last), held, model.resident[value]))
            after = held
    return claims


def _source_claims(model: FluidModel, ticks: list[int], value: int, users: list[int]) -> list[Stretch]:
    """A source from its forward death on, unless it is swapped or recomputed itself: up to the use of each user, and in
    BOUND up to that of its copy alone. Once the copy is back it takes these bytes itself (``FluidModel.returned``).
    """
    problem, linear = model.problem, model.linear
    away = [(columns[value], 1.0) for columns in (model.swap, model.recompute) if value in columns]
    if model.is_bound:
        users = [user for user in users if user == problem.copies[value] and away]
    late = sorted((int(model.first_use[u]), u) for u in users if model.first_use[u] < problem.tick_count)
    first = int(max(problem.forward_death[value], problem.freed[value])) + 1
    claims: list[Stretch] = []
    for index, (tick, _) in enumerate(late):
        held = linear.column(1.0)
        for _, user in late[index:]:
            linear.row([(held, 1.0), (model.recompute[user], -1.0), *away], low=0)
        last = int(model.slots.start_tick[model.use_slot[late[index][1]]]) - 1 if model.is_bound else tick
        claims.append(Stretch(bisect_left(ticks, first), bisect_right(ticks, last), held, model.resident[value]))
        first = tick + 1
    return claims


def _inside_replays(model: FluidModel) -> dict[int, list[Term]]:
    """Per tick of a first use: bytes that a replay there holds beyond the value that it brings back.

    Empty in BOUND: the replay may have run at an earlier use point that has no column.
    """
    if model.is_bound:
        return {}
    problem, slots = model.problem, model.slots
    inside: dict[int, list[Term]] = {}
    for value, column in model.recompute.items():
        point = problem.first_use_point[value]
        beyond = (problem.replay.merged((value,)).peak_bytes - int(problem.rounded_bytes[value])) / model.unit
        if point < 0 or beyond <= 0:
            continue
        terms: list[Term] = [(column, beyond)]
        before = model.replayed_by(value, slots.of_point[point])
        if before is not None:
            terms.append((before, -beyond))
        inside[int(problem.point_ticks[point])] = terms
    return inside


SHORT_COPIES = 1.5
"""Rows "this copy cannot be complete yet" reach this many copy times from the save, or from the use."""
MOST_LARGE = 12
GRID, GRID_OF_BOUND = 30, 60
"""Most slots at which whole values leave and return."""


def large_values(problem: Problem, candidates: Iterable[int], share: float) -> tuple[int, ...]:
    """The candidates that each exceed ``share`` of the saved bytes; at most the ``MOST_LARGE`` largest."""
    sizes = problem.rounded_bytes
    least = share * float(sizes.sum())
    large = sorted((v for v in candidates if float(sizes[v]) > least), key=lambda v: (-int(sizes[v]), v))
    return tuple(sorted(large[:MOST_LARGE]))


def _grid(model: FluidModel, row_ticks: list[int]) -> list[int]:
    """At most ``GRID`` slots with memory rows, evenly spaced in time in forward and in backward."""
    rows = sorted({model.slots.at_tick(tick) for tick in row_ticks})
    first_backward = model.slots.first_backward
    starts = np.concatenate(([0.0], np.cumsum(model.slots.seconds)))
    chosen: set[int] = set()
    for half in ([s for s in rows if s < first_backward], [s for s in rows if s >= first_backward]):
        if half:
            most = (GRID_OF_BOUND if model.is_bound else GRID) // 2
            wanted = np.linspace(starts[half[0]], starts[half[-1]], most)
            chosen.update(half[int(i)] for i in np.minimum(np.searchsorted(starts[half], wanted), len(half) - 1))
    return sorted(chosen)


def _add_steps(model: FluidModel, value: int, grid: list[int]) -> None:
    """Adds the columns of a whole buffer: each goes from 0 to 1 once, at one of the slots of the grid."""
    linear, first_backward = model.linear, model.slots.first_backward
    save, use = model.save_slot[value], min(model.use_slot[value], model.slots.count)
    slots = [slot for slot in grid if save <= slot < use]
    gone = [linear.column(1.0, integer=True) for _ in slots]
    back_slots = [slot for slot in slots if slot >= first_backward]
    back = [linear.column(1.0, integer=True) for _ in back_slots]
    for columns in (gone, back):
        for earlier, later in pairwise(columns):
            linear.row([(earlier, 1.0), (later, -1.0)], high=0)
    if gone:
        linear.row([(gone[-1], 1.0), (model.swap[value], -1.0)], high=0)
    for column, is_gone in zip(back, gone[len(gone) - len(back) :], strict=True):
        linear.row([(column, 1.0), (is_gone, -1.0)], high=0)
    model.released[value] = list(zip(slots, gone, strict=True))
    model.issued[value] = list(zip(back_slots, back, strict=True))


def _by(steps: Sequence[tuple[int, int]], slot: int) -> int | None:
    """Column of the last grid slot at or before ``slot``."""
    index = bisect_right(steps, slot, key=itemgetter(0)) - 1
    return steps[index][1] if index >= 0 else None


def _later(steps: Sequence[tuple[int, int]], slot: int) -> int | None:
    """Column of the first grid slot at or after ``slot``."""
    index = bisect_left(steps, slot, key=itemgetter(0))
    return steps[index][1] if index < len(steps) else None


def _add_copy_times(model: FluidModel, value: int) -> None:
    """Adds rows for the duration of copies: out, counted from the save; in, counted back from the use."""
    size, seconds = model.moved[value], (model.slots.seconds / model.time_unit_s).tolist()
    released, save, use = model.released[value], model.save_slot[value], model.use_slot[value]
    for slot, column in released:
        passed = sum(seconds[save:slot])
        if passed * model.out_rate > SHORT_COPIES * size:
            break
        extra = [(model.extra[between], -model.out_rate) for between in range(save, slot + 1)]
        model.linear.row([(column, size), *extra], high=passed * model.out_rate)
    if use >= model.slots.count:
        return
    for slot, column in reversed(model.issued[value]):
        left = sum(seconds[slot + 1 : use])
        if left * model.in_rate > SHORT_COPIES * size:
            break
        extra = [(model.extra[between], -model.in_rate) for between in range(slot + 1, use + 1)]
        # In BOUND, a value that has not left by its use was not swapped at all.
        moved = released[-1][1] if model.is_bound else model.swap[value]
        model.linear.row([(moved, size), (column, -size), *extra], high=left * model.in_rate)


def _add_totals(model: FluidModel) -> None:
    """Adds rows: all released bytes are out, and all bytes that are back were issued."""
    linear, slots = model.linear, model.slots
    saved, saved_rest = list[Term](), list[Term]()
    by_slot: dict[int, list[int]] = {}
    for value in model.swap:
        by_slot.setdefault(model.save_slot[value], []).append(value)
    for slot in range(slots.count):
        for value in by_slot.get(slot, ()):
            term = (model.swap[value], -model.moved[value])
            saved.append(term)
            if value not in model.released:
                saved_rest.append(term)
        out = model.rest_out[slot] = linear.column(model.all_bytes)
        linear.row([(out, 1.0), *saved_rest], high=0)
        terms: list[Term] = [(out, 1.0), (model.not_out[slot], 1.0), *saved]
        for value, steps in model.released.items():
            column = model.swap[value] if slot >= model.use_slot[value] else _by(steps, slot)
            if column is not None:
                terms.append((column, model.moved[value]))
        linear.row(terms, high=0)
        if slot >= slots.first_backward:
            rest = model.rest_ahead[slot] = linear.column(model.all_bytes)
            arrived: list[Term] = [(model.ahead[slot], 1.0), (model.arriving[slot], 1.0)]
            for value, steps in model.issued.items():
                column = _later(steps, slot) if model.is_bound else _by(steps, slot)
                if column is None and model.is_bound:
                    column = model.swap[value]
                if column is not None and slot < model.use_slot[value]:
                    arrived.append((column, -model.moved[value]))
            linear.row([*arrived, (rest, -1.0)], high=0)


def _resident(model: FluidModel, tick: int, slot: int) -> tuple[list[Term], list[Term]]:
    """Bytes of swapped whole buffers, and of the other swapped values, that are on the device at ``tick`` and that no
    use holds.
    """
    death, save, terms = model.problem.forward_death, model.save_slot, list[Term]()
    for value, released in model.released.items():
        if not death[value] < tick < model.first_use[value] or save[value] > slot:
            continue
        gone = _later(released, slot) if model.is_bound else _by(released, slot)
        if gone is None and model.is_bound:
            continue  # it may be released before the next slot of the grid
        columns = (model.swap[value], 1.0), (gone, -1.0), (_by(model.issued[value], slot), 1.0)
        terms += [(column, sign * model.moved[value]) for column, sign in columns if column is not None]
    if slot in model.rest_ahead:
        terms.append((model.rest_ahead[slot], 1.0))
    rest: list[Term] = [
        (column, model.moved[value])
        for value, column in model.swap.items()
        if value not in model.released and death[value] < tick and save[value] <= slot
    ]
    return terms, [*rest, (model.rest_out[slot], -1.0)]
