"""What a part of a compiled backward makes and a later one lets go of is carried from the one to the other."""

from __future__ import annotations

from poochplan.profiler.capture.op_blocks import Event, Taker, carried_in, taken_in
from poochplan.runtime.arena.library import BIRTH, DEATH, MARK


def _birth(block: int, size_bytes: int) -> Event:
    return BIRTH, block, size_bytes, 0


def _death(block: int, size_bytes: int) -> Event:
    return DEATH, block, size_bytes, 0


FIRST = [_birth(1, 8192), _birth(2, 4096), _death(2, 4096), _birth(3, 512)]
LAST = [_birth(4, 4096), _death(1, 8192), _birth(5, 4096), _death(5, 4096)]


def test_a_block_that_a_later_part_lets_go_of_is_carried_there_and_an_output_is_not() -> None:
    parts = carried_in([FIRST, LAST], [Taker.PART, Taker.BACKWARD_COMPILED], {3, 4})
    (one,) = parts.carried
    assert (one.block, one.size_bytes, one.made_in, one.let_go_in) == (1, 8192, 0, 1)
    assert parts.events[0] == FIRST
    assert parts.events[1][1] == (MARK, -1, 0, -8192)


def test_the_peaks_of_both_parts_are_those_of_all_their_blocks() -> None:
    parts = carried_in([FIRST, LAST], [Taker.PART, Taker.BACKWARD_COMPILED], {3, 4})
    blocks, first = taken_in(parts.events[0], {3: 0, 1: 1}, 2, Taker.PART)
    assert first + 512 + 8192 == 8192 + 4096, "at its tick its outputs count too, the carried block among them"
    assert [one.output for one in blocks] == [1, -1, 0]
    _, last = taken_in(parts.events[1], {4: 0}, 1, Taker.BACKWARD_COMPILED)
    assert last + 4096 == 8192 + 4096, "the carried block is live as it begins, and at no later tick"


def test_what_outlives_its_backward_is_not_carried() -> None:
    parts = carried_in([[_birth(1, 8192)], []], [Taker.PART, Taker.BACKWARD_COMPILED], set())
    assert parts.carried == []


def test_the_next_backward_has_no_part_in_it() -> None:
    takers = [Taker.PART, Taker.BACKWARD_COMPILED, Taker.PART, Taker.BACKWARD_COMPILED]
    parts = carried_in([[_birth(1, 8192)], [], [_death(1, 8192)], []], takers, set())
    assert parts.carried == []
    assert parts.events[2] == [_death(1, 8192)]


def test_other_ops_are_left_as_they_are() -> None:
    assert carried_in([FIRST, LAST], [Taker.OP, Taker.FORWARD_COMPILED], set()).events == [FIRST, LAST]
