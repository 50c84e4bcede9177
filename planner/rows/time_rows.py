"""The rows of time: the step takes longer by each replay, and on the CPU by each swap."""

from __future__ import annotations

from poochplan.planner.model.fluid import FluidModel
from poochplan.planner.model.linear import Term


def add_time(model: FluidModel) -> None:
    """Time is added for each replay, where it runs.

    PLAN has it run at the slot of its return. BOUND lets it run at any use point up to there: of the time added since
    backward began, the replays so far take their part, and all of them take theirs in the end.
    """
    own, shared_ops = _replay_costs(model)
    jumps = _replay_jumps(model, own)
    if not model.is_bound:
        for slot, terms in jumps.items():
            model.linear.row([(model.extra[slot], 1.0), *((c, -seconds) for c, seconds in terms)], low=0)
        return
    idle: int | None = None
    since = model.slots.first_backward
    for slot in sorted(jumps):
        now = model.linear.column(model.longest)
        terms = [(now, 1.0), *jumps[slot], *((extra, -1.0) for extra in model.extra[since : slot + 1])]
        if idle is not None:
            terms.append((idle, -1.0))
        model.linear.row(terms, low=0, high=0)
        idle, since = now, slot + 1
    if shared_ops or model.out_s or model.fetch_s:
        _add_totals(model, own, shared_ops)


def _replay_jumps(model: FluidModel, own: list[float]) -> dict[int, list[Term]]:
    """Per slot: the seconds of the replays that are done by it, and were not by the slot of the return before."""
    jumps = dict[int, list[Term]]()
    for value, column in model.recompute.items():
        if model.use_slot[value] == model.slots.count:
            continue
        before: int | None = None
        returns = [(early.slot, early.replayed) for early in model.early.get(value, ())]
        for slot, now in [*returns, (model.use_slot[value], column)]:
            assert now is not None
            terms = jumps.setdefault(slot, [])
            terms.append((now, own[value]))
            if before is not None:
                terms.append((before, -own[value]))
            before = now
    return jumps


def _replay_costs(model: FluidModel) -> tuple[list[float], dict[int, list[int]]]:
    """Seconds of each value's own replay, and for BOUND the ops that several replays run, which may run once."""
    if not model.is_bound:
        return model.replay_time, {}
    problem = model.problem
    users = dict[int, list[int]]()
    for value in model.recompute:
        replay = problem.replay.replays[value]
        assert replay is not None
        if model.use_slot[value] < model.slots.count:
            for op in replay.ops:
                users.setdefault(op, []).append(value)
    shared = {op: values for op, values in users.items() if len(values) > 1}
    own = list(model.replay_time)
    for op, values in shared.items():
        for value in values:
            own[value] -= model.op_time(op)
    return [max(0.0, seconds) for seconds in own], shared


def _add_totals(model: FluidModel, own: list[float], shared_ops: dict[int, list[int]]) -> None:
    """All the time added is at least that of all replays, an op that several replays share counted once; and, where the
    thread is the compute stream, that of all swaps besides."""
    linear = model.linear
    groups = dict[tuple[int, ...], float]()
    for op, values in shared_ops.items():
        key = tuple(values)
        groups[key] = groups.get(key, 0.0) + model.op_time(op)
    replays: list[Term] = []
    for value, column in model.recompute.items():
        if model.use_slot[value] < model.slots.count:
            replays.append((column, -own[value]))
    for users, seconds in groups.items():
        is_run = linear.column(1.0)
        for value in users:
            linear.row([(is_run, 1.0), (model.recompute[value], -1.0)], low=0)
        replays.append((is_run, -seconds))
    in_backward: list[Term] = [(extra, 1.0) for extra in model.extra[model.slots.first_backward :]]
    if shared_ops:
        linear.row([*in_backward, *replays], low=0)
    if model.out_s or model.fetch_s:
        swaps: list[Term] = [(column, -model.swap_time(value)) for value, column in model.swap.items()]
        linear.row([*((extra, 1.0) for extra in model.extra), *replays, *swaps], low=0)
