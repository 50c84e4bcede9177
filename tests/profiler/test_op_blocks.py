"""What the log of a step says: the blocks that each op takes, those that parts of compiled code pass on, and strays."""

from __future__ import annotations

import pytest

from poochplan.profiler.capture.op_blocks import (
    BEGINS,
    ENDS,
    POINT,
    LogEvent,
    Taker,
    bytes_beside_ops,
    carried_in,
    events_by_op,
    events_of_trace,
    stray_values,
    strays_in,
    taken_in,
)
from poochplan.runtime.arena.library import BIRTH, DEATH, MARK


def born(block: int, size_bytes: int) -> LogEvent:
    return BIRTH, block, size_bytes, 0


def died(block: int, size_bytes: int) -> LogEvent:
    return DEATH, block, size_bytes, 0


def mark(value: int) -> LogEvent:
    return MARK, -1, 0, value


OP, POINTED = (mark(BEGINS), mark(ENDS)), mark(POINT)
TOO_SMALL = [born(1, 4000), born(2, 600), died(1, 4000), born(3, 500), died(2, 600), died(3, 500)]
FIRST = [born(1, 8192), born(2, 4096), died(2, 4096), born(3, 512)]
LAST = [born(4, 4096), died(1, 8192), born(5, 4096), died(5, 4096)]
PARTS = [(Taker.BACKWARD, True), (Taker.BACKWARD, False)]


@pytest.mark.parametrize(
    ("log", "taker", "output", "blocks", "workspace_bytes"),  # the blocks: bytes, output, until
    [
        pytest.param(
            [born(0, 8192), *TOO_SMALL, born(4, 5000), died(0, 8192)],
            Taker.OP,
            4,
            [(8192, -1, 2), (5000, 0, -1), (3584, -1, 4), (1536, -1, 4)],
            8192,
            id="what is too small for a place behind the others",
        ),
        pytest.param(
            [born(1, 8192), mark(-10240), born(2, 4096), died(1, 8192)],
            Taker.BACKWARD,
            2,
            [(10240, -1, 2), (8192, -1, 3), (4096, 0, -1)],
            8192 + 10240 - 4096,
            id="what is freed in a backward until then",
        ),
        pytest.param(
            [mark(-10240), born(1, 4096), born(2, 4096), died(1, 4096)],
            Taker.FORWARD,
            2,
            [(4096, -1, 2), (4096, 0, -1)],
            0,
            id="what is freed in a forward at its tick, and not as workspace",
        ),
        pytest.param(
            [died(9, 10240), mark(-10240), born(2, 4096)],
            Taker.BACKWARD,
            2,
            [(10240, -1, 1), (4096, 0, -1)],
            10240 - 4096,
            id="what was there before compiled code once",
        ),
    ],
)
def test_an_op_has(
    log: list[LogEvent], taker: Taker, output: int, blocks: list[tuple[int, ...]], workspace_bytes: int
) -> None:
    taken = taken_in(log, {output: 0}, 1, taker)
    assert ([tuple(one) for one in taken.blocks], taken.workspace_bytes) == (blocks, workspace_bytes)


def test_compiled_code_that_runs_within_a_backward_has_its_events_for_itself() -> None:
    log = [mark(BEGINS), born(1, 64), mark(BEGINS), born(2, 64), mark(ENDS), born(3, 64), mark(ENDS)]
    found = [[block for _, block, _, _ in events] for events in events_by_op(log)]
    assert found == [[2], [1, 3]]


# -- from the trace of a GPU's allocator -------------------------------------------------------------------------------


def test_a_trace_is_read_as_a_log_with_what_lies_in_its_blocks() -> None:
    marked = [("alloc", 0, 61), ("free_requested", 0, 61), ("free_completed", 0, 61)]
    output = [("alloc", 4096, 9000), ("alloc", 8192, 5000), ("free_requested", 8192, 5000)]
    again = [("segment_alloc", 8192, 1 << 21), ("alloc", 8192, 700), ("free_requested", 4096, 9000)]
    trace = [*marked, *output, *marked, *marked, *again, ("free_requested", 1, 12)]
    read = events_of_trace(trace, [BEGINS, ENDS, (4096, 3)], 61)
    assert read is not None
    events, outputs = read
    assert events == [
        mark(BEGINS),
        born(0, 9000),
        born(1, 5000),
        died(1, 5000),
        mark(ENDS),
        born(2, 700),
        died(0, 9000),
    ]
    assert outputs == {0: 3}
    assert taken_in(next(events_by_op(events)), outputs, 4).blocks == ((9000, 3, -1), (5000, -1, 2))


@pytest.mark.parametrize("marks", [[], [BEGINS, ENDS]], ids=["fewer", "more"])
def test_a_trace_with_another_number_of_marks_is_not_read(marks: list[int]) -> None:
    assert events_of_trace([("alloc", 0, 61)], marks, 61) is None


# -- of parts of compiled code ---------------------------------------------------------------------------------------


def test_a_block_that_a_later_part_lets_go_of_is_carried_there_and_an_output_is_not() -> None:
    logs, carried = carried_in([FIRST, LAST], PARTS, {3, 4})
    assert carried == [(1, 8192, 0, 1)]  # the block, its bytes, and the parts that make it and let go of it
    assert logs == [FIRST, [LAST[0], mark(-8192), *LAST[2:]]]
    blocks, first = taken_in(logs[0], {3: 0, 1: 1}, 2, Taker.BACKWARD)
    assert first + 512 + 8192 == 8192 + 4096, "at its tick its outputs count too, the carried block among them"
    assert [one.output for one in blocks] == [1, -1, 0]
    _, last = taken_in(logs[1], {4: 0}, 1, Taker.BACKWARD)
    assert last + 4096 == 8192 + 4096, "the carried block is live as it begins, and at no later tick"


def test_what_outlives_its_backward_is_not_carried_and_the_next_one_has_no_part_in_it() -> None:
    logs = [[born(1, 8192)], [], [died(1, 8192)], []]
    assert carried_in(logs, PARTS * 2, set()) == (logs, [])


def test_other_ops_are_left_as_they_are() -> None:
    assert carried_in([FIRST, LAST], [(Taker.OP, False), (Taker.FORWARD, False)], set()) == ([FIRST, LAST], [])


# -- between ops -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "op_ticks", "life"),  # its op, its first tick and its last
    [
        pytest.param(
            [*OP, born(7, 5000), POINTED, *OP, *OP, died(7, 5000), *OP],
            [0, 2, 3, 4],
            (0, 1, 3),
            id="between the ops and points that the log has",
        ),
        pytest.param(
            [born(1, 5000), *OP, mark(BEGINS), died(1, 5000), mark(ENDS), *OP],
            [0, 1, 2],
            (-1, 0, 1),
            id="up to the op inside which it dies",
        ),
        pytest.param([*OP, born(1, 5000), *OP], [0, 1], (0, 1, 1), id="to the end if nobody gives it back"),
        pytest.param([*OP, *OP, born(1, 5000)], [0, 1], (1, 1, 1), id="at the last tick if taken behind it"),
    ],
)
def test_a_stray_lives(log: list[LogEvent], op_ticks: list[int], life: tuple[int, ...]) -> None:
    (value,) = stray_values(strays_in(log, known=()), op_ticks, op_ticks[-1] + 1)
    assert (value.born, value.born_tick, value.freed) == life


def test_values_and_what_ops_take_themselves_are_no_strays() -> None:
    log = [mark(BEGINS), born(1, 5000), mark(ENDS), born(2, 5000), born(3, 8), *OP]
    assert strays_in(log, known={2}) == []


@pytest.mark.parametrize(
    ("log", "op_ticks", "beside", "values"),  # bytes by op; bytes, first tick and last of each value
    [
        pytest.param(
            [*OP, born(1, 5000), died(1, 5000), *OP], [0, 1], {1: 5120}, [], id="the next op, before which it is gone"
        ),
        pytest.param(
            [*OP, born(1, 5000), died(2, 2048), died(1, 5000), *OP, born(3, 6000), died(4, 64), *OP],
            [0, 1, 2],
            {0: 5120, 1: 6144},
            [(6000, 2, 2)],
            id="the op before, if something else dies later",
        ),
        pytest.param(
            [*OP, born(1, 5000), POINTED, born(2, 6000), POINTED, *OP],
            [0, 3],
            {0: 5120},
            [(5000, 1, 3), (6000, 1, 3)],
            id="what a plan lets go of at a point behind it",
        ),
    ],
)
def test_a_stray_counts_with(
    log: list[LogEvent], op_ticks: list[int], beside: dict[int, int], values: list[tuple[int, ...]]
) -> None:
    strays = strays_in(log, known=())
    assert bytes_beside_ops(strays) == beside
    found = stray_values(strays, op_ticks, op_ticks[-1] + 1)
    assert [(value.size_bytes, value.born_tick, value.freed) for value in found] == values


def test_small_strays_of_one_lifetime_are_one_value_and_large_ones_their_own() -> None:
    births = [born(number, size) for number, size in enumerate([100, 200, 5000, 6000])]
    values = stray_values(strays_in([*OP, *births, *OP], known=()), op_ticks=[0, 1], tick_count=2)
    assert sorted(value.size_bytes for value in values) == [1024, 5000, 6000]
    assert len({value.name for value in values}) == 3
