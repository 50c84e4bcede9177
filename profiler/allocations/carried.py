"""What one part of compiled code makes and a later part lets go of, from a step's log. Pure functions.

A backward that waits for arrivals is several ops, its parts, and so is a forward with save points. Such a block is an
output of the op that makes it, and of the op that lets go of it what dies of other ops' values in it is: there as
it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES
from poochplan.runtime.allocator.allocation_log import BIRTH, DEATH, MARK

from .op_blocks import Event, Taker

_PART_OF = {Taker.FORWARD_PART: Taker.FORWARD_COMPILED, Taker.PART: Taker.BACKWARD_COMPILED}
"""Of which the last part is told as."""


@dataclass
class CarriedBlock:
    """One block; ops are given by their number."""

    block: int
    size_bytes: int
    made_in: int
    let_go_in: int | None = None
    """None where no part lets go of it."""


@dataclass
class Parts:
    """The events of each op, and the blocks that parts carry to each other, in the order of their making."""

    events: list[list[Event]] = field(default_factory=list)
    carried: list[CarriedBlock] = field(default_factory=list)


def carried_in(events_by_op: Iterable[list[Event]], takers: Sequence[Taker], outputs: Collection[int]) -> Parts:
    """Of ops that take as ``takers`` say; ``outputs`` are the blocks in which outputs of ops lie.

    What a part lets go of that an earlier one has made is a mark in its events, as for values from before.
    """
    found = Parts()
    by_direction: dict[Taker, dict[int, CarriedBlock]] = {end: {} for end in _PART_OF.values()}
    for number, (events, taker) in enumerate(zip(events_by_op, takers, strict=True)):
        if taker is Taker.OP:
            found.events.append(events)
            continue
        alive = by_direction[_PART_OF.get(taker, taker)]
        found.events.append([_seen_from(event, number, alive) for event in events])
        if taker not in _PART_OF:
            alive.clear()
            continue
        left = [CarriedBlock(block, size, number) for block, size in _left_behind(events) if block not in outputs]
        alive |= {one.block: one for one in left}
        found.carried += left
    found.carried = [one for one in found.carried if one.let_go_in is not None]
    return found


def _seen_from(event: Event, number: int, alive: dict[int, CarriedBlock]) -> Event:
    kind, block, _, _ = event
    one = alive.pop(block, None) if kind == DEATH else None
    if one is None:
        return event
    one.let_go_in = number
    return MARK, -1, 0, -one.size_bytes


def _left_behind(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Blocks that are born in these events and do not die in them, and their bytes."""
    alive: dict[int, int] = {}
    for kind, block, size_bytes, _ in events:
        if kind == BIRTH and size_bytes >= LEAST_COUNTED_BYTES:
            alive[block] = size_bytes
        elif kind == DEATH:
            alive.pop(block, None)
    return list(alive.items())
