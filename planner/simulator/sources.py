"""Sources: unsaved tensors from which one cheap op, a cast or a clone, makes a saved value that takes more bytes.

A plan may hold a source in place of the value, and widen it before the value is used. For the planner a source is a
saved value that backward never uses: it has a save point, directly before that of the value, and a handle that is never
unpacked. :func:`with_sources` adds both to a profile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from poochplan.formats.profile import Handle, Kind, Op, Phase, Point, PointKind, Profile, Value
from poochplan.formats.queries import writers_by_value

WIDENING = frozenset({"aten._to_copy.default", "aten.clone.default"})
"""Ops that read one tensor and make a copy of it, perhaps of another type, or of more elements."""
SOURCES = "sources"
"""The name by which ``plan`` leaves them out."""


def is_source(value: Value) -> bool:
    """Whether a saved value of a profile is a source: autograd does not save it."""
    return value.kind is Kind.TEMPORARY


def sources_of(profile: Profile) -> dict[int, int]:
    """By save point (its position among all points): the source of the value that is saved there."""
    found = dict[int, int]()
    if any(value.nodes for value in profile.values):  # saved by compiled graphs, which hold what they please
        return found
    taken = {handle.value for handle in profile.handles}
    writers, last_write, ticks = writers_by_value(profile), _last_writes(profile), profile.point_ticks
    for number, point in enumerate(profile.points):
        if point.kind is not PointKind.SAVE:
            continue
        saved = profile.handles[point.handle].value
        made_by = writers[saved]
        if len(made_by) != 1 or made_by[0] >= point.op:
            continue
        source = _source_of(profile, saved, profile.ops[made_by[0]])
        if source is None or source in taken or last_write[source] > made_by[0]:
            continue
        if profile.values[source].forward_death >= ticks[number]:
            found[number] = source
            taken.add(source)
    return found


def _source_of(profile: Profile, saved: int, maker: Op) -> int | None:
    """The smaller value that ``maker`` reads to make a saved one; None if there is none that a plan could hold."""
    if maker.name not in WIDENING or maker.opaque or maker.writes or len(maker.inputs) != 1:
        return None
    source = maker.inputs[0]
    value, made = profile.values[source], profile.values[saved]
    if value.kind is not Kind.TEMPORARY or value.born < 0 or value.stretch_of >= 0 or value.pinned:
        return None
    is_smaller = profile.rounded_bytes(value.size_bytes) < profile.rounded_bytes(made.size_bytes)
    return source if is_smaller and profile.ops[value.born].phase is Phase.FORWARD else None


def _last_writes(profile: Profile) -> list[int]:
    """By value: the last op of the whole step that writes it in place; -1 if none does."""
    last = [-1] * len(profile.values)
    for index, op in enumerate(profile.ops):
        for value in op.writes:
            last[value] = index
    return last


def with_sources(profile: Profile) -> Profile:
    """The profile with a save point and a handle for each source; the same one if it has none."""
    sources = sources_of(profile)
    if not sources:
        return profile
    added_at = [profile.point_ticks[number] for number in sources]

    def tick(before: int) -> int:
        return before + bisect_right(added_at, before)

    handles, points = _with_save_points(profile, sources)
    values = tuple(_moved(value, tick) for value in profile.values)
    return replace(profile, values=values, handles=handles, points=points)


def _with_save_points(profile: Profile, new: Mapping[int, int]) -> tuple[tuple[Handle, ...], tuple[Point, ...]]:
    """The handles and points, with those of another value directly before each of these save points."""
    of_handle = {profile.points[number].handle: value for number, value in new.items()}
    handles, places, points = list[Handle](), list[int](), list[Point]()
    for ordinal, handle in enumerate(profile.handles):
        if ordinal in of_handle:
            value = profile.values[of_handle[ordinal]]
            handles.append(Handle(value=of_handle[ordinal], layer=value.layer, dtype=value.dtype, shape=value.shape))
        places.append(len(handles))
        handles.append(handle)
    for number, point in enumerate(profile.points):
        here = replace(point, handle=places[point.handle])
        points += [replace(here, handle=here.handle - 1), here] if number in new else [here]
    return tuple(handles), tuple(points)


def _moved(value: Value, tick: Callable[[int], int]) -> Value:
    """The value in a step in which each tick has become another."""
    born_tick = None if value.born_tick is None else tick(value.born_tick)
    return replace(value, born_tick=born_tick, forward_death=tick(value.forward_death), freed=tick(value.freed))
