"""Sums of gradients. Where two nodes give one tensor a gradient, autograd adds the second to the first in place, if
nothing else holds the first. Under a dispatch mode, which the captured step has, it makes a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from msgspec.structs import replace

from poochplan.formats.profile import Kind, Op, Profile, Value


def with_sums_in_place(profile: Profile, adds_to: Mapping[int, int]) -> Profile:
    """The profile as of a step without a mode.

    ``adds_to``: by op that may be such a sum, the value that holds the first gradient. It is one if that value dies as
    the op ends. The sum then lies where the first gradient did.
    """
    merged = dict(_merged(profile, adds_to))
    if not merged:
        return profile
    numbers = count()
    place = {value: next(numbers) for value in range(len(profile.values)) if value not in merged}
    for value, first in merged.items():  # in the order of the ops, so what a sum is added to has its place
        place[value] = place[first]
    sums = {profile.values[value].born for value in merged}
    ends = {place[value]: profile.values[value] for value in merged}
    values = [profile.values[value] for value in place if value not in merged]
    return replace(
        profile,
        values=tuple(
            _moved(_joined(value, ends[number]) if number in ends else value, place)
            for number, value in enumerate(values)
        ),
        ops=tuple(
            _in_place(op, place) if number in sums else _as_placed(op, place) for number, op in enumerate(profile.ops)
        ),
        handles=tuple(replace(handle, value=place[handle.value]) for handle in profile.handles),
    )


def _merged(profile: Profile, adds_to: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Sums, each with the value that it is added to."""
    saved = {handle.value for handle in profile.handles}
    for number, first in sorted(adds_to.items()):
        op, held = profile.ops[number], profile.values[first]
        if len(op.outputs) != 1 or op.writes or op.blocks or op.workspace_bytes:
            continue
        found = profile.values[op.outputs[0]]
        is_alike = (found.size_bytes, found.dtype) == (held.size_bytes, held.dtype)
        if is_alike and held.freed == profile.op_ticks[number] and not saved & {first, op.outputs[0]}:
            yield op.outputs[0], first


def _joined(first: Value, last: Value) -> Value:
    """The first gradient, which becomes the last sum."""
    kind = first.kind if last.kind is Kind.TEMPORARY else last.kind
    same = ("forward_death", "freed", "gone_by_next")
    return replace(first, kind=kind, **{name: getattr(last, name) for name in same})


def _moved(value: Value, place: Mapping[int, int]) -> Value:
    return value if value.stretch_of < 0 else replace(value, stretch_of=place[value.stretch_of])


def _as_placed(op: Op, place: Mapping[int, int]) -> Op:
    inputs, outputs, writes = (tuple(place[one] for one in every) for every in (op.inputs, op.outputs, op.writes))
    return replace(op, inputs=inputs, outputs=outputs, writes=writes)


def _in_place(op: Op, place: Mapping[int, int]) -> Op:
    inputs = tuple(place[one] for one in op.inputs)
    return replace(op, inputs=inputs, outputs=(), writes=inputs[:1])
