"""A problem as flat arrays: all that an evaluation reads.

Few arrays with columns, not many arrays: compiled code hands each one on by itself. Ragged things lie in ``lists``; the
columns ``X`` and ``X_END`` say where.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from poochplan.planner.problem.arrays import Floats, Ints
from poochplan.planner.problem.problem import Problem

from .codes import AHEAD, COMPUTING, NO_LANE

# Columns of Layout.values. Bytes are rounded up to the allocation unit, but for MOVED, what a copy moves.
SIZE, MOVED, BORN, DEATH, FREED, SAVE_POINT, FIRST_USE, PROFILE_VALUE = range(8)
# Where a release is as early as it can be; the first tick at which the bytes could be given up; the value's place in
# the order of these ticks; the value at place i; a random number below 2**40, of which sums tell sets of values apart.
EARLY_POINT, FREES_TICK, RANK, BY_RANK, KEY = range(8, 13)
# In lists: ops and inputs of the value's replay, and the ops that it needs recorded, where recording takes time.
OPS, OPS_END, INPUTS, INPUTS_END, RECORDED, RECORDED_END = range(13, 19)

OUT, IN = 0, 1
"""Columns of ``Layout.copy_s``, and of all that is said for both queues."""

# Columns of Layout.points: its tick, ops completed before it, the value that it uses for the first time (-1: none), its
# index among the use points (-1: a save point), save points before it.
TICK, OP, FIRST_USE_OF, USE, SAVES_BEFORE = range(5)

USE_POINT, USE_TICK = 0, 1
BASE, LESS = 0, 1
"""Columns of ``Layout.ticks``: bytes that no decision moves, and how many fewer there are in the first step."""

# Columns of Layout.ops; ON and OFF are the save points that switch recording on and off around it (-1: the begin).
WORKSPACE, OUTPUTS, OUTPUTS_END, TEMPORARIES, TEMPORARIES_END, ON, OFF = range(7)
# Columns of Layout.op_s; BEFORE_S is the launching thread's and WORK_S the compute stream's, before the op.
DURATION_S, LAUNCH_S, BEFORE_S, WORK_S = range(4)

DUPLEX, INTERFERENCE_OUT, INTERFERENCE_IN, OUT_S, FETCH_S, RECORD_S, REPLAY_S, STEP_S = range(8)
"""Of ``Layout.rates``: the link's, then the launching thread's (``HostLane``), then the step that keeps everything."""
KIND, LAST_SAVE_OP, NEVER, NEVER_END, UNUSED, UNUSED_END = range(6)
"""Of ``Layout.facts``: the thread's kind, where recording ends, and in ``lists`` the values that backward never uses:
those with a replay, what holds another after it, and all of them."""

_COLUMNS: Final = 19


class Layout(NamedTuple):
    """One problem; int64 and seconds in float64, (rows, columns)."""

    values: Ints
    copy_s: Floats
    """Per saved value: seconds of its copies, alone on the link."""
    points: Ints
    uses: Ints
    ticks: Ints
    ops: Ints
    op_s: Floats
    """One row more than ops: the last holds for what comes behind them."""
    lists: Ints
    value_bytes: Ints
    """Per value of the profile."""
    rates: Floats
    facts: Ints


class _Lists:
    """What becomes ``Layout.lists``."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def add(self, items: Iterable[int]) -> tuple[int, int]:
        """Begin and end."""
        begin = len(self.items)
        self.items.extend(items)
        return begin, len(self.items)


def layout_of(problem: Problem) -> Layout:
    """The arrays of a problem; they are copies."""
    lists = _Lists()
    values, ops, facts = _values(problem, lists), _ops(problem, lists), _facts(problem, lists)
    count = problem.value_count
    return Layout(
        values=values,
        copy_s=np.array([(problem.out_seconds(v), problem.in_seconds(v)) for v in range(count)]).reshape(count, 2),
        points=_points(problem),
        uses=_table(problem.use_points, problem.use_ticks),
        ticks=_table(problem.base_bytes, problem.first_step_less_bytes),
        ops=ops,
        op_s=_op_seconds(problem),
        lists=np.array(lists.items, dtype=np.int64),
        value_bytes=np.array(problem.replay.value_bytes, dtype=np.int64),
        rates=_rates(problem),
        facts=facts,
    )


def _values(problem: Problem, lists: _Lists) -> Ints:
    count, graph, lane = problem.value_count, problem.replay, problem.lane
    save_tick, numbers = np.array(problem.save_ticks), np.arange(count)
    frees = np.maximum(save_tick, problem.forward_death + 1)
    by_rank = np.lexsort((numbers, frees))
    early = np.maximum(np.searchsorted(save_tick, problem.forward_death + 1, side="right") - 1, numbers)
    found = np.zeros((count, _COLUMNS), dtype=np.int64)
    found[:, SIZE], found[:, MOVED] = problem.rounded_bytes, problem.size_bytes
    found[:, BORN], found[:, DEATH], found[:, FREED] = problem.born, problem.forward_death, problem.freed
    found[:, SAVE_POINT], found[:, FIRST_USE] = problem.save_points, problem.first_use_point
    found[:, PROFILE_VALUE] = graph.value_of
    found[:, EARLY_POINT] = np.array(problem.save_points)[early]
    found[:, FREES_TICK] = frees
    found[by_rank, RANK] = numbers
    found[:, BY_RANK] = by_rank
    found[:, KEY] = np.random.default_rng(0).integers(0, 2**40, count)
    is_paid_for = lane is not None and lane.record_s > 0
    for value, replay in enumerate(graph.replays):
        if replay is not None:
            found[value, [OPS, OPS_END]] = lists.add(replay.ops)
            found[value, [INPUTS, INPUTS_END]] = lists.add(replay.inputs)
            recorded = sorted(graph.to_record(replay.ops)) if is_paid_for else []
            found[value, [RECORDED, RECORDED_END]] = lists.add(recorded)
    return found


def _points(problem: Problem) -> Ints:
    count = len(problem.point_ticks)
    found = _table(problem.point_ticks, problem.point_ops, [-1] * count, [-1] * count, [0] * count)
    for value, point in enumerate(problem.first_use_point):
        if point >= 0:
            found[point, FIRST_USE_OF] = value
    found[list(problem.use_points), USE] = np.arange(len(problem.use_points))
    is_save = np.array(problem.point_is_save, dtype=np.int64)
    found[:, SAVES_BEFORE] = np.cumsum(is_save) - is_save
    return found


def _ops(problem: Problem, lists: _Lists) -> Ints:
    graph, save_op = problem.replay, problem.save_op_array
    numbers = np.arange(len(graph.op_seconds))
    outputs = np.array([lists.add(outputs) for outputs in graph.op_outputs], dtype=np.int64).reshape(-1, 2)
    temporaries = np.array([lists.add(values) for values in graph.op_temporaries], dtype=np.int64).reshape(-1, 2)
    on = np.searchsorted(save_op, numbers, side="left") - 1
    off = np.searchsorted(save_op, numbers, side="right")
    return _table(graph.op_workspace_bytes, *outputs.T, *temporaries.T, on, off)


def _op_seconds(problem: Problem) -> Floats:
    lane, durations = problem.lane, problem.replay.op_seconds
    found = np.zeros((len(durations) + 1, 4))
    found[:-1, DURATION_S] = durations
    found[:, WORK_S] = problem.work_before_op_s
    if lane is not None:
        found[:-1, LAUNCH_S] = lane.launch_s
        found[:, BEFORE_S] = lane.before_op_s
    return found


def _rates(problem: Problem) -> Floats:
    link, lane = problem.link, problem.lane
    of_lane = (0.0, 0.0, 0.0, 0.0) if lane is None else (lane.out_s, lane.fetch_s, lane.record_s, lane.replay_s)
    return np.array([link.duplex, link.interference_out, link.interference_in, *of_lane, problem.step_s])


def _facts(problem: Problem, lists: _Lists) -> Ints:
    lane = problem.lane
    kind = NO_LANE if lane is None else COMPUTING if lane.is_compute else AHEAD
    never = sorted(
        (
            (replay.ops[-1], value)
            for value, replay in enumerate(problem.replay.replays)
            if replay is not None and problem.first_use_point[value] < 0
        ),
        reverse=True,
    )
    last_save_op = 0 if lane is None else lane.last_save_op
    unused = [value for value, point in enumerate(problem.first_use_point) if point < 0]
    return np.array([kind, last_save_op, *lists.add(value for _, value in never), *lists.add(unused)], dtype=np.int64)


def _table(*columns: Iterable[int] | Ints) -> Ints:
    """Columns beside each other."""
    arrays = [np.array(c if isinstance(c, np.ndarray) else list(c), dtype=np.int64) for c in columns]
    return np.ascontiguousarray(np.stack(arrays, axis=1))
