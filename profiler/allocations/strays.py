"""Strays: what a step takes between its ops and is no value's, as a checkpoint's states of generators. Pure functions.

A log has marks before and behind each op, and behind each point of the runtime's clock. So it knows between which
two ticks a stray was taken, and between which it was given back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from poochplan.formats.profile import Kind, Value
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, LEAST_PLACED_BYTES
from poochplan.runtime.allocator.allocation_log import BIRTH, DEATH, MARK

from .op_blocks import BEGINS, ENDS, POINT, Event, counted_bytes

STEM = "step/between ops"


class Moment(NamedTuple):
    """Between two ticks, or inside an op."""

    ops: int
    """That had run."""
    points: int
    """That had been passed."""
    inside: int = 0
    """Of so many ops that were running, one in the other."""


class Stray(NamedTuple):
    """One block."""

    size_bytes: int
    """As asked for."""
    born: Moment
    died: Moment | None
    """None where it outlived the step."""


def strays_in(events: Iterable[Event], known: Collection[int]) -> list[Stray]:
    """What was born between ops and lies in none of the ``known`` blocks, in the order of deaths."""
    alive: dict[int, tuple[int, Moment]] = {}
    found: list[Stray] = []
    now = Moment(0, 0)
    for kind, block, size_bytes, value in events:
        if kind == MARK:
            now = _behind(now, value)
        elif kind == BIRTH and not now.inside and block not in known and size_bytes >= LEAST_COUNTED_BYTES:
            alive[block] = size_bytes, now
        elif kind == DEATH and block in alive:
            found.append(Stray(*alive.pop(block), now))
    return found + [Stray(*one, None) for one in alive.values()]


def _behind(now: Moment, mark: int) -> Moment:
    if mark == POINT:
        return Moment(now.ops, now.points + 1, now.inside)
    if mark in (BEGINS, ENDS):
        return Moment(now.ops + (mark == ENDS), now.points, now.inside + (1 if mark == BEGINS else -1))
    return now


def is_passing(stray: Stray) -> bool:
    """Whether it lives at no tick: it is given back before the next op or point."""
    return stray.born == stray.died


def passing_bytes(strays: Iterable[Stray]) -> Counter[int]:
    """Bytes of those that pass, by the op that comes next: the most at once are at most their sum."""
    found: Counter[int] = Counter()
    for stray in filter(is_passing, strays):
        found[stray.born.ops] += counted_bytes(stray.size_bytes)
    return found


def stray_values(strays: Iterable[Stray], op_ticks: Sequence[int], tick_count: int) -> tuple[Value, ...]:
    """Those that do not pass as values that no op bears and nobody decides about.

    Small ones of one lifetime are one value.
    """
    small: Counter[tuple[int, int, int]] = Counter()
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for stray in strays:
        if is_passing(stray):
            continue
        done, first, last = stray.born.ops, _tick(stray.born), _last_tick(stray.died, op_ticks, tick_count)
        if stray.size_bytes < LEAST_PLACED_BYTES:
            small[done, first, last] += counted_bytes(stray.size_bytes)
        else:
            found[done].append((first, last, stray.size_bytes))
    for (done, first, last), size_bytes in small.items():
        found[done].append((first, last, size_bytes))
    return tuple(
        temporary(
            f"{STEM}#{done}" if not number else f"{STEM}#{done}.{number + 1}",
            size_bytes,
            done - 1,
            last,
            born_tick=first,
        )
        for done, several in sorted(found.items())
        for number, (first, last, size_bytes) in enumerate(several)
        if size_bytes
    )


def _tick(moment: Moment) -> int:
    """The first one behind a moment between ticks."""
    return moment.ops + moment.points


def _last_tick(moment: Moment | None, op_ticks: Sequence[int], tick_count: int) -> int:
    if moment is None:
        return tick_count - 1
    if moment.inside and moment.ops < len(op_ticks):
        return op_ticks[moment.ops]
    return _tick(moment) - 1


def temporary(
    name: str, size_bytes: int, born: int, last_tick: int, *, layer: str = "", born_tick: int | None = None
) -> Value:
    """A block that no tensor of the capture shows, as a value."""
    return Value(
        name=name,
        layer=layer,
        kind=Kind.TEMPORARY,
        size_bytes=size_bytes,
        dtype="uint8",
        shape=(size_bytes,),
        born=born,
        born_tick=born_tick,
        forward_death=last_tick,
        freed=last_tick,
    )
