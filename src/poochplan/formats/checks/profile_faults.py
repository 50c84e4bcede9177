"""What is wrong between the fields of a profile: of indices where it is read, of all else where it is planned from.

Reading looks at the largest index of each kind alone, and only where that is too large for the field that holds it: a
profile has tens of thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter

from poochplan.formats.profile_parts import ProfileData

_OF_OPS = ("inputs", "outputs", "writes")


def profile_faults(profile: ProfileData) -> Iterator[str]:
    """Each fault in words: where, what was expected, what was found."""
    ops, values, points = profile.ops, profile.values, profile.points
    lists = chain.from_iterable(map(attrgetter(*_OF_OPS), ops))
    if max(chain.from_iterable(lists), default=-1) >= len(values):
        for name in _OF_OPS:
            yield from _beyond("ops", name, (max(getattr(op, name), default=-1) for op in ops), len(values), "values")
    for where, name, found, count, of in (
        ("values", "born", [value.born for value in values], len(ops), "ops"),
        ("handles", "value", [handle.value for handle in profile.handles], len(values), "values"),
        ("points", "handle", [point.handle for point in points], len(profile.handles), "handles"),
        ("points", "op", [point.op for point in points], len(ops) + 1, "ops and one"),
    ):
        if max(found, default=-1) >= count:
            yield from _beyond(where, name, found, count, of)
    yield from _points_out_of_order([point.op for point in points])
    yield from _blocks(profile)


def _beyond(where: str, name: str, indices: Iterable[int], count: int, of: str) -> Iterator[str]:
    for number, found in enumerate(indices):
        if found >= count:
            yield f"{where}[{number}].{name}: expected less than {count}, for so many {of} there are, found {found}"


def _points_out_of_order(ops: list[int]) -> Iterator[str]:
    if ops != sorted(ops):
        number = next(number for number in range(1, len(ops)) if ops[number] < ops[number - 1])
        yield f"points[{number}].op: expected at least {ops[number - 1]}, as of the point before, found {ops[number]}"


def _blocks(profile: ProfileData) -> Iterator[str]:
    for number, op in enumerate(profile.ops):
        if not op.blocks:
            continue
        for place, block in enumerate(op.blocks):
            where, last = f"ops[{number}].blocks[{place}]", len(op.blocks)
            if block.output >= len(op.outputs):
                yield f"{where}: expected one of {len(op.outputs)} outputs or -1, found output {block.output}"
            if block.until != -1 and not place < block.until <= last:
                yield f"{where}: expected until -1 or from {place + 1} to {last}, found {block.until}"
