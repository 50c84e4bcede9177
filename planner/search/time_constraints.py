"""How often the ops of replays run, in BOUND: replays share an op only if they are parts of one run.

A run brings back the requested value, its root, and those recomputed values from which the root's replay starts,
directly or through others. Two values are in one run only if one of them, or a third, starts from the other or from
both. So values that are no starting point of any replay never share a run.
"""

from __future__ import annotations

from poochplan.formats.profile import Link
from poochplan.planner.search.fluid import FluidModel
from poochplan.planner.search.solvers import Term

CLASS_WIDTH = 1.5
"""Replays are divided into classes by the bytes that a second of them brings back, up to this factor."""
MOST_CLASSES = 6
MOST_RATIO = 1e3
"""Largest ratio of bytes to seconds, in units of a tenth of a mean value per thousandth of the step. Larger ones would
be less exact for the solver."""


def add_time(model: FluidModel) -> None:
    """Adds time for each replay: in PLAN at the slot of its return, in BOUND at some use point up to that slot."""
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
    """Slots and columns "replayed by then" of a recomputable value, its own use last; empty if that never comes."""
    if model.use_slot[value] == model.slots.count:
        return []
    early = [(one.slot, one.replayed) for one in model.early.get(value, ()) if one.replayed is not None]
    return [*early, (model.use_slot[value], model.recompute[value])]


def _add_replay_time(model: FluidModel) -> None:
    """BOUND: part of the time added at a slot is spent in replays, in those of each class and in ops that they share.

    All of it up to a slot pays for the replays done by then, and for no replay that is not done by the next return.
    """
    linear = model.linear
    own, shared = _add_runs(model)
    class_of, ratios = _classes(model, own)
    done, begun = _jumps(model, own, class_of)
    ahead: dict[int, int] = {}
    early: int | None = None
    all_shared: list[Term] = []
    for slot in range(model.slots.first_backward, model.slots.count):
        spent: list[Term] = []
        for number, ratio in enumerate(ratios):
            column = linear.column(model.longest)
            spent.append((column, 1.0))
            ahead[number] = _running(model, ahead.get(number), [(column, -1.0), *done.get((slot, number), ())])
            model.replayed_ahead.setdefault(slot, []).append((ahead[number], ratio))
        if shared:
            column = linear.column(model.longest)
            spent.append((column, 1.0))
            all_shared.append((column, 1.0))
        if spent:
            linear.row([(model.extra[slot], 1.0), *((c, -1.0) for c, _ in spent)], low=0)
            early = _running(model, early, [*spent, *((c, -s) for c, s in begun.get(slot, ()))])
    runs: list[Term] = [(column, -seconds) for column, seconds in shared]
    if shared:
        linear.row([*all_shared, *runs], low=0)
    # All added time pays for the replays, and for the compute time that swaps take.
    lost_out, lost_in = seconds_lost(model.problem.link)
    if not (model.out_s or model.fetch_s or lost_out or lost_in):
        return
    used = {value for value in model.request.candidates if model.use_slot[value] < model.slots.count}
    costs: list[Term] = []
    for value, column in model.swap.items():
        copies_s = lost_out * model.problem.out_seconds(value)
        copies_s += lost_in * model.problem.in_seconds(value) if value in used else 0.0
        costs.append((column, -model.swap_time(value) - copies_s / model.time_unit_s))
    costs += [(column, -own[value]) for value, column in model.recompute.items() if value in used]
    model.linear.row([*((extra, 1.0) for extra in model.extra), *runs, *costs], low=0)


def seconds_lost(link: Link) -> tuple[float, float]:
    """Seconds that the step loses for each second of a copy out alone on the link, and for each of a copy back.

    Beside a copy, compute does 1 / (1 + interference) of its work. Beside two copies it loses less than the sum of both
    losses, and each copy is slowed as ``duplex`` says. So both shares are scaled down to the loss beside two copies.
    """
    out, back = link.interference_out, link.interference_in
    lost_out, lost_in, lost = out / (1 + out), back / (1 + back), (out + back) / (1 + out + back)
    apart = link.duplex * (lost_out + lost_in)
    scale = min(1.0, lost / apart) if apart > 0.0 else 1.0
    return scale * lost_out, scale * lost_in


def _running(model: FluidModel, before: int | None, added: list[Term]) -> int:
    """A non-negative column that is the previous one minus the sum of ``added``."""
    now = model.linear.column(model.longest)
    previous: list[Term] = [] if before is None else [(before, -1.0)]
    model.linear.row([(now, 1.0), *previous, *added], low=0, high=0)
    return now


def _classes(model: FluidModel, own: list[float]) -> tuple[dict[int, int], list[float]]:
    """Recomputable values that have ``own`` seconds, divided by the bytes that a second of their replay brings back:
    the class of each value, and the least ratio of each class, in the model's units. The ratios of a class are within a
    factor of ``CLASS_WIDTH``.
    """
    ratios = {
        value: min(MOST_RATIO, model.returned[value] / own[value])
        for value in model.recompute
        if own[value] > 0 and model.use_slot[value] < model.slots.count
    }
    class_of: dict[int, int] = {}
    least: list[float] = []
    for value in sorted(ratios, key=lambda value: ratios[value]):
        if not least or (ratios[value] > CLASS_WIDTH * least[-1] and len(least) < MOST_CLASSES):
            least.append(ratios[value])
        class_of[value] = len(least) - 1
    return class_of, least


def _jumps(
    model: FluidModel, own: list[float], class_of: dict[int, int]
) -> tuple[dict[tuple[int, int], list[Term]], dict[int, list[Term]]]:
    """By slot of backward and class: seconds of replays that are done by the slot's points, and were not by the slot
    before; ``own`` are the least seconds of each value's replay. By slot: seconds of the replays that may have run
    since the slot before, at most those that are done by the next return.
    """
    first = model.slots.first_backward
    done, begun = dict[tuple[int, int], list[Term]](), dict[int, list[Term]]()
    for value in model.recompute:
        seconds = model.replay_time[value]
        steps = _returns(model, value)
        if not steps:  # never used in backward: if at all, it is replayed for another
            begun.setdefault(first, []).append((model.recompute[value], seconds))
        before: int | None = None
        begins = first
        for slot, now in steps:
            changes = [(now, 1.0)] if before is None else [(now, 1.0), (before, -1.0)]
            if value in class_of:
                here = done.setdefault((slot, class_of[value]), [])
                here += [(column, sign * own[value]) for column, sign in changes]
            begun.setdefault(begins, []).extend((column, sign * seconds) for column, sign in changes)
            before, begins = now, slot + 1
    return done, begun


def _add_runs(model: FluidModel) -> tuple[list[float], list[Term]]:
    """Per value: the least seconds of its replay; and the terms for the least further seconds of all replays.

    An op that several replays share counts with the largest of their values: in the run that brings it back.
    """
    own = list(model.replay_time)
    groups = dict[tuple[int, ...], float]()
    op_seconds, replays = model.problem.replay.op_seconds, model.problem.replay.replays
    users = dict[int, list[int]]()  # by op: the values that backward uses and whose replays run it
    for value in model.recompute:
        if model.use_slot[value] < model.slots.count:
            for op in model.problem.replay.of(value).ops:
                users.setdefault(op, []).append(value)
    for op, several in users.items():
        if len(several) > 1:
            seconds = (op_seconds[op] + model.replay_op_s) / model.time_unit_s
            groups[tuple(several)] = groups.get(tuple(several), 0.0) + seconds
    beyond: list[Term] = []
    movable = (replays[value] for value in (*model.request.candidates, *model.request.free))
    inputs = {source for replay in movable if replay is not None for source in replay.inputs}
    for values, seconds in groups.items():
        largest = max(values, key=lambda value: (model.resident[value], -value))
        for value in values:
            own[value] -= seconds if value != largest else 0.0
        beyond += [(_runs_of(model, values, inputs), seconds), (model.recompute[largest], -seconds)]
    return [max(0.0, seconds) for seconds in own], beyond


def _runs_of(model: FluidModel, values: tuple[int, ...], inputs: set[int]) -> int:
    """A column that is at least the number of runs that the ``values`` need, all of which run some op. ``inputs``:
    values from which some replay starts.
    """
    leaves = [value for value in values if value not in inputs]
    inner = [value for value in values if value in inputs]
    reached = _starts(model, leaves, inner)
    runs = model.linear.column(float(max(1, len(leaves) + 1)))
    alone: list[Term] = [(model.recompute[value], -1.0) for value in leaves]
    apart = [value for value in inner if value not in reached]
    if leaves and not apart:
        model.linear.row([(runs, 1.0), *alone], low=0)
    for value in apart:
        model.linear.row([(runs, 1.0), *alone, (model.recompute[value], -1.0)], low=0)
    for value in inner:
        if leaves and value in reached:
            model.linear.row([(runs, 1.0), (model.recompute[value], -1.0)], low=0)
    return runs


def _starts(model: FluidModel, roots: list[int], wanted: list[int]) -> set[int]:
    """Those of ``wanted`` from which the replay of one of ``roots`` starts, directly or through others."""
    replays = model.problem.replay.replays
    if not wanted or not roots:
        return set()
    earliest = min(model.problem.replay.of(value).ops[-1] for value in wanted)
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        replay = replays[pending.pop()]
        if replay is None or replay.ops[-1] < earliest:  # its inputs are complete before its last op
            continue
        pending += [source for source in replay.inputs if source not in seen]
        seen.update(replay.inputs)
    return seen.intersection(wanted)
