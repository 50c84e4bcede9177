"""Facts from a step's log: the blocks that each op takes, its workspace, and memory taken between ops. Pure functions.

The events of an op are those of ``AllocationLog`` between the marks before and after it. Blocks count in the device
allocator's units: those of less than ``LEAST_COUNTED_BYTES`` count nothing, all others are rounded up.

A backward with deferred unpacks is several ops, its parts, and so is a forward with save points. A block that one part
makes and a later one releases is an output of the former. Other values that die in the latter exist when it begins.

Strays are taken between ops and are no values, such as the generator states of a checkpoint. Points of the runtime's
clock are marked too. So it is known between which two ticks a stray was taken, and between which it was given back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import count
from typing import NamedTuple

from poochplan.formats.occupancy import held_until
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, OpBlock, Value
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, LEAST_PLACED_BYTES, counted_bytes
from poochplan.runtime.arena.library import BIRTH, DEATH, MARK

BEGINS, ENDS, POINT = 1, 0, 2
"""Marks before and after an op, and after a point of the runtime's clock. Negative marks are bytes freed in compiled
code where the log does not see it: those of a value from before, which lies in a copy."""

LogEvent = tuple[int, int, int, int]
"""Kind, block, bytes and value, as in the log."""
STEM = "step/between ops"


class Taker(Enum):
    """Who takes the blocks. It decides which of the blocks that die while the op runs are live at its tick."""

    OP = "op"
    FORWARD = "forward of compiled code"
    """A block that dies in it is live at its tick."""
    BACKWARD = "backward of compiled code"
    """A block that dies in it was released at an earlier tick, although it exists when the code begins. The same holds
    for a node of a backward that only hooks observe."""


class Taken(NamedTuple):
    """The memory that one op takes."""

    blocks: tuple[OpBlock, ...]
    """Small ones are combined into a few, after the others; empty if the blocks are its outputs in their order, and the
    workspace.
    """
    workspace_bytes: int
    """Most bytes beyond those of its outputs and of other memory that is live at its tick."""


def taken_in(
    events: Iterable[LogEvent], outputs: Mapping[int, int], output_count: int, taker: Taker = Taker.OP
) -> Taken:
    """The memory of an op with that many outputs; ``outputs`` says which output lies in which block."""
    own = list(_of_taker(events, taker))
    blocks, workspace_bytes = _blocks(own, outputs, taker), _workspace_bytes(own, taker)
    if [one.output for one in blocks] == list(range(output_count)):
        return Taken((), workspace_bytes)
    most_bytes = LEAST_PLACED_BYTES - ALLOCATION_UNIT_BYTES  # as few as possible, each too small for a place
    small_bytes = min(workspace_bytes, _small_bytes(own, outputs))
    sizes = [min(most_bytes, small_bytes - first) for first in range(0, small_bytes, most_bytes)]
    small = [OpBlock(size_bytes, -1, len(blocks) + len(sizes)) for size_bytes in sizes]
    return Taken((*blocks, *small), workspace_bytes)


def events_of_trace(
    trace: Iterable[tuple[str, int, int]], marks: Sequence[int | tuple[int, int]], mark_bytes: int
) -> tuple[list[LogEvent], dict[int, int]] | None:
    """A log, and by block the output that lies in it, from what a GPU's allocator has traced: actions, addresses and
    bytes. The n-th request of ``mark_bytes`` is the n-th mark; an address and an output say what lies in the block
    there. None if there are not as many of one as of the other.
    """
    events, outputs = list[LogEvent](), dict[int, int]()
    numbers, alive, seen = count(), dict[int, tuple[int, int]](), 0
    for action, address, size_bytes in trace:
        if size_bytes == mark_bytes:
            if action == "alloc":
                mark = marks[seen] if seen < len(marks) else 0
                seen += 1
                if isinstance(mark, int):
                    events.append((MARK, -1, 0, mark))
                elif mark[0] in alive:
                    outputs[alive[mark[0]][0]] = mark[1]
        elif action == "alloc":
            alive[address] = next(numbers), size_bytes
            events.append((BIRTH, *alive[address], 0))
        elif action == "free_requested" and address in alive:
            events.append((DEATH, *alive.pop(address), 0))
    return (events, outputs) if seen == len(marks) else None


def events_by_op(events: Iterable[LogEvent]) -> Iterator[list[LogEvent]]:
    """The events between the two marks of each op, in the order of their ends.

    If a checkpoint runs a compiled forward again within a compiled backward, its events belong only to itself.
    """
    running: list[list[LogEvent]] = []
    for event in events:
        kind, _, _, value = event
        if kind == MARK and value == BEGINS:
            running.append([])
        elif kind == MARK and value == ENDS:
            yield running.pop()
        elif running:
            running[-1].append(event)


def _of_taker(events: Iterable[LogEvent], taker: Taker) -> Iterator[LogEvent]:
    """Births and deaths. For compiled code births, deaths of blocks born in it, and marks of other freed memory."""
    born: set[int] = set()
    for event in events:
        kind, block, _, value = event
        if kind == BIRTH:
            born.add(block)
        is_own = block in born or (kind == DEATH and taker is Taker.OP)
        if is_own or (kind == MARK and value < 0 and taker is not Taker.OP):
            yield event


def _workspace_bytes(events: Iterable[LogEvent], taker: Taker) -> int:
    live = most = 0
    for kind, _, size_bytes, value in events:
        if kind == BIRTH:
            live += counted_bytes(size_bytes)
            most = max(most, live)
        elif kind == DEATH:
            live -= counted_bytes(size_bytes)
        else:
            live -= counted_bytes(-value)
    if taker is Taker.FORWARD:
        live += sum(counted_bytes(-value) for kind, _, _, value in events if kind == MARK)
    return max(0, most - live)


def _blocks(events: Iterable[LogEvent], outputs: Mapping[int, int], taker: Taker) -> list[OpBlock]:
    """Blocks as they are taken. For a compiled backward, memory that existed and is freed in it comes first."""
    is_backward = taker is Taker.BACKWARD
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
    return blocks


def _small_bytes(events: Iterable[LogEvent], outputs: Mapping[int, int]) -> int:
    """Most live bytes of blocks that are no outputs and too small to have a place."""
    alive: dict[int, int] = {}
    live = most = 0
    for kind, block, size_bytes, _ in events:
        if kind == BIRTH and block not in outputs and size_bytes < LEAST_PLACED_BYTES:
            alive[block] = counted_bytes(size_bytes)
            live += alive[block]
            most = max(most, live)
        elif kind == DEATH:
            live -= alive.pop(block, 0)
    return most


def _ends(blocks: list[OpBlock], place: int) -> None:
    taken = blocks[place]
    blocks[place] = OpBlock(taken.size_bytes, taken.output, len(blocks))


class CarriedBlock(NamedTuple):
    """One block; ops are given by number."""

    block: int
    size_bytes: int
    made_in: int
    let_go_in: int


def carried_in(
    events_by_op: Iterable[list[LogEvent]], takers: Sequence[tuple[Taker, bool]], outputs: Collection[int]
) -> tuple[list[list[LogEvent]], list[CarriedBlock]]:
    """The events of each op, and the blocks that parts of ops pass to each other, in the order of their making.

    ``takers`` says how each op takes memory, and whether other parts follow it; ``outputs`` are the blocks with outputs
    of ops. If a part releases a block that an earlier part has made, its events have a mark, as for values from before.
    """
    found, carried = list[list[LogEvent]](), list[CarriedBlock]()
    by_taker = defaultdict[Taker, dict[int, tuple[int, int]]](dict)
    """By block: its bytes, and the part that made it."""
    for number, (events, (taker, is_part)) in enumerate(zip(events_by_op, takers, strict=True)):
        alive, seen = by_taker[taker], list[LogEvent]()
        for event in events:
            made = alive.pop(event[1], None) if event[0] == DEATH else None
            if made is not None:
                carried.append(CarriedBlock(event[1], *made, number))
            seen.append(event if made is None else (MARK, -1, 0, -made[0]))
        found.append(seen)
        if is_part:
            alive |= {block: (size, number) for block, size in _left_behind(events) if block not in outputs}
        else:
            alive.clear()
    return found, sorted(carried)  # blocks have their numbers in the order of their making


def _left_behind(events: Iterable[LogEvent]) -> list[tuple[int, int]]:
    """Blocks that are born in these events and do not die in them, and their bytes."""
    alive: dict[int, int] = {}
    for kind, block, size_bytes, _ in events:
        if kind == BIRTH and size_bytes >= LEAST_COUNTED_BYTES:
            alive[block] = size_bytes
        elif kind == DEATH:
            alive.pop(block, None)
    return list(alive.items())


class Moment(NamedTuple):
    """Between two ticks, or inside an op."""

    ops: int
    """Number of ops that had run."""
    points: int
    """Number of points that had been passed."""
    inside: int = 0
    """The number of ops that were running, one inside the other."""


class Stray(NamedTuple):
    """One block."""

    size_bytes: int
    """Bytes as requested."""
    born: Moment
    died: Moment | None
    """None if it outlived the step."""
    is_early: bool = False
    """Whether it was live together with everything that is live at the tick of the previous op."""


def strays_in(events: Iterable[LogEvent], known: Collection[int]) -> list[Stray]:
    """Blocks born between ops that are none of the ``known`` blocks, in the order of deaths.

    Other memory may be freed between a block's birth and the next tick; a plan may also free some if that tick is a
    point. The block then counts at the previous tick too: it is early if that is an op's tick, and its birth is moved
    before it if that is a point's.
    """
    alive: dict[int, tuple[int, Moment, int]] = {}
    found: list[tuple[int, Moment, int, Moment | None]] = []
    now, behind_points, last_end = Moment(0, 0), set[Moment](), dict[Moment, int]()
    for place, (kind, block, size_bytes, value) in enumerate(events):
        if kind == MARK:
            before, now = now, _behind(now, value)
            if value == POINT:
                last_end[before] = place
                behind_points.add(now)
        elif kind == BIRTH and not now.inside and block not in known and size_bytes >= LEAST_COUNTED_BYTES:
            alive[block] = size_bytes, now, place
        elif kind == DEATH:
            taken = alive.pop(block, None)
            if taken is not None:
                found.append((*taken, now))
            if taken is None or taken[1] != now:
                last_end[now] = place
    found += [(*taken, None) for taken in alive.values()]
    return [
        Stray(size, Moment(born.ops, born.points - 1), died)
        if last_end.get(born, -1) > place and born in behind_points
        else Stray(size, born, died, last_end.get(born, -1) > place)
        for size, born, place, died in found
    ]


def _behind(now: Moment, mark: int) -> Moment:
    if mark == POINT:
        return Moment(now.ops, now.points + 1, now.inside)
    if mark in (BEGINS, ENDS):
        return Moment(now.ops + (mark == ENDS), now.points, now.inside + (1 if mark == BEGINS else -1))
    return now


def is_passing(stray: Stray) -> bool:
    """Whether it lives at no tick: it is given back before the next op or point."""
    return stray.born == stray.died


def bytes_beside_ops(strays: Iterable[Stray]) -> Counter[int]:
    """Bytes that are live together with everything at the tick of an op, by the number of the op: early strays count
    with the previous op, other passing strays with the next one. At any moment at most their sum is taken.
    """
    found: Counter[int] = Counter()
    for stray in strays:
        if stray.is_early or is_passing(stray):
            found[stray.born.ops - stray.is_early] += counted_bytes(stray.size_bytes)
    return found


def stray_values(strays: Iterable[Stray], op_ticks: Sequence[int], tick_count: int) -> tuple[Value, ...]:
    """Strays that do not pass, as values that are no op's output and about which no decision is made.

    Small ones with the same lifetime are one value.
    """
    small: Counter[tuple[int, int, int]] = Counter()
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for stray in strays:
        if is_passing(stray):
            continue
        done, last = stray.born.ops, _last_tick(stray.died, op_ticks, tick_count)
        first = min(_tick(stray.born), last)  # code that no op shows may take it after the last tick
        if stray.size_bytes < LEAST_PLACED_BYTES:
            small[done, first, last] += counted_bytes(stray.size_bytes)
        else:
            found[done].append((first, last, stray.size_bytes))
    for (done, first, last), size_bytes in small.items():
        found[done].append((first, last, size_bytes))
    return tuple(
        held_until(f"{STEM}#{done}" if not number else f"{STEM}#{done}.{number + 1}", size_bytes, last, done - 1, first)
        for done, several in sorted(found.items())
        for number, (first, last, size_bytes) in enumerate(several)
        if size_bytes
    )


def _tick(moment: Moment) -> int:
    """The first tick after a moment between ticks."""
    return moment.ops + moment.points


def _last_tick(moment: Moment | None, op_ticks: Sequence[int], tick_count: int) -> int:
    if moment is None:
        return tick_count - 1
    if moment.inside and moment.ops < len(op_ticks):
        return op_ticks[moment.ops]
    return _tick(moment) - 1
