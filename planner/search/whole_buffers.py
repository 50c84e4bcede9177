"""Whole buffers: a large value leaves and returns in one piece, not byte by byte as in the fluid rows.

A buffer is released only when its copy is complete, and allocated in full when its copy back is issued. For values that
are a small part of the budget the difference is negligible, so they stay fluid. Values move at slots of a grid: PLAN
moves large values only there, and BOUND uses the more favourable of the two neighbouring slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from poochplan.planner.search.fluid import FluidModel
from poochplan.planner.search.solvers import Term
from poochplan.planner.simulator.problem import Problem

SHORT_COPIES = 1.5
"""Rows "this copy cannot be complete yet" reach this many copy times from the save, or from the use."""


MOST_LARGE = 12


@dataclass(frozen=True)
class Steps:
    """Columns of a variable that goes from 0 to 1 once, one for each slot of the grid."""

    slots: tuple[int, ...]
    columns: tuple[int, ...]

    def by(self, slot: int) -> int | None:
        """Column of the last grid slot at or before ``slot``."""
        index = bisect_right(self.slots, slot) - 1
        return self.columns[index] if index >= 0 else None

    def later(self, slot: int) -> int | None:
        """Column of the first grid slot at or after ``slot``."""
        index = bisect_left(self.slots, slot)
        return self.columns[index] if index < len(self.slots) else None


@dataclass(eq=False)
class WholeBuffers:
    """Columns of the values that move as whole buffers, and of the other values."""

    released: dict[int, Steps] = field(default_factory=dict)
    """Per value: whether its copy is out and its buffer released by the end of the slot's points."""
    issued: dict[int, Steps] = field(default_factory=dict)
    """Per value: whether its copy back has been issued by the end of the slot's points."""
    rest_out: dict[int, int] = field(default_factory=dict)
    """Per slot: bytes of the other values that are out."""
    rest_ahead: dict[int, int] = field(default_factory=dict)
    """Per backward slot: bytes of the other values that are back before they are needed."""


def large_values(problem: Problem, candidates: Iterable[int], share: float) -> tuple[int, ...]:
    """The candidates that each exceed ``share`` of the saved bytes; at most the ``MOST_LARGE`` largest."""
    sizes = problem.rounded_bytes
    least = share * float(sizes.sum())
    large = sorted((v for v in candidates if float(sizes[v]) > least), key=lambda v: (-int(sizes[v]), v))
    return tuple(sorted(large[:MOST_LARGE]))


def add_whole_buffers(model: FluidModel, row_ticks: list[int]) -> WholeBuffers:
    """Adds the columns and rows for ``model.request.whole``."""
    whole = WholeBuffers()
    grid = _grid(model, row_ticks)
    for value in model.request.whole:
        _add_steps(model, whole, value, grid)
        _add_copy_times(model, whole, value)
    _add_totals(model, whole)
    return whole


def _grid(model: FluidModel, row_ticks: list[int]) -> list[int]:
    """At most ``model.request.grid`` slots with memory rows, evenly spaced in time in forward and in backward."""
    rows = sorted({model.slots.at_tick(tick) for tick in row_ticks})
    first_backward = model.slots.first_backward
    starts = np.concatenate(([0.0], np.cumsum(model.slots.seconds)))
    chosen: set[int] = set()
    for half in ([s for s in rows if s < first_backward], [s for s in rows if s >= first_backward]):
        if half:
            wanted = np.linspace(starts[half[0]], starts[half[-1]], max(2, model.request.grid // 2))
            chosen.update(half[int(i)] for i in np.minimum(np.searchsorted(starts[half], wanted), len(half) - 1))
    return sorted(chosen)


def _add_steps(model: FluidModel, whole: WholeBuffers, value: int, grid: list[int]) -> None:
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
    whole.released[value] = Steps(tuple(slots), tuple(gone))
    whole.issued[value] = Steps(tuple(back_slots), tuple(back))


def _add_copy_times(model: FluidModel, whole: WholeBuffers, value: int) -> None:
    """Adds rows for the duration of copies: out, counted from the save; in, counted back from the use."""
    size, seconds = model.moved[value], (model.slots.seconds / model.time_unit_s).tolist()
    released, issued, save = whole.released[value], whole.issued[value], model.save_slot[value]
    for slot, column in zip(released.slots, released.columns, strict=True):
        passed = sum(seconds[save:slot])
        if passed * model.out_rate > SHORT_COPIES * size:
            break
        extra = [(model.extra[between], -model.out_rate) for between in range(save, slot + 1)]
        model.linear.row([(column, size), *extra], high=passed * model.out_rate)
    use = model.use_slot[value]
    if use >= model.slots.count:
        return
    for slot, column in reversed(list(zip(issued.slots, issued.columns, strict=True))):
        left = sum(seconds[slot + 1 : use])
        if left * model.in_rate > SHORT_COPIES * size:
            break
        extra = [(model.extra[between], -model.in_rate) for between in range(slot + 1, use + 1)]
        terms = [(model.swap[value], size), (column, -size), *extra]
        if model.is_bound:  # a value that has not left by its use was not swapped at all
            last = released.columns[-1]
            terms = [(last, size), (column, -size), *extra]
        model.linear.row(terms, high=left * model.in_rate)


def _add_totals(model: FluidModel, whole: WholeBuffers) -> None:
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
            if value not in whole.released:
                saved_rest.append(term)
        out = linear.column(model.all_bytes)
        linear.row([(out, 1.0), *saved_rest], high=0)
        terms: list[Term] = [(out, 1.0), (model.not_out[slot], 1.0), *saved]
        for value, steps in whole.released.items():
            column = steps.by(slot)
            if slot >= model.use_slot[value]:
                column = model.swap[value]
            if column is not None:
                terms.append((column, model.moved[value]))
        linear.row(terms, high=0)
        whole.rest_out[slot] = out
        if slot >= slots.first_backward:
            rest = linear.column(model.all_bytes)
            linear.row([*_arrived(model, whole, slot), (rest, -1.0)], high=0)
            whole.rest_ahead[slot] = rest


def _arrived(model: FluidModel, whole: WholeBuffers, slot: int) -> list[Term]:
    """Bytes that are back before their use, minus those of issued whole buffers."""
    terms: list[Term] = [(model.ahead[slot], 1.0), (model.arriving[slot], 1.0)]
    for value, steps in whole.issued.items():
        if slot < model.use_slot[value]:
            column = steps.later(slot) if model.is_bound else steps.by(slot)
            if column is None and model.is_bound:
                column = model.swap[value]
            if column is not None:
                terms.append((column, -model.moved[value]))
    return terms


def resident_whole(model: FluidModel, whole: WholeBuffers, tick: int, slot: int) -> list[Term]:
    """Bytes of swapped whole buffers that are on the device at ``tick`` and that no use holds."""
    problem, terms = model.problem, list[Term]()
    for value, released in whole.released.items():
        if not problem.forward_death[value] < tick < problem.first_use[value] or model.save_slot[value] > slot:
            continue
        gone = released.later(slot) if model.is_bound else released.by(slot)
        if gone is None and model.is_bound:
            continue  # it may be released before the next slot of the grid
        terms.append((model.swap[value], model.moved[value]))
        if gone is not None:
            terms.append((gone, -model.moved[value]))
        back = whole.issued[value].by(slot)
        if back is not None:
            terms.append((back, model.moved[value]))
    return terms


def resident_rest(model: FluidModel, whole: WholeBuffers, tick: int, slot: int) -> list[Term]:
    """Bytes of the other swapped values that are on the device at ``tick`` and that no use holds."""
    death, save = model.problem.forward_death, model.save_slot
    terms: list[Term] = [
        (column, model.moved[value])
        for value, column in model.swap.items()
        if value not in whole.released and death[value] < tick and save[value] <= slot
    ]
    terms.append((whole.rest_out[slot], -1.0))
    return terms
