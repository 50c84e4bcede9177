"""Narrow copies: what a plan may hold in place of a saved value, in a form that takes fewer bytes (:mod:`~.forms`).

A value qualifies by what made it, never by its contents. A *mask* has bits: ``bernoulli_`` fills a fresh tensor, which
constants may scale, or one op makes a mask of bools. *Indices* have integers of fewer bytes, and *casts* of bfloat16
upper halves. What is said of masks and bits here holds for indices and casts too, and for their forms, as for masks
that one op makes whole. Bits are a source (:mod:`~.sources`) that the runtime makes at the mask's save point.
:func:`with_bits` adds them to a profile, with an op without duration that stands for narrowing in the step and for
widening in replays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from msgspec.structs import replace

from .forms import BITS, BITS_DTYPE, CASTING, CHOOSING, FORM_BYTES, HALF, INDEX, INDEX_BYTES, POOLING, form_of
from .occupancy import held_until
from .plan import Plan
from .profile import Kind, Op, Phase, PointKind, Profile, Value
from .queries import last_writes, writers_by_value
from .sources import is_source, moved, sources_of, with_save_points, with_sources

NARROW = "poochplan.narrow"
"""The name of the op that reads a mask where its bits would be made."""
FRESH = frozenset({"aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default"})
"""Ops that take the memory of a mask."""
DRAWING = "aten.bernoulli_.float"
"""The op that fills a mask with zeros and ones."""
SCALING = frozenset({"aten.div_.Scalar", "aten.mul_.Scalar"})
"""Ops that write a mask in place, with a number of Python."""
DROPOUT = "aten.native_dropout.default"
"""The op that makes a result and a mask of bools, which dropout is on CUDA."""
MAKING = frozenset({DROPOUT, "aten.bernoulli.p"})
"""Ops that each make a whole mask of bools."""
OTHERS = frozenset({CASTING, *POOLING, *CHOOSING})
"""Ops that each make a whole value which has another form than bits."""
BOOL = "bool"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, BOOL: 1}
"""Of the types of masks."""
WHOLE_BYTES = ELEMENT_BYTES | {INDEX: INDEX_BYTES}
"""Of all types that have narrow forms; casts are of a type of masks."""
LEAST_MASK_BYTES = 16384
"""Smaller masks are left as they are: the bits of one would be worth little."""
DEVICE_PART = 1 << 24
"""On CUDA, elements that are narrowed or widened at a time; a multiple of 8."""
TABLE_ROWS = 256
"""On CUDA bits are widened by a table: eight elements for each content of a byte."""
NEEDS_INPUT = "the op that made the whole would need its input again"


def bits_bytes(profile: Profile, mask: int) -> int:
    """The bytes of a mask's bits, or of a value's other form."""
    form = form_of(profile, mask)
    return -(-_elements(profile, mask) // 8) if form == BITS else FORM_BYTES[form] * _elements(profile, mask)


def _elements(profile: Profile, mask: int) -> int:
    return profile.values[mask].size_bytes // WHOLE_BYTES[profile.values[mask].dtype]


def masks_of(profile: Profile) -> dict[int, int]:
    """By save point (its position among all points): the mask that is saved there, if bits can stand for it."""
    found = dict[int, int]()
    if not any(op.name == DRAWING or op.name in MAKING or op.name in OTHERS for op in profile.ops):
        return found
    if any(value.nodes for value in profile.values):  # saved by compiled graphs, which hold what they please
        return found
    taken, saved = set(narrowed(profile).values()), {handle.value for handle in profile.handles}
    # Those that a plan may hold, whether the profile has their save points or not.
    sources = {value for value in saved if is_source(profile.values[value])}.union(sources_of(profile).values())
    writers, last_write, readers = writers_by_value(profile), last_writes(profile), _first_readers(profile)
    for number, point in enumerate(profile.points):
        mask = profile.handles[point.handle].value
        if point.kind is not PointKind.SAVE or mask in taken or not _is_mask(profile, mask, writers[mask]):
            continue
        if form_of(profile, mask) == HALF and not sources.isdisjoint(profile.ops[writers[mask][0]].inputs):
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
    saved = {handle.value for handle in profile.handles}

    def is_faster(number: int, mask: int) -> bool:
        seconds = widening_seconds(profile, mask, profile.points[number].op)
        again = list(writers[mask])
        if _is_made_whole(profile, mask):  # so are, at least, the inputs of its op that autograd does not save
            maker, inputs = again[0], set(profile.ops[again[0]].inputs) - saved
            again += {op for value in inputs for op in writers[value] if op < maker}
        drawn_s = sum(profile.ops[op].duration_s for op in again)
        return bool(profile.values[mask].unreplayable) or (seconds is not None and seconds < drawn_s)

    return {number: mask for number, mask in masks.items() if is_faster(number, mask)}


def _is_mask(profile: Profile, mask: int, made_by: list[int]) -> bool:
    """Whether the writers of a saved value fill a fresh tensor with two values, which constants give, or one op makes
    all of it, and has a narrow form for that.
    """
    value = profile.values[mask]
    if value.dtype not in WHOLE_BYTES or value.size_bytes < LEAST_MASK_BYTES or value.pinned or not made_by:
        return False
    if value.kind is not Kind.ACTIVATION or value.stretch_of >= 0 or value.size_bytes % WHOLE_BYTES[value.dtype]:
        return False
    if len(made_by) == 1:
        form = form_of(profile, mask)
        return form != "" and (form != BITS or value.dtype == BOOL) and _is_made_whole(profile, mask)
    if value.dtype == INDEX:
        return False
    fresh, draw, *scales = (profile.ops[op] for op in made_by)
    return (
        fresh.name in FRESH
        and mask in fresh.outputs
        and draw.name == DRAWING
        and all(op.name in SCALING for op in scales)
        and all(op.writes == (mask,) and op.inputs == (mask,) for op in (draw, *scales))
    )


def _is_made_whole(profile: Profile, mask: int) -> bool:
    """Whether one op makes the mask. Then its bits are never recomputed: the mask would be, of the op's inputs."""
    born = profile.values[mask].born
    is_maker = born >= 0 and (profile.ops[born].name in MAKING or profile.ops[born].name in OTHERS)
    return is_maker and mask in profile.ops[born].outputs


def _first_readers(profile: Profile) -> dict[int, int]:
    """By value: the first op that reads it without writing it."""
    first = dict[int, int]()
    for index, op in enumerate(profile.ops):
        for value in set(op.inputs).difference(op.writes):
            first.setdefault(value, index)
    return first


def widening_seconds(profile: Profile, mask: int, reader: int) -> float | None:
    """Seconds of narrowing a mask and widening its bits, together: the runtime's for any mask, and as long as the op
    that saves it, ``reader`` or dropout itself (or what makes another form), takes for as many bytes. None if that op
    tells nothing.
    """
    if profile.ops[profile.values[mask].born].name in OTHERS | {DROPOUT}:
        reader = profile.values[mask].born
    if reader >= len(profile.ops) or profile.ops[reader].phase is not Phase.FORWARD:
        return None
    op = profile.ops[reader]
    moved_bytes = sum(profile.values[value].size_bytes for value in {*op.inputs, *op.outputs})
    if not moved_bytes:
        return None
    any_s = profile.runtime.narrow_s if profile.runtime is not None else 0.0
    return any_s + moved_by_both(profile, mask) * op.duration_s / moved_bytes


def moved_by_both(profile: Profile, mask: int) -> float:
    """Bytes that narrowing a mask and widening its bits read and write. On the CPU: the mask and the bits, twice. Other
    forms take that on CUDA too, and so do bits where a kernel makes them.

    Without one each op of ``runtime/replays/bits.py`` passes over memory. For each element a product of bools moves 2
    bytes, its highest bytes 1 + 1/8, the bits as 32-bit indices 1/8 + 1/2, and the look-up 1/2 + 1: 5.25 in all. An
    element of ``n`` bytes is compared first: n + 1 bytes, then 2 for the product in place; and ``n`` are looked up.
    """
    size_bytes = profile.values[mask].size_bytes
    if profile.device.kind == "cpu" or profile.device.bits_kernel or form_of(profile, mask) != BITS:
        return 2 * (size_bytes + bits_bytes(profile, mask))
    others = 3.25 if profile.values[mask].dtype == BOOL else 5.25
    return 2 * size_bytes + others * _elements(profile, mask)


def _workspace_bytes(profile: Profile, mask: int) -> tuple[int, int]:
    """Bytes inside narrowing a mask, with its bits, and inside widening them. On the CPU torch allocates the bits
    alone, and these count at their save point: numpy does the rest, in parts. On CUDA one op makes each other form, or
    widens it, without memory besides.
    """
    if profile.device.kind == "cpu" or form_of(profile, mask) != BITS:
        return 0, 0
    count, rounded = _elements(profile, mask), profile.rounded_bytes
    part_bytes = min(bits_bytes(profile, mask), DEVICE_PART // 8)
    rest_bytes = 8 * ELEMENT_BYTES[profile.values[mask].dtype] if count % 8 else 0
    return rounded(8 * part_bytes) + rounded(bits_bytes(profile, mask)), rounded(4 * part_bytes) + rounded(rest_bytes)


def _tables_bytes(profile: Profile, masks: Collection[int]) -> int:
    """Bytes of the tables by which bits are widened on CUDA: one for bools, and at most one for each other mask."""
    dtypes = {mask: profile.values[mask].dtype for mask in masks if form_of(profile, mask) == BITS}
    tables = {(BOOL if dtype == BOOL else mask): ELEMENT_BYTES[dtype] for mask, dtype in dtypes.items()}
    return sum(profile.rounded_bytes(8 * TABLE_ROWS * size_bytes) for size_bytes in tables.values())


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
        op = Op(name=NARROW, layer=values[mask].layer, phase=Phase.FORWARD, duration_s=0.0, inputs=(mask,))
        ops.insert(at, replace(op, workspace_bytes=_workspace_bytes(profile, mask)[0]))
        bits_of[number] = len(values)
        values.append(_bits(profile, mask, born=at, tick=ticks[place] + 2 * place + 1))
    tables_bytes = _tables_bytes(profile, masks.values())
    if profile.device.kind != "cpu" and tables_bytes:
        last_tick = profile.tick_count + 2 * len(masks) - 1
        values.append(held_until("tables that widen bits", tables_bytes, last_tick))
    late = (replace(point, op=point.op + bisect_right(numbers, at)) for at, point in enumerate(profile.points))
    handles, points = with_save_points(replace(profile, points=tuple(late)), values, bits_of)
    return replace(profile, ops=tuple(ops), values=tuple(values), handles=handles, points=points)


def _name(profile: Profile, mask: int) -> str:
    return f"{profile.values[mask].name} as {form_of(profile, mask)}"


def _bits(profile: Profile, mask: int, *, born: int, tick: int) -> Value:
    """The bits of a mask, which are there at their save point only, unless a plan holds them."""
    value, size_bytes, form = profile.values[mask], bits_bytes(profile, mask), form_of(profile, mask)
    return Value(
        name=_name(profile, mask),
        layer=value.layer,
        kind=Kind.TEMPORARY,
        size_bytes=size_bytes,
        dtype=BITS_DTYPE if form == BITS else form,
        shape=(size_bytes if form == BITS else _elements(profile, mask),),
        born=born,
        born_tick=tick,
        forward_death=tick,
        freed=tick,
        unreplayable=NEEDS_INPUT if _is_made_whole(profile, mask) else "",
    )


def replayed_ops(profile: Profile) -> tuple[Op, ...]:
    """The ops as replays run them. Those for bits make the mask of its bits, and take the seconds for narrowing too.

    If the bits are recomputed, nothing is narrowed or widened: the mask is drawn again. So its own writers take these
    seconds less, and both together take those of the writers. An op that makes another result too runs for that alone:
    its mask is freed at once.
    """
    found, ops, writers = narrowed(profile), list(profile.ops), writers_by_value(profile)
    for bits, mask in found.items():
        index, (fresh, *drawing) = profile.values[bits].born, writers[mask]
        reader = next((at for at in range(index, len(ops)) if profile.ops[at].name != NARROW), len(ops))
        seconds, inside = widening_seconds(profile, mask, reader) or 0.0, _workspace_bytes(profile, mask)[1]
        ops[index] = replace(ops[index], duration_s=seconds, inputs=(bits,), outputs=(mask,), workspace_bytes=inside)
        if _is_made_whole(profile, mask):
            others = tuple(value for value in ops[fresh].outputs if value != mask)
            within = _inside(profile, mask, ops[fresh])
            ops[fresh] = replace(ops[fresh], outputs=others, workspace_bytes=within, blocks=())
            continue
        drawing_s = sum(ops[op].duration_s for op in drawing)
        rest_s = max(0.0, ops[fresh].duration_s + drawing_s - seconds)
        for op in drawing:
            own_s = rest_s * (ops[op].duration_s / drawing_s) if drawing_s > 0 else 0.0
            ops[op] = replace(ops[op], duration_s=own_s, workspace_bytes=_inside(profile, mask, ops[op]), blocks=())
    return tuple(ops)


def _inside(profile: Profile, mask: int, op: Op) -> int:
    """Bytes inside an op that draws a mask again: also the mask, which counts as a result only where it is widened."""
    return profile.rounded_bytes(op.workspace_bytes) + profile.rounded_bytes(profile.values[mask].size_bytes)


SOURCES, NARROWED = "sources", "narrow"
SMALLER = SOURCES, NARROWED
"""What a plan may hold in place of saved values, by the name that leaves it out."""


def with_smaller(profile: Profile, without: Collection[str] = ()) -> Profile:
    """The profile with all smaller forms of saved values that a plan may hold, except for those of ``without``."""
    if SOURCES not in without:
        profile = with_sources(profile)
    return profile if NARROWED in without else with_bits(profile)


def as_planned(profile: Profile, plan: Plan) -> Profile:
    """The profile with the values, handles and points that the plan, which was made from it, is about."""
    if any(value.source and not value.bits for value in plan.values):
        profile = with_sources(profile)
    return with_bits(profile, {value.name for value in plan.values if value.bits})
