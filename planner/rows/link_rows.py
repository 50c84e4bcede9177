"""The link's rows: what has not left yet, and what is back before it is needed, slot by slot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from poochplan.planner.model.fluid import FluidModel
from poochplan.planner.model.linear import Term

from .running import Span, is_written_out, running_sums


def add_link(model: FluidModel) -> None:
    """Backlog of bytes not yet out, and bytes that are back before they are needed, slot by slot."""
    linear, slots, link = model.linear, model.slots, model.problem.link
    out_rate, in_rate = model.out_rate, model.in_rate
    saved, needed = dict[int, list[Term]](), dict[int, list[Term]]()
    for value, column in model.swap.items():
        saved.setdefault(model.save_slot[value], []).append((column, model.moved[value]))
        needed.setdefault(model.use_slot[value], []).append((column, model.moved[value]))
    seconds = (slots.seconds / model.time_unit_s).tolist()
    longer_out = 1.0 if model.is_bound else 1 + link.interference_out
    longer_in = 1.0 if model.is_bound else 1 + link.interference_in
    # What a half-duplex link carries inwards it cannot carry outwards.
    shared = 0.0 if model.is_bound else (1 - link.duplex) / link.duplex * out_rate / in_rate
    for slot in range(slots.count):
        extra = linear.column(model.longest, cost=1.0)
        not_out = linear.column(model.all_bytes)
        model.extra.append(extra)
        model.not_out.append(not_out)
        if slot > 0:
            left: list[Term] = [(model.not_out[slot - 1], 1.0)]
            if slot - 1 in model.arriving and shared:
                left.append((model.arriving[slot - 1], shared))
            spare = seconds[slot - 1] * longer_out * out_rate
            if slot in saved:  # what was idle before the save point is gone
                backlog = linear.column(model.all_bytes)
                linear.row([*left, (backlog, -1.0)], high=spare)
                left, spare = [(backlog, 1.0)], 0.0
            linear.row([*left, *saved.get(slot, ()), (not_out, -1.0), (extra, -out_rate)], high=spare)
        else:
            linear.row([*saved.get(slot, ()), (not_out, -1.0), (extra, -out_rate)], high=0.0)
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
    """What was fetched for a replay stays until its own use; a row at each slot where such a fetch may be."""
    marks = sorted({early.slot for returns in model.early.values() for early in returns if early.fetched is not None})
    spans = []
    for value, returns in model.early.items():
        fetches = [(bisect_left(marks, early.slot), early.fetched) for early in returns if early.fetched is not None]
        ends = [*(start for start, _ in fetches), bisect_left(marks, model.use_slot[value])][1:]
        for (start, column), stop in zip(fetches, ends, strict=True):
            spans.append(Span(start, stop, column, model.moved[value]))
    sums = running_sums(model, len(marks), spans)
    places: Iterable[int] = range(len(marks))
    if is_written_out(model):  # by value, which is how the reference plans were made
        places = dict.fromkeys(place for span in spans for place in range(span.start, span.stop))
    for place in places:
        if sums[place]:
            fetched: list[Term] = [(column, -size) for column, size in sums[place]]
            model.linear.row([(model.ahead[marks[place]], 1.0), *fetched], low=0)
