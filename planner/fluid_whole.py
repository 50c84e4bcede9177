"""Whole buffers in PLAN: a large value leaves and returns in one piece, where the fluid rows let it trickle.

A buffer is given up only when its copy is complete, and taken up in full when its copy back is issued. For values that
are a small part of the budget the difference is nothing that a step shows, so that they stay fluid.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .fluid import FluidModel
from .linear import Term

SHORT_COPIES = 1.5
"""Rows "this copy cannot be over yet" stand as long as less than this many copy times have passed since the save."""


@dataclass(eq=False)
class WholeBuffers:
    """Columns of the values counted in whole buffers, and of the rest."""

    released: dict[int, dict[int, int]] = field(default_factory=dict)
    """Value -> slot -> column "its copy is out and its buffer given up by the end of the slot's points"."""
    issued: dict[int, dict[int, int]] = field(default_factory=dict)
    """Value -> backward slot -> column "its copy back has been issued by the end of the slot's points"."""
    rest_out: dict[int, int] = field(default_factory=dict)
    """Per slot: bytes of the other values that are out."""
    rest_ahead: dict[int, int] = field(default_factory=dict)
    """Per backward slot: bytes of the other values that are back before they are needed."""


def add_whole_buffers(model: FluidModel, row_ticks: list[int]) -> WholeBuffers:
    """Adds the columns and rows for ``model.request.whole``; a release or an issue happens at a slot of a grid."""
    whole = WholeBuffers()
    grid = _grid(model, row_ticks)
    for value in model.request.whole:
        _add_steps(model, whole, value, grid)
        _add_copy_times(model, whole, value)
    _add_totals(model, whole)
    return whole


def _grid(model: FluidModel, row_ticks: list[int]) -> set[int]:
    """Slots with memory rows, thinned to at most ``model.request.grid``, evenly in time in forward and in backward."""
    rows = sorted({model.slots.at_tick(tick) for tick in row_ticks})
    chosen: set[int] = set()
    first_backward = model.slots.first_backward
    for half in ([s for s in rows if s < first_backward], [s for s in rows if s >= first_backward]):
        if half:
            starts = np.concatenate(([0.0], np.cumsum(model.slots.seconds)))[half]
            wanted = np.linspace(starts[0], starts[-1], max(2, model.request.grid // 2))
            chosen.update(half[int(i)] for i in np.minimum(np.searchsorted(starts, wanted), len(half) - 1))
    return chosen


def _add_steps(model: FluidModel, whole: WholeBuffers, value: int, grid: set[int]) -> None:
    linear, slots = model.linear, model.slots
    released: dict[int, int] = {}
    issued: dict[int, int] = {}
    gone: int | None = None
    back: int | None = None
    for slot in range(model.save_slot[value], min(model.use_slot[value], slots.count)):
        if gone is None or slot in grid:
            column = linear.column(1.0, integer=True)
            if gone is not None:
                linear.row([(gone, 1.0), (column, -1.0)], high=0)
            gone = column
        released[slot] = gone
        if slot < slots.first_backward:
            continue
        if back is None or slot in grid:
            column = linear.column(1.0, integer=True)
            linear.row([(column, 1.0), (gone, -1.0)], high=0)
            if back is not None:
                linear.row([(back, 1.0), (column, -1.0)], high=0)
            back = column
        issued[slot] = back
    if gone is not None:
        linear.row([(gone, 1.0), (model.swap[value], -1.0)], high=0)
    whole.released[value] = released
    whole.issued[value] = issued


def _add_copy_times(model: FluidModel, whole: WholeBuffers, value: int) -> None:
    """A copy takes its time: not over before it, counted from the save."""
    passed, extra = 0.0, list[Term]()
    last: int | None = None
    for slot, column in whole.released[value].items():
        extra.append((model.extra[slot], -model.out_rate))
        if column != last:
            model.linear.row([(column, model.moved[value]), *extra], high=passed * model.out_rate)
        last = column
        passed += float(model.slots.seconds[slot]) / model.time_unit_s
        if passed * model.out_rate > SHORT_COPIES * model.moved[value]:
            break


def _add_totals(model: FluidModel, whole: WholeBuffers) -> None:
    """All that was given up is out, and all that is back has been issued."""
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
        for value, columns in whole.released.items():
            if slot >= model.save_slot[value]:
                terms.append((columns.get(slot, model.swap[value]), model.moved[value]))
        linear.row(terms, high=0)
        whole.rest_out[slot] = out
        if slot >= slots.first_backward:
            rest = linear.column(model.all_bytes)
            arrived: list[Term] = [(model.ahead[slot], 1.0), (model.arriving[slot], 1.0), (rest, -1.0)]
            arrived += [(columns[slot], -model.moved[v]) for v, columns in whole.issued.items() if slot in columns]
            linear.row(arrived, high=0)
            whole.rest_ahead[slot] = rest


def whole_terms(model: FluidModel, whole: WholeBuffers, tick: int, slot: int) -> list[Term]:
    """Swapped bytes that are on the device at ``tick`` though no use holds them."""
    problem, terms = model.problem, list[Term]()
    for value, column in model.swap.items():
        if problem.forward_death[value] >= tick or model.save_slot[value] > slot:
            continue
        if value not in whole.released:
            terms.append((column, model.moved[value]))
        elif tick < problem.first_use[value]:
            before_use = min(slot, model.use_slot[value] - 1)
            terms.append((column, model.moved[value]))
            if before_use in whole.released[value]:
                terms.append((whole.released[value][before_use], -model.moved[value]))
            if before_use in whole.issued[value]:
                terms.append((whole.issued[value][before_use], model.moved[value]))
    terms.append((whole.rest_out[slot], -1.0))
    if slot in whole.rest_ahead:
        terms.append((whole.rest_ahead[slot], 1.0))
    return terms
