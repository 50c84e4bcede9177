"""How often the ops of replays run, in BOUND: replays share an op only where they are parts of one run.

A run brings back the value that was asked for, its root, and those recomputed values that the root's replay starts
from, directly or through others. Two values are in one run only if one of them, or a third, starts from the other or
from both. So values that nothing starts from never share a run.
"""

from __future__ import annotations

from poochplan.planner.model.fluid import FluidModel
from poochplan.planner.model.linear import Term


def add_runs(model: FluidModel) -> tuple[list[float], list[Term]]:
    """Per value: seconds that its replay takes at least; and the terms of what all replays take at least beyond these.

    An op that several replays share is counted with the largest value of these: in the run that brings it back.
    """
    own = list(model.replay_time)
    groups = dict[tuple[int, ...], float]()
    for op, values in _shared_ops(model).items():
        groups[values] = groups.get(values, 0.0) + model.op_time(op)
    beyond: list[Term] = []
    inputs = _inputs(model)
    for values, seconds in groups.items():
        largest = max(values, key=lambda value: (model.resident[value], -value))
        for value in values:
            own[value] -= seconds if value != largest else 0.0
        beyond += [(_runs_of(model, values, inputs), seconds), (model.recompute[largest], -seconds)]
    return [max(0.0, seconds) for seconds in own], beyond


def _shared_ops(model: FluidModel) -> dict[int, tuple[int, ...]]:
    """Ops that the replays of several values run, of those that backward uses, with these values."""
    users = dict[int, list[int]]()
    for value in model.recompute:
        replay = model.problem.replay.replays[value]
        assert replay is not None
        if model.use_slot[value] < model.slots.count:
            for op in replay.ops:
                users.setdefault(op, []).append(value)
    return {op: tuple(values) for op, values in users.items() if len(values) > 1}


def _inputs(model: FluidModel) -> set[int]:
    """Values that some replay starts from, those of values that are free included."""
    replays = model.problem.replay.replays
    movable = (replays[value] for value in (*model.request.candidates, *model.request.free))
    return {source for replay in movable if replay is not None for source in replay.inputs}


def _runs_of(model: FluidModel, values: tuple[int, ...], inputs: set[int]) -> int:
    """A column no less than the number of runs that the ``values`` need, which all run some op."""
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
    """Those of ``wanted`` that the replay of one of ``roots`` starts from, directly or through others."""
    replays = model.problem.replay.replays
    if not wanted or not roots:
        return set()
    earliest = min(_last_op(model, value) for value in wanted)
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        replay = replays[pending.pop()]
        if replay is None or replay.ops[-1] < earliest:  # what it starts from is complete before its last op
            continue
        pending += [source for source in replay.inputs if source not in seen]
        seen.update(replay.inputs)
    return seen.intersection(wanted)


def _last_op(model: FluidModel, value: int) -> int:
    replay = model.problem.replay.replays[value]
    assert replay is not None
    return replay.ops[-1]
