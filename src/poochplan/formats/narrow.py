"""Bits: what a plan may hold in place of a saved mask, one bit for each element.

A mask qualifies by what made it, never by its contents: ``bernoulli_`` fills a fresh tensor, which constants may scale.
Its bits are a source (:mod:`~.sources`) that the runtime makes at the mask's save point. :func:`with_bits` adds them to
a profile, with an op without duration that stands for narrowing in the step and for widening in replays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from msgspec.structs import replace

from .plan import Plan
from .profile import Kind, Op, Phase, PointKind, Profile, Value
from .queries import writers_by_value
from .sources import moved, with_save_points, with_sources

NARROW = "poochplan.narrow"
"""The name of the op that reads a mask where its bits would be made."""
FRESH = frozenset({"aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default"})
"""Ops that take the memory of a mask."""
DRAWING = "aten.bernoulli_.float"
"""The op that fills a mask with zeros and ones."""
SCALING = frozenset({"aten.div_.Scalar", "aten.mul_.Scalar"})
"""Ops that write a mask in place, with a number of Python."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LEAST_MASK_BYTES = 16384
"""Smaller masks are left as they are: narrowing one takes microseconds of Python, whatever its size."""
BITS_DTYPE = "uint8"


def bits_bytes(profile: Profile, mask: int) -> int:
    """The bytes of a mask's bits."""
    value = profile.values[mask]
    return -(-(value.size_bytes // ELEMENT_BYTES[value.dtype]) // 8)


def masks_of(profile: Profile) -> dict[int, int]:
    """By save point (its position among all points): the mask that is saved there, if bits can stand for it.

    Only on the CPU, whose runtime narrows masks.
    """
    found = dict[int, int]()
    if profile.device.kind != "cpu" or not any(op.name == DRAWING for op in profile.ops):
        return found
    if any(value.nodes for value in profile.values):  # saved by compiled graphs, which hold what they please
        return found
    taken = set(narrowed(profile).values())
    writers, last_write, readers = writers_by_value(profile), _last_writes(profile), _first_readers(profile)
    for number, point in enumerate(profile.points):
        mask = profile.handles[point.handle].value
        if point.kind is not PointKind.SAVE or mask in taken or not _is_mask(profile, mask, writers[mask]):
            continue
        if max(last_write[mask], writers[mask][-1]) >= point.op or readers.get(mask, point.op) < point.op:
            continue
        if widening_seconds(profile, mask, point.op) is not None:
            found[number] = mask
    return found


def faster_masks(profile: Profile) -> dict[int, int]:
    """Those of :func:`masks_of` that take longer to be drawn again than to be narrowed and widened, or cannot be."""
    masks = masks_of(profile)
    writers = writers_by_value(profile) if masks else []

    def is_faster(number: int, mask: int) -> bool:
        seconds = widening_seconds(profile, mask, profile.points[number].op)
        drawn_s = sum(profile.ops[op].duration_s for op in writers[mask])
        return bool(profile.values[mask].unreplayable) or (seconds is not None and seconds < drawn_s)

    return {number: mask for number, mask in masks.items() if is_faster(number, mask)}


def _is_mask(profile: Profile, mask: int, made_by: list[int]) -> bool:
    """Whether the writers of a saved value fill a fresh tensor with two values, which constants give."""
    value = profile.values[mask]
    if value.dtype not in ELEMENT_BYTES or value.size_bytes < LEAST_MASK_BYTES or value.pinned or len(made_by) < 2:
        return False
    if value.kind is not Kind.ACTIVATION or value.stretch_of >= 0 or value.size_bytes % ELEMENT_BYTES[value.dtype]:
        return False
    fresh, draw, *scales = (profile.ops[op] for op in made_by)
    return (
        fresh.name in FRESH
        and mask in fresh.outputs
        and draw.name == DRAWING
        and all(op.name in SCALING for op in scales)
        and all(op.writes == (mask,) and op.inputs == (mask,) for op in (draw, *scales))
    )


def _last_writes(profile: Profile) -> list[int]:
    """By value: the last op of the whole step that writes it in place; -1 if none does."""
    last = [-1] * len(profile.values)
    for index, op in enumerate(profile.ops):
        for value in op.writes:
            last[value] = index
    return last


def _first_readers(profile: Profile) -> dict[int, int]:
    """By value: the first op that reads it without writing it."""
    first = dict[int, int]()
    for index, op in enumerate(profile.ops):
        for value in set(op.inputs).difference(op.writes):
            first.setdefault(value, index)
    return first


def widening_seconds(profile: Profile, mask: int, reader: int) -> float | None:
    """Seconds of narrowing a mask and widening its bits, together: as long as the op that saves the mask, ``reader``,
    takes for as many bytes. None if that op tells nothing.
    """
    if reader >= len(profile.ops) or profile.ops[reader].phase is not Phase.FORWARD:
        return None
    op = profile.ops[reader]
    moved_bytes = sum(profile.values[value].size_bytes for value in {*op.inputs, *op.outputs})
    if not moved_bytes:
        return None
    return 2 * (profile.values[mask].size_bytes + bits_bytes(profile, mask)) * op.duration_s / moved_bytes


def narrowed(profile: Profile) -> dict[int, int]:
    """By bits, which :func:`with_bits` has added: their mask."""
    if not any(op.name == NARROW for op in profile.ops):
        return {}
    found = dict[int, int]()
    for number, value in enumerate(profile.values):
        if value.born >= 0 and profile.ops[value.born].name == NARROW and value.born_tick is not None:
            found[number] = profile.ops[value.born].inputs[0]
    return found


def with_bits(profile: Profile, named: Collection[str] | None = None) -> Profile:
    """The profile with a save point, a handle and an op for the bits of each mask; the same one if it has none.

    With ``named``, bits of these names are added, and by default those that are faster than drawing.
    """
    masks = faster_masks(profile) if named is None else masks_of(profile)
    if named is not None:
        masks = {number: mask for number, mask in masks.items() if _name(profile, mask) in named}
    if not masks:
        return profile
    numbers = sorted(masks)
    before_op, ticks = [profile.points[one].op for one in numbers], [profile.point_ticks[one] for one in numbers]

    def tick(before: int) -> int:
        return before + 2 * bisect_right(ticks, before)

    values = [moved(replace(one, born=one.born + bisect_right(before_op, one.born)), tick) for one in profile.values]
    ops, bits_of = list(profile.ops), dict[int, int]()
    for place, number in enumerate(numbers):
        mask, at = masks[number], before_op[place] + place
        ops.insert(at, Op(name=NARROW, layer=values[mask].layer, phase=Phase.FORWARD, duration_s=0.0, inputs=(mask,)))
        bits_of[number] = len(values)
        values.append(_bits(profile, mask, born=at, tick=ticks[place] + 2 * place + 1))
    late = (replace(point, op=point.op + bisect_right(numbers, at)) for at, point in enumerate(profile.points))
    handles, points = with_save_points(replace(profile, points=tuple(late)), values, bits_of)
    return replace(profile, ops=tuple(ops), values=tuple(values), handles=handles, points=points)


def _name(profile: Profile, mask: int) -> str:
    return f"{profile.values[mask].name} as bits"


def _bits(profile: Profile, mask: int, *, born: int, tick: int) -> Value:
    """The bits of a mask, which are there at their save point only, unless a plan holds them."""
    value, size_bytes = profile.values[mask], bits_bytes(profile, mask)
    return Value(
        name=_name(profile, mask),
        layer=value.layer,
        kind=Kind.TEMPORARY,
        size_bytes=size_bytes,
        dtype=BITS_DTYPE,
        shape=(size_bytes,),
        born=born,
        born_tick=tick,
        forward_death=tick,
        freed=tick,
    )


def replayed_ops(profile: Profile) -> tuple[Op, ...]:
    """The ops as replays run them. Those for bits make the mask of its bits, and take the seconds for narrowing too.

    If the bits are recomputed, nothing is narrowed or widened: the mask is drawn again. So its own writers take these
    seconds less, and both together take those of the writers.
    """
    found, ops, writers = narrowed(profile), list(profile.ops), writers_by_value(profile)
    for bits, mask in found.items():
        index, (fresh, *drawing) = profile.values[bits].born, writers[mask]
        reader = next(at for at in range(index, len(ops)) if profile.ops[at].name != NARROW)
        seconds = widening_seconds(profile, mask, reader) or 0.0
        ops[index] = replace(ops[index], duration_s=seconds, inputs=(bits,), outputs=(mask,))
        drawing_s = sum(ops[op].duration_s for op in drawing)
        rest_s = max(0.0, ops[fresh].duration_s + drawing_s - seconds)
        for op in drawing:
            own_s = rest_s * (ops[op].duration_s / drawing_s) if drawing_s > 0 else 0.0
            ops[op] = replace(ops[op], duration_s=own_s, workspace_bytes=_inside(profile, mask, ops[op]), blocks=())
    return tuple(ops)


def _inside(profile: Profile, mask: int, op: Op) -> int:
    """Bytes inside an op that draws a mask again: also the mask, which counts as a result where it is widened."""
    return profile.rounded_bytes(op.workspace_bytes) + profile.rounded_bytes(profile.values[mask].size_bytes)


SOURCES, BITS = "sources", "narrow"
SMALLER = SOURCES, BITS
"""What a plan may hold in place of saved values, by the name that leaves it out."""


def with_smaller(profile: Profile, without: Collection[str] = ()) -> Profile:
    """The profile with all smaller forms of saved values that a plan may hold, except for those of ``without``."""
    if SOURCES not in without:
        profile = with_sources(profile)
    return profile if BITS in without else with_bits(profile)


def has_sources(plan: Plan) -> bool:
    """Whether the plan decides about sources or bits too."""
    return any(value.source for value in plan.values)


def as_planned(profile: Profile, plan: Plan) -> Profile:
    """The profile with the values, handles and points that the plan, which was made from it, is about."""
    if any(value.source and not value.bits for value in plan.values):
        profile = with_sources(profile)
    return with_bits(profile, {value.name for value in plan.values if value.bits})
