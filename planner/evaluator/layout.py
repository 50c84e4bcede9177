"""A problem as flat arrays: all that an evaluation reads. Ragged things are a ``start`` and what lies between two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from poochplan.planner.problem.arrays import Floats, Ints
from poochplan.planner.problem.problem import Problem

from .codes import AHEAD, COMPUTING, NO_LANE


class Points(NamedTuple):
    """Per point of the runtime's clock."""

    tick: Ints
    op: Ints
    """Ops completed before it."""
    work_s: Floats
    """Seconds of the compute stream before it when everything is kept."""
    first_use_of: Ints
    """The saved value that is used for the first time; else -1."""
    use: Ints
    """Its index among the use points; else -1."""
    saves_before: Ints
    """Save points that come before it."""


class Values(NamedTuple):
    """Per saved value."""

    size_bytes: Ints
    """Rounded up to the allocation unit."""
    moved_bytes: Ints
    born: Ints
    death: Ints
    freed: Ints
    save_point: Ints
    first_use_point: Ints
    early_point: Ints
    """Where a release is as early as it can be."""
    frees_tick: Ints
    """The first tick at which its bytes could be given up."""
    rank: Ints
    """Its place in the order of ``frees_tick``."""
    by_rank: Ints
    """The value at each such place."""
    out_s: Floats
    """Seconds of its copy out, alone on the link."""
    in_s: Floats


class Uses(NamedTuple):
    """Use points in order, and the values by their first ones."""

    point: Ints
    tick: Ints
    order: Ints


class Replays(NamedTuple):
    """What each saved value's replay runs and starts from, and what its ops take."""

    op_start: Ints
    ops: Ints
    input_start: Ints
    inputs: Ints
    never: Ints
    """Values with a replay that backward never uses, what holds another after it."""
    value_of: Ints
    """Per saved value: its value in the profile."""
    op_s: Floats
    workspace_bytes: Ints
    output_start: Ints
    outputs: Ints
    temporary_start: Ints
    temporaries: Ints
    value_bytes: Ints
    key: Ints
    """Per saved value: a random number below 2**40; a set's hash is the sum of its members'."""


class Rates(NamedTuple):
    """The link's shares, and the launching thread's seconds (``HostLane``)."""

    duplex: float
    interference_out: float
    interference_in: float
    kind: int
    """Of the thread: ``NO_LANE``, ``COMPUTING`` or ``AHEAD``."""
    out_s: float
    fetch_s: float
    record_s: float
    replay_s: float
    launch_s: Floats
    before_op_s: Floats
    last_save_op: int
    save_op: Ints
    """Ops completed before each save point."""
    on: Ints
    """Per op: the save point that switches recording on for it; -1 where only the start of the step does."""
    off: Ints
    """Per op: the first save point behind it; the number of save points where there is none."""
    recorded_start: Ints
    recorded: Ints
    """Per saved value: the ops that its replay needs recorded; empty where recording takes nothing."""


class Layout(NamedTuple):
    """One problem."""

    tick_count: int
    value_count: int
    step_s: float
    work_before_op_s: Floats
    base_bytes: Ints
    first_step_less_bytes: Ints
    points: Points
    values: Values
    uses: Uses
    replays: Replays
    rates: Rates


def layout_of(problem: Problem) -> Layout:
    """The arrays of a problem; they are copies."""
    return Layout(
        tick_count=problem.tick_count,
        value_count=problem.value_count,
        step_s=problem.step_s,
        work_before_op_s=_floats(problem.work_before_op_s),
        base_bytes=_ints(problem.base_bytes),
        first_step_less_bytes=_ints(problem.first_step_less_bytes),
        points=_points(problem),
        values=_values(problem),
        uses=_uses(problem),
        replays=_replays(problem),
        rates=_rates(problem),
    )


def _points(problem: Problem) -> Points:
    count = len(problem.point_ticks)
    first_use_of, use = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    for value, point in enumerate(problem.first_use_point):
        if point >= 0:
            first_use_of[point] = value
    use[list(problem.use_points)] = np.arange(len(problem.use_points))
    is_save = _ints(problem.point_is_save)
    return Points(
        tick=_ints(problem.point_ticks),
        op=_ints(problem.point_ops),
        work_s=_floats(problem.point_work_list),
        first_use_of=first_use_of,
        use=use,
        saves_before=np.cumsum(is_save) - is_save,
    )


def _values(problem: Problem) -> Values:
    count = problem.value_count
    death, save_tick = _ints(problem.forward_death), _ints(problem.save_ticks)
    frees = np.maximum(save_tick, death + 1)
    by_rank = _ints(sorted(range(count), key=lambda value: (int(frees[value]), value)))
    rank = np.empty(count, dtype=np.int64)
    rank[by_rank] = np.arange(count)
    early = np.maximum(np.searchsorted(save_tick, death + 1, side="right") - 1, np.arange(count))
    return Values(
        size_bytes=_ints(problem.rounded_bytes),
        moved_bytes=_ints(problem.size_bytes),
        born=_ints(problem.born),
        death=death,
        freed=_ints(problem.freed),
        save_point=_ints(problem.save_points),
        first_use_point=_ints(problem.first_use_point),
        early_point=_ints(problem.save_points)[early],
        frees_tick=frees,
        rank=rank,
        by_rank=by_rank,
        out_s=_floats(problem.out_seconds(value) for value in range(count)),
        in_s=_floats(problem.in_seconds(value) for value in range(count)),
    )


def _uses(problem: Problem) -> Uses:
    order = sorted((point, value) for value, point in enumerate(problem.first_use_point) if point >= 0)
    return Uses(_ints(problem.use_points), _ints(problem.use_ticks), _ints(value for _, value in order))


def _replays(problem: Problem) -> Replays:
    graph = problem.replay
    op_start, ops = _ragged([() if replay is None else replay.ops for replay in graph.replays])
    input_start, inputs = _ragged([() if replay is None else replay.inputs for replay in graph.replays])
    output_start, outputs = _ragged(graph.op_outputs)
    temporary_start, temporaries = _ragged(graph.op_temporaries)
    never = sorted(
        (
            (replay.ops[-1], value)
            for value, replay in enumerate(graph.replays)
            if replay is not None and problem.first_use_point[value] < 0
        ),
        reverse=True,
    )
    return Replays(
        op_start=op_start,
        ops=ops,
        input_start=input_start,
        inputs=inputs,
        never=_ints(value for _, value in never),
        value_of=_ints(graph.value_of),
        op_s=_floats(graph.op_seconds),
        workspace_bytes=_ints(graph.op_workspace_bytes),
        output_start=output_start,
        outputs=outputs,
        temporary_start=temporary_start,
        temporaries=temporaries,
        value_bytes=_ints(graph.value_bytes),
        key=np.random.default_rng(0).integers(0, 2**40, problem.value_count, dtype=np.int64),
    )


def _rates(problem: Problem) -> Rates:
    link, lane, graph = problem.link, problem.lane, problem.replay
    op_count = len(graph.op_seconds)
    save_op = _ints(problem.save_op_array)
    is_paid_for = lane is not None and lane.record_s > 0
    recorded_start, recorded = _ragged(
        [sorted(graph.to_record(replay.ops)) if replay is not None and is_paid_for else () for replay in graph.replays]
    )
    ops = np.arange(op_count)
    return Rates(
        duplex=float(link.duplex),
        interference_out=float(link.interference_out),
        interference_in=float(link.interference_in),
        kind=NO_LANE if lane is None else COMPUTING if lane.is_compute else AHEAD,
        out_s=0.0 if lane is None else float(lane.out_s),
        fetch_s=0.0 if lane is None else float(lane.fetch_s),
        record_s=0.0 if lane is None else float(lane.record_s),
        replay_s=0.0 if lane is None else float(lane.replay_s),
        launch_s=np.zeros(0) if lane is None else _floats(lane.launch_s),
        before_op_s=np.zeros(0) if lane is None else _floats(lane.before_op_s),
        last_save_op=0 if lane is None else lane.last_save_op,
        save_op=save_op,
        on=_ints(np.searchsorted(save_op, ops, side="left") - 1),
        off=_ints(np.searchsorted(save_op, ops, side="right")),
        recorded_start=recorded_start,
        recorded=recorded,
    )


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Where each row starts in what lies behind each other; one start more than rows."""
    return _ints([0, *np.cumsum([len(row) for row in rows])]), _ints(item for row in rows for item in row)


def _ints(numbers: Iterable[int] | Ints) -> Ints:
    return np.array(numbers if isinstance(numbers, np.ndarray) else list(numbers), dtype=np.int64)


def _floats(numbers: Iterable[float] | Floats) -> Floats:
    return np.array(numbers if isinstance(numbers, np.ndarray) else list(numbers), dtype=np.float64)
