"""A problem as flat arrays: all that an evaluation reads.

The columns of each array are the fields of its struct in ``native/problem.h``, which says what they are. Ragged things
lie in ``lists``; two columns say where.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from poochplan.formats.occupancy import Floats, Ints
from poochplan.planner.simulator.problem import Problem

NO_THREAD, COMPUTING, AHEAD = range(3)
"""Kinds of launching thread: none known, one that is the compute stream, one that works ahead of the device."""


class FlatProblem(NamedTuple):
    """One problem; int64 and seconds in float64, (rows, columns)."""

    values: Ints
    copy_s: Floats
    points: Ints
    uses: Ints
    ticks: Ints
    ops: Ints
    op_s: Floats
    lists: Ints
    value_bytes: Ints
    rates: Floats
    facts: Ints


class _Lists:
    """What becomes ``FlatProblem.lists``."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def add(self, items: Iterable[int]) -> tuple[int, int]:
        """Begin and end."""
        begin = len(self.items)
        self.items.extend(items)
        return begin, len(self.items)


def flat_problem_of(problem: Problem) -> FlatProblem:
    """The arrays of a problem; they are copies."""
    lists = _Lists()
    values, ops, facts = _values(problem, lists), _ops(problem, lists), _facts(problem, lists)
    count = problem.value_count
    return FlatProblem(
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
    count, graph, cost = problem.value_count, problem.replay, problem.launch_cost
    save_tick, numbers = np.array(problem.save_ticks), np.arange(count)
    frees = np.maximum(save_tick, problem.forward_death + 1)
    by_rank = np.lexsort((numbers, frees))
    early = np.maximum(np.searchsorted(save_tick, problem.forward_death + 1, side="right") - 1, numbers)
    is_paid_for = cost is not None and cost.record_s > 0
    ranges = np.zeros((count, 6), dtype=np.int64)
    for value, replay in enumerate(graph.replays):
        if replay is not None:
            recorded = sorted(graph.to_record(replay.ops)) if is_paid_for else []
            ranges[value] = [*lists.add(replay.ops), *lists.add(replay.inputs), *lists.add(recorded)]
    return _table(
        problem.rounded_bytes,
        problem.size_bytes,
        problem.born,
        problem.forward_death,
        problem.freed,
        problem.save_points,
        problem.first_use_point,
        graph.value_of,
        np.array(problem.save_points)[early],
        frees,
        np.argsort(by_rank),
        by_rank,
        np.random.default_rng(0).integers(0, 2**40, count),
        *ranges.T,
    )


def _points(problem: Problem) -> Ints:
    count = len(problem.point_ticks)
    first_use_of, use = np.full((2, count), -1, dtype=np.int64)
    for value, point in enumerate(problem.first_use_point):
        if point >= 0:
            first_use_of[point] = value
    use[list(problem.use_points)] = np.arange(len(problem.use_points))
    is_save = np.array(problem.point_is_save, dtype=np.int64)
    return _table(problem.point_ticks, problem.point_ops, first_use_of, use, np.cumsum(is_save) - is_save)


def _ops(problem: Problem, lists: _Lists) -> Ints:
    graph, save_op = problem.replay, problem.save_op_array
    numbers = np.arange(len(graph.op_seconds))
    outputs = np.array([lists.add(outputs) for outputs in graph.op_outputs], dtype=np.int64).reshape(-1, 2)
    temporaries = np.array([lists.add(values) for values in graph.op_temporaries], dtype=np.int64).reshape(-1, 2)
    on = np.searchsorted(save_op, numbers, side="left") - 1
    off = np.searchsorted(save_op, numbers, side="right")
    return _table(graph.op_workspace_bytes, *outputs.T, *temporaries.T, on, off)


def _op_seconds(problem: Problem) -> Floats:
    cost, durations = problem.launch_cost, problem.replay.op_seconds
    found = np.zeros((len(durations) + 1, 4))
    found[:-1, 0] = durations
    found[:, 3] = problem.work_before_op_s
    if cost is not None:
        found[:-1, 1] = cost.launch_s
        found[:, 2] = cost.before_op_s
    return found


def _rates(problem: Problem) -> Floats:
    link, cost = problem.link, problem.launch_cost
    of_thread = (0.0, 0.0, 0.0, 0.0) if cost is None else (cost.out_s, cost.fetch_s, cost.record_s, cost.replay_s)
    return np.array([link.duplex, link.interference_out, link.interference_in, *of_thread, problem.step_s])


def _facts(problem: Problem, lists: _Lists) -> Ints:
    cost = problem.launch_cost
    kind = NO_THREAD if cost is None else COMPUTING if cost.is_compute else AHEAD
    never = sorted(
        (
            (replay.ops[-1], value)
            for value, replay in enumerate(problem.replay.replays)
            if replay is not None and problem.first_use_point[value] < 0
        ),
        reverse=True,
    )
    last_save_op = 0 if cost is None else cost.last_save_op
    return np.array([kind, last_save_op, *lists.add(value for _, value in never)], dtype=np.int64)


def _table(*columns: Iterable[int] | Ints) -> Ints:
    """Columns beside each other."""
    arrays = [np.array(c if isinstance(c, np.ndarray) else list(c), dtype=np.int64) for c in columns]
    return np.ascontiguousarray(np.stack(arrays, axis=1))
