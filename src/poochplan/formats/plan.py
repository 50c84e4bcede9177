"""The Plan: one decision for each saved value, and what the runtime does at which point of its clock."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import msgspec

from poochplan.units import format_bytes, format_copies, format_seconds, share_of_peak

from .files import Document, beyond, numbered
from .plan_prediction import Prediction as Prediction
from .plan_prediction import Solve as Solve
from .plan_prediction import SolveStatus as SolveStatus
from .profile_parts import (
    HOST_ALIGNMENT_BYTES,
    Bytes,
    Count,
    Host,
    Index,
    IndexOrNone,
    Input,
    Link,
    Memory,
    ModelSignature,
    Offset,
    Shape,
    Text,
    host_aligned,
)
from .state_chunk import StateChunk as StateChunk
from .state_chunk import state_faults

SCHEMA_VERSION = 10
"""Version 2 has what ended the search (``evaluations``, ``seed``); 3 has the runtime's own seconds in the step; 4 has
what the peaks count, and the layout of an arena; 5 has what is recomputed inside compiled graphs; 6 has overheads
relative to PyTorch alone; 7 has sources (``PlannedValue.source``). Files of 8 and 9 may hold values in narrow forms,
which are refused; 10 has chunks of optimizer state (``StateChunk``)."""
RUNTIME_IN_STEP = 3
"""The first version whose ``Prediction.step_s`` holds ``runtime_s``."""
MOST_OF_COPIES = 10
"""The copies of a step, one after the other, take at most so many times its seconds, or the seconds of a clock."""


class Decision(StrEnum):
    """The three fates of a saved value."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


class PlannedValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """One saved value, in the order of first packs: its position in ``Plan.values`` is its save point.

    A field that it does not have would change what the runtime does: such plans of other releases are refused.
    """

    name: Text
    layer: Text
    decision: Decision
    size_bytes: Bytes
    dtype: Text
    shape: Shape
    """Shape and dtype of the tensor at its first pack."""
    host_offset: Offset = -1
    """Byte offset in the host slab or spill file; -1 when the value is not swapped."""
    why: Text = ""
    """Why no other decision was possible: it is pinned, or too small to matter."""
    source: bool = False
    """Whether autograd does not save it, but a copy that takes more bytes: the next value. Its save point is then
    directly before that of the copy, and its handle is never unpacked."""
    until: IndexOrNone = -1
    """Of a source: the last save point of a value whose replay starts from it; -1 if none does, and nothing is held."""


class PointActions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the runtime does at one point of its clock, in the order of the fields."""

    at: Literal["save", "use"]
    index: Index
    """Save point: index into ``Plan.values``. Use point: index into ``Plan.uses``."""
    swap_out: tuple[Index, ...] = ()
    """Values whose copy to the host starts here. At their own save point or later."""
    release: tuple[Index, ...] = ()
    """Values whose copy is waited for here and whose device buffer is then given up by the runtime."""
    prefetch: tuple[Index, ...] = ()
    """Values whose device buffer is allocated here and whose copy back starts here."""
    replay: tuple[Index, ...] = ()
    """Values recomputed here, in this order."""
    record: Literal["on", "off", ""] = ""
    """Switches the recording of ops for replay on or off, from the next op on."""


OUTSIDE = -1
"""The offset of a block that does not lie in the arena."""


class Place(NamedTuple):
    """Where one block of a planned step lies in the arena."""

    point: Index
    """Number of points of the runtime's clock that have been passed when the block is taken."""
    size_bytes: Bytes
    """Bytes as requested."""
    offset: Offset
    """In the arena, or ``OUTSIDE``."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The arena of a planned step, and the places of its blocks."""

    arena_bytes: Bytes
    least_bytes: Bytes
    """Smaller blocks lie outside; so do those from before the first point."""
    places: tuple[Place, ...]
    """The places of all blocks of at least that size after the first point, in the order in which they are taken."""


class Instructions(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime does in one step, and how it recognises that step. It contains no predictions."""

    record_from_start: bool = False
    values: tuple[PlannedValue, ...] = ()
    handles: tuple[Index, ...] = ()
    uses: tuple[Index, ...] = ()
    schedule: tuple[PointActions, ...] = ()


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """The place at which a step left its plan: what was planned there, and what was found."""

    step: Count = 0
    """Number of the step in the session, from 1 on."""
    at: Literal["save", "pack", "use"]
    """A save point, the pack of a further handle, or a use point."""
    index: Index
    """Index of that point in ``Plan.values``, ``Plan.handles`` or ``Plan.uses``."""
    layer: Text
    """Layer of the planned value; empty outside the model, and if nothing was planned there."""
    value: Text
    """Name of the planned value; empty if nothing was planned there."""
    planned: Text
    found: Text


class Plan(Document, frozen=True, kw_only=True, dict=True):
    """A plan for one model, one step and one budget: :class:`Instructions` and predictions."""

    newest: ClassVar[int] = SCHEMA_VERSION
    heading: ClassVar[str] = "Plan for {}"
    kind: Literal["plan"] = "plan"
    schema_version: int = SCHEMA_VERSION
    workload: Text
    profile_fingerprint: Text
    budget_bytes: Bytes
    on: Literal["allocated", "reserved"] = "allocated"
    """Whether the budget covers the bytes that torch's allocator takes from a GPU, instead of those in use."""
    device: Text
    """The type of device that it runs on, as torch names it: ``cpu``, ``cuda`` or another accelerator's."""
    versions: dict[Text, Text] = msgspec.field(default_factory=dict)
    """Versions of its profile, torch included, and of the poochplan that planned; empty in older files."""
    switches: dict[Text, Text] = msgspec.field(default_factory=dict)
    """Settings of torch when it was profiled; a run under others gives a warning."""
    host: Host | None = None
    """The machine that measured its profile; None if unknown."""
    estimate: bool = False
    """Whether its times were not measured on the real device."""
    assumed: tuple[Text, ...] = ()
    """What its profile assumes instead of measuring: another link, memory or compute."""
    roofline: Text = ""
    """The device whose roofline gave its profile's durations; the runtime runs such a plan only if forced."""
    gradients_live_through_forward: bool = False
    static_bytes: dict[Text, Bytes] = msgspec.field(default_factory=dict)
    """Bytes by kind that existed before the profiled step; empty in older files."""
    solve: Solve
    prediction: Prediction
    link: Link
    notes: tuple[Text, ...] = ()
    record_from_start: bool = False
    """Whether recording for replays is on before the first save point."""
    model: ModelSignature
    inputs: tuple[Input, ...] = ()
    """``path dtype[shape]`` of each tensor that the model is called with; a :class:`PlanSet` chooses by them."""
    values: tuple[PlannedValue, ...]
    handles: tuple[Index, ...]
    """Value of each handle, in pack order."""
    uses: tuple[Index, ...]
    """Handle of each use point, in order."""
    schedule: tuple[PointActions, ...]
    """The points that have actions, in the order of the clock."""
    state: tuple[StateChunk, ...] = ()
    """The chunks of all optimizers of which some state is streamed, in the order in which they are stepped. Empty if
    all state stays on the device: optimizers then step as without a session."""
    layout: Layout | None = None
    """The places of its blocks in an arena; None without one."""
    replays: tuple[Text, ...] = ()
    """Values that are recomputed inside compiled graphs, as ``graph/node``, if :func:`poochplan.compile` made the
    plan."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of instructions, model, inputs and budget, without predictions."""
        state = (self.state,) if self.state else ()
        content = (self.instructions, self.model.fingerprint, self.inputs, self.budget_bytes, *state)
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]

    @property
    def holds_arena(self) -> bool:
        """Whether the device is the CPU and the budget covers the arena and everything outside it. The runtime then
        uses the arena by default.
        """
        peak_bytes = self.prediction.arena_peak_bytes
        return self.device == "cpu" and peak_bytes is not None and peak_bytes <= self.budget_bytes

    @cached_property
    def instructions(self) -> Instructions:
        """The instructions alone, without predictions."""
        return Instructions(**{name: getattr(self, name) for name in Instructions.__struct_fields__})

    @property
    def counted_text(self) -> str:
        """Which bytes the budget covers, in words."""
        if self.holds_arena:
            return "one arena for the step, and what lies outside it"
        if self.on == "reserved":
            return "reserved bytes: all that torch's allocator takes from the GPU"
        if self.prediction.memory is Memory.ALLOCATED:
            return "allocated bytes: tensors, and what ops take and give back inside"
        return "live bytes of tensors"

    def rows(self) -> dict[str, str]:
        """The prediction and how it was found, in words."""
        promised, solve = self.prediction, self.solve
        in_core_bytes, whole = promised.in_core_peak_bytes, "the in-core peak"
        if self.on == "reserved" and promised.in_core_reserved_bytes:
            in_core_bytes, whole = promised.in_core_reserved_bytes, "what the in-core step reserves"
        found = f"by {solve.policy}; bound by {solve.solver}; {solve.status} after {format_seconds(solve.wall_s)}"
        if solve.solver == "none":
            found = f"{solve.policy}, without a solver, in {format_seconds(solve.wall_s)}"
        rows = {
            "budget": f"{format_bytes(self.budget_bytes)} ({share_of_peak(self.budget_bytes, in_core_bytes):.0%} of "
            f"{whole}, {format_bytes(in_core_bytes)})",
            "budget is on": self.counted_text,
            "predicted peak": promised.peak_text,
            **self._reserved_rows(),
            **self.arena_rows(),
            "predicted step": f"{format_seconds(promised.step_s)} ({promised.in_core_text})",
            "predicted overhead": f"{promised.overhead:+.1%}",
        }
        if solve.bound_s is not None and solve.gap is not None:
            least = "-" if self.bound_overhead is None else f"{self.bound_overhead:+.1%}"
            rows["no plan is better than"] = f"{least} (gap {solve.gap:.2%} of the step)"
        if kept_s := promised.kept_step_s:
            rows["beside keeping all"] = (
                f"{promised.step_s / kept_s - 1:+.1%} of {format_seconds(kept_s)}, the same session's step that keeps "
                "everything"
            )
        return rows | {
            "of that": promised.causes_text,
            "bytes swapped": format_copies(promised.out_bytes, promised.in_bytes),
            "decisions": ", ".join(
                f"{decision} {len(sizes)} ({format_bytes(sum(sizes))})" for decision, sizes in self.decided().items()
            ),
            **self._source_rows(),
            **self._state_rows(),
            "found": found,
            **numbered("assumed", self.assumed),
            **numbered("note", self.notes),
        }

    def decided(self) -> dict[Decision, list[int]]:
        """The sizes of the saved values with each decision."""
        return {one: [value.size_bytes for value in self.saved if value.decision == one] for one in Decision}

    @property
    def covered_bytes(self) -> int:
        """Predicted bytes of what the budget covers."""
        return self.prediction.covered_bytes(self.on)

    @property
    def bound_overhead(self) -> float | None:
        """Proven: no plan within the budget has a smaller overhead. None if nothing is proven."""
        bound_s, in_core_s = self.solve.bound_s, self.prediction.in_core_step_s
        return bound_s / in_core_s - 1 if bound_s is not None and in_core_s > 0 else None

    @property
    def usable_bytes(self) -> int:
        """Bytes of the budget that may be in use; beside them is what the allocator is predicted to take more."""
        return self.budget_bytes - (self.covered_bytes - self.prediction.covered_bytes("allocated"))

    @cached_property
    def saved(self) -> tuple[PlannedValue, ...]:
        """The values that autograd saves: those that are no sources."""
        return tuple(value for value in self.values if not value.source)

    def sources(self) -> dict[Decision, list[int]]:
        """The sizes of the sources with each decision; those from which no replay starts are left out."""
        held = [value for value in self.values if value.source and value.until >= 0]
        return {one: [value.size_bytes for value in held if value.decision == one] for one in Decision}

    def _source_rows(self) -> dict[str, str]:
        """A row about the sources that stand for larger copies; empty without them."""
        held = {decision: sizes for decision, sizes in self.sources().items() if sizes}
        text = ", ".join(f"{decision} {len(sizes)} ({format_bytes(sum(sizes))})" for decision, sizes in held.items())
        return {"sources of larger copies": text} if held else {}

    def _state_rows(self) -> dict[str, str]:
        """A row about optimizer state in the host tier; empty if none is streamed."""
        if not self.state:
            return {}
        moved = [chunk.size_bytes for chunk in self.state if chunk.streamed]
        whole = format_bytes(sum(chunk.size_bytes for chunk in self.state))
        text = f"{len(moved)} of {len(self.state)} chunks streamed ({format_bytes(sum(moved))} of {whole})"
        return {"optimizer state": text}

    def _reserved_rows(self) -> dict[str, str]:
        """A row on what the allocator reserves on a GPU; empty on the CPU."""
        found = self.prediction
        if found.reserved_peak_bytes is None or found.unexpanded_peak_bytes is None:
            return {}
        expanding, other = format_bytes(found.reserved_peak_bytes), format_bytes(found.unexpanded_peak_bytes)
        text = f"{expanding} with expandable segments, {other} without"
        if self.on == "reserved" and self.covered_bytes > self.budget_bytes:
            text = f"{text}; ABOVE THE BUDGET"
        return {"predicted reserved": text}

    def arena_rows(self) -> dict[str, str]:
        """Rows on the arena of a step measured on the CPU, and whether the compiled allocator was missing."""
        found = self.prediction
        if self.device != "cpu" or self.roofline or not found.arena_bytes or not found.arena_live_bytes:
            return {}
        above = found.arena_bytes / found.arena_live_bytes - 1
        text = f"{format_bytes(found.arena_bytes)} for all that the step makes, {above:.1%} above its live peak"
        if found.arena_peak_bytes is not None:
            text = f"{text}; {format_bytes(found.arena_peak_bytes)} with what lies outside"
        if not self.holds_arena:
            text = f"{text}, ABOVE THE BUDGET: only pooch run --arena on serves steps from it"
        rows = {"arena": text}
        if found.memory is Memory.LIVE and not self.estimate:
            rows["no allocator"] = (
                "the profile does not have the memory inside ops; install g++ or clang++ if it is missing (see pooch "
                "doctor), and profile again"
            )
        return rows

    def faults(self) -> Iterator[str]:
        values, handles, uses = len(self.values), len(self.handles), len(self.uses)
        yield from beyond("handles[{}]", self.handles, values, "values")
        yield from beyond("uses[{}]", self.uses, handles, "handles")
        if list(dict.fromkeys(self.handles)) != list(range(values)):
            yield f"handles: expected {values} values in the order of first handles, found another order, or fewer"
        if len(set(self.uses)) != uses:
            yield "uses: expected each handle once, found one twice"
        yield from _source_faults(self)
        yield from _places_on_host(self.values)
        yield from _schedule_faults(self)
        yield from state_faults(self.state)
        yield from _layout_faults(self)
        yield from _copies_that_do_not_end(self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan; raises ``UsageError`` or ``InputFileError`` with one clear line."""
        found = super().load(path)
        old = found.prediction
        if found.schema_version >= RUNTIME_IN_STEP:
            return found
        step_s = old.step_s + old.runtime_s
        overhead = step_s / old.in_core_step_s - 1 if old.in_core_step_s > 0 else 0.0
        return msgspec.structs.replace(found, prediction=msgspec.structs.replace(old, step_s=step_s, overhead=overhead))


def _source_faults(plan: Plan) -> Iterator[str]:
    """A source is followed by its copy, and held for that or a later one; nothing unpacks its only handle."""
    values, used = plan.values, {plan.handles[handle] for handle in plan.uses if handle < len(plan.handles)}
    for number, value in enumerate(values):
        where = f"values[{number}]"
        if value.source and (number + 1 >= len(values) or values[number + 1].source):
            yield f"{where}.source: expected false, because no saved value follows, found true"
        elif value.source and (number in used or plan.handles.count(number) != 1):
            yield f"{where}.source: expected one handle that has no use, found another one, or a use"
        elif not value.source and value.until != -1:
            yield f"{where}.until: expected -1 for a value that is no source, found {value.until}"
        elif value.until != -1 and not number < value.until < len(values):
            yield f"{where}.until: expected a later save point, found {value.until}"


def _places_on_host(values: Sequence[PlannedValue]) -> Iterator[str]:
    """The places do not overlap, and take no more than the sum of their sizes."""
    room_bytes = sum(host_aligned(one.size_bytes) for one in values if one.decision is Decision.SWAP)
    places = []
    for number, value in enumerate(values):
        where = f"values[{number}].host_offset: expected"
        if (value.host_offset >= 0) != (value.decision is Decision.SWAP):
            yield f"{where} one for a value that is swapped and -1 for another, found {value.host_offset}"
        elif value.host_offset % HOST_ALIGNMENT_BYTES and value.host_offset >= 0:
            yield f"{where} a multiple of {HOST_ALIGNMENT_BYTES}, found {value.host_offset}"
        elif value.host_offset + value.size_bytes > room_bytes and value.host_offset >= 0:
            yield f"{where} a place within the {room_bytes} bytes that are swapped, found {value.host_offset}"
        elif value.host_offset >= 0:
            places.append((value.host_offset, value.host_offset + value.size_bytes, number))
    places.sort()
    for (_, end, first), (start, _, second) in pairwise(places):
        if start < end:
            yield f"values[{second}].host_offset: expected a place of its own, found one in that of values[{first}]"


def _copies_that_do_not_end(plan: Plan) -> Iterator[str]:
    swapped_bytes = sum(value.size_bytes for value in plan.values if value.decision is Decision.SWAP)
    copies_s, step_s = plan.link.out_seconds(swapped_bytes), plan.prediction.step_s
    if copies_s > MOST_OF_COPIES * max(step_s, 1.0):
        yield (
            f"link: expected rates that copy all swapped bytes out in about prediction.step_s, {step_s:.3g} s, found "
            f"rates that take {copies_s:.3g} s"
        )


_STEPS = {"swap_out": "", "release": "swap_out", "prefetch": "release", "replay": ""}
"""The actions on a value, and the action that each requires before it."""


def _schedule_faults(plan: Plan) -> Iterator[str]:
    values, before = len(plan.values), (-1, -1)
    last: dict[int, str] = {}
    for number, actions in enumerate(plan.schedule):
        where = f"schedule[{number}]"
        is_use = actions.at == "use"
        count = len(plan.uses) if is_use else values
        if actions.index >= count:
            yield f"{where}.index: expected less than {count}, the number of {actions.at}s, found {actions.index}"
        if (is_use, actions.index) <= before:
            yield f"{where}: expected points in the order of the clock, found {actions.at} {actions.index} too late"
        before = is_use, actions.index
        saved = values if is_use else actions.index + 1
        for name, needed in _STEPS.items():
            for place, value in enumerate(getattr(actions, name)):
                yield from _action_fault(plan, f"{where}.{name}[{place}]", name, needed, value, saved, last)


def _action_fault(
    plan: Plan, where: str, name: str, needed: str, value: int, saved: int, last: dict[int, str]
) -> Iterator[str]:
    """``saved``: the number of values that exist by then. ``last``: the last action on each value."""
    if value >= saved:
        yield f"{where}: expected one of {saved} values that are saved by then, found {value}"
        return
    decision = Decision.RECOMPUTE if name == "replay" else Decision.SWAP
    if plan.values[value].decision is not decision:
        yield f"{where}: expected a value whose decision is {decision}, found {plan.values[value].decision}"
    elif last.get(value, "") != needed:
        wanted = f"after its {needed}" if needed else "first"
        found = last.get(value) or "nothing"
        yield f"{where}: expected {name} of value {value} once, {wanted}, found it after {found}"
    last[value] = name


def _layout_faults(plan: Plan) -> Iterator[str]:
    if plan.layout is None:
        return
    points, before, arena_bytes = len(plan.values) + len(plan.uses), 0, plan.layout.arena_bytes
    for number, place in enumerate(plan.layout.places):
        where = f"layout.places[{number}]"
        if not before <= place.point <= points:
            yield f"{where}: expected a point from {before} to {points}, found {place.point}"
        at, size_bytes = place.offset, place.size_bytes
        if at != OUTSIDE and at + size_bytes > arena_bytes:
            yield f"{where}: expected a place within arena_bytes, {arena_bytes}, found {size_bytes} bytes at {at}"
        before = place.point
