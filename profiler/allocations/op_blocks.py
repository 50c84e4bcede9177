"""From the events that a log has of one op: the blocks that it takes, and its workspace. Pure functions.

The events are those of ``AllocationLog`` between the marks before and behind the op. Blocks count as the device's
allocator is asked to count them: those of less than ``LEAST_COUNTED_BYTES`` nothing, all others rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from poochplan.formats.profile import OpBlock
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, LEAST_PLACED_BYTES, rounded_up
from poochplan.runtime.allocator.allocation_log import BIRTH, DEATH, MARK, Table

BEGINS, ENDS, POINT = 1, 0, 2
"""Marks before and behind an op, and behind a point of the runtime's clock. Negative ones are bytes that are freed
in compiled code where the log does not see it: of a value that was there before, which lies in a copy."""

Event = tuple[int, int, int, int]
"""Kind, block, bytes, value, as the log has them."""


class Taker(Enum):
    """Who takes the blocks; it decides what is live at the op's tick of what dies while it runs."""

    OP = "op"
    FORWARD_COMPILED = "forward of compiled code"
    """What dies in it is live at its tick."""
    FORWARD_PART = "part of a compiled forward, behind which others come"
    """The same."""
    BACKWARD_COMPILED = "backward of compiled code"
    """What dies in it was let go of at a tick before, although it is there when the code begins. A node of a backward
    that only hooks look at takes what it takes likewise."""
    PART = "part of a compiled backward, behind which others come"
    """The same."""


class Taken(NamedTuple):
    """What one op takes."""

    blocks: tuple[OpBlock, ...]
    """Small ones aside; empty where they are its outputs in their order."""
    workspace_bytes: int
    """Most bytes beyond those of its outputs and of what else is live at its tick."""


def taken_in(events: Iterable[Event], outputs: Mapping[int, int], output_count: int, taker: Taker = Taker.OP) -> Taken:
    """What an op with that many outputs takes; ``outputs`` says by block which of them lies in it."""
    own = list(_of_taker(events, taker))
    return Taken(_blocks(own, outputs, output_count, taker), _workspace_bytes(own, taker))


def counted_bytes(size_bytes: int) -> int:
    """What a block of that size counts."""
    return rounded_up(size_bytes) if size_bytes >= LEAST_COUNTED_BYTES else 0


def events_by_op(events: Table) -> Iterator[list[Event]]:
    """The events between the two marks of each op, in the order of their ends.

    Where a checkpoint has a compiled forward run again within a compiled backward, its events are its own alone.
    """
    running: list[list[Event]] = []
    for event in events.tolist():
        kind, _, _, value = event
        if kind == MARK and value == BEGINS:
            running.append([])
        elif kind == MARK and value == ENDS:
            yield running.pop()
        elif running:
            running[-1].append(event)


def _of_taker(events: Iterable[Event], taker: Taker) -> Iterator[Event]:
    """Of compiled code births, deaths of what is born in it, and marks of what else is freed; else births, deaths."""
    born: set[int] = set()
    for event in events:
        kind, block, _, value = event
        if kind == BIRTH:
            born.add(block)
        is_own = block in born or (kind == DEATH and taker is Taker.OP)
        if is_own or (kind == MARK and value < 0 and taker is not Taker.OP):
            yield event


def _workspace_bytes(events: Iterable[Event], taker: Taker) -> int:
    live = most = 0
    for kind, _, size_bytes, value in events:
        if kind == BIRTH:
            live += counted_bytes(size_bytes)
            most = max(most, live)
        elif kind == DEATH:
            live -= counted_bytes(size_bytes)
        else:
            live -= counted_bytes(-value)
    if taker in (Taker.FORWARD_COMPILED, Taker.FORWARD_PART):
        live += sum(counted_bytes(-value) for kind, _, _, value in events if kind == MARK)
    return max(0, most - live)


def _blocks(
    events: Iterable[Event], outputs: Mapping[int, int], output_count: int, taker: Taker
) -> tuple[OpBlock, ...]:
    """In the order of the taking. Before them, of a compiled backward, what was there and is freed in it."""
    is_backward = taker in (Taker.BACKWARD_COMPILED, Taker.PART)
    freed = [-value for kind, _, _, value in events if kind == MARK] if is_backward else []
    blocks = [OpBlock(size_bytes, -1, -1) for size_bytes in freed if size_bytes >= LEAST_PLACED_BYTES]
    held = iter(range(len(blocks)))
    born: dict[int, int] = {}
    for kind, block, size_bytes, value in events:
        output = outputs.get(block, -1)
        if kind == BIRTH and (output >= 0 or size_bytes >= LEAST_PLACED_BYTES):
            born[block] = len(blocks)
            blocks.append(OpBlock(size_bytes, output, -1))
        elif kind == DEATH and block in born:
            _ends(blocks, born[block])
        elif kind == MARK and is_backward and -value >= LEAST_PLACED_BYTES:
            _ends(blocks, next(held))
    is_plain = [one.output for one in blocks] == list(range(output_count))
    return () if is_plain else tuple(blocks)


def _ends(blocks: list[OpBlock], place: int) -> None:
    taken = blocks[place]
    blocks[place] = OpBlock(taken.size_bytes, taken.output, len(blocks))
