"""The rows of time: the step takes longer by each replay, and on the CPU by each swap."""

from __future__ import annotations

from dataclasses import dataclass, field

from poochplan.planner.model.fluid import FluidModel
from poochplan.planner.model.linear import Term

from .run_rows import add_runs


def add_time(model: FluidModel) -> None:
    """Time is added for each replay: in PLAN at the slot of its return, in BOUND at some use point up to there."""
    if model.is_bound:
        _add_replay_time(model)
        return
    jumps = dict[int, list[Term]]()
    for value in model.recompute:
        seconds = model.replay_time[value]
        before: int | None = None
        for slot, now in _returns(model, value):
            terms = jumps.setdefault(slot, [])
            terms.append((now, -seconds))
            if before is not None:
                terms.append((before, seconds))
            before = now
    for slot, terms in jumps.items():
        model.linear.row([(model.extra[slot], 1.0), *terms], low=0)


def _returns(model: FluidModel, value: int) -> list[tuple[int, int]]:
    """Slots and columns "replayed by then" of a recomputable value, its own use last; none if that never comes."""
    if model.use_slot[value] == model.slots.count:
        return []
    early = [(one.slot, one.replayed) for one in model.early.get(value, ()) if one.replayed is not None]
    return [*early, (model.use_slot[value], model.recompute[value])]


@dataclass
class _Jump:
    """What changes at a slot at which some value may be back."""

    done: list[Term] = field(default_factory=list)
    """Seconds of replays that are done by the slot's points, and were not by the slot before: at least these."""
    begun: list[Term] = field(default_factory=list)
    """Seconds of the replays that may run since the slot before: those that are done by the next return at most."""


def _add_replay_time(model: FluidModel) -> None:
    """BOUND: of the time added between two returns some is spent in replays.

    All of it up to a slot pays for the replays done by then, and for none that is not done by the return after.
    """
    linear = model.linear
    own, replays = add_runs(model)
    jumps = _jumps(model, own)
    since = model.slots.first_backward
    idle: int | None = None
    early: int | None = None
    spent: list[Term] = []
    for slot in sorted(jumps):
        replaying = linear.column(model.longest)
        linear.row([(replaying, 1.0), *((extra, -1.0) for extra in model.extra[since : slot + 1])], high=0)
        idle = _running(model, idle, [(replaying, -1.0), *jumps[slot].done])
        early = _running(model, early, [(replaying, 1.0), *((c, -s) for c, s in jumps[slot].begun)])
        spent.append((replaying, 1.0))
        since = slot + 1
    linear.row([*spent, *((column, -seconds) for column, seconds in replays)], low=0)
    if model.out_s or model.fetch_s:
        swaps: list[Term] = [(column, -model.swap_time(value)) for value, column in model.swap.items()]
        linear.row([*((extra, 1.0) for extra in model.extra), *((c, -s) for c, s in replays), *swaps], low=0)


def _running(model: FluidModel, before: int | None, added: list[Term]) -> int:
    """A column, no less than nothing, that is the one before less what is ``added``."""
    now = model.linear.column(model.longest)
    previous: list[Term] = [] if before is None else [(before, -1.0)]
    model.linear.row([(now, 1.0), *previous, *added], low=0, high=0)
    return now


def _jumps(model: FluidModel, own: list[float]) -> dict[int, _Jump]:
    """Per slot with a return of any value; ``own`` are the seconds that no other value's replay can spare."""
    returns = {value: _returns(model, value) for value in model.recompute}
    slots = sorted({slot for steps in returns.values() for slot, _ in steps})
    if not slots:
        return {}
    jumps = {slot: _Jump() for slot in slots}
    after = dict(zip(slots, [*slots[1:], -1], strict=True))
    for value, steps in returns.items():
        seconds = model.replay_time[value]
        if not steps:  # never used in backward: if at all, it is replayed for another
            jumps[slots[0]].begun.append((model.recompute[value], seconds))
            continue
        before: int | None = None
        begins = slots[0]
        for slot, now in steps:
            jumps[slot].done.append((now, own[value]))
            jumps[begins].begun.append((now, seconds))
            if before is not None:
                jumps[slot].done.append((before, -own[value]))
                jumps[begins].begun.append((before, -seconds))
            before, begins = now, after[slot]
    return jumps
