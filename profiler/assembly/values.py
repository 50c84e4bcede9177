"""Kinds, names and lifetimes of a Profile, from a capture and timings. Pure functions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import msgspec

from poochplan.formats.profile import Handle, Kind, Op, Phase, Point, PointKind, Value
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.captured import CapturedOp, CapturedValue
from poochplan.profiler.capture.op_blocks import temporary

UNWRITTEN = "leaves some of its bytes unwritten"
"""The end of the reason why outputs of such an op are not replayed."""


def build_ops(capture: Capture, durations_s: list[float], spreads_s: list[float]) -> tuple[Op, ...]:
    """The ops with their reconciled seconds. An allocation that is never written completely counts as opaque."""
    writers = _writers(capture)

    def opaque(op: CapturedOp) -> bool:
        return op.opaque or (op.uninitialised and not all(_overwritten(writers.get(out, [])) for out in op.outputs))

    return tuple(
        Op(
            name=op.name,
            layer=op.layer,
            phase=op.phase,
            duration_s=duration_s,
            spread_s=spread_s,
            inputs=tuple(op.inputs),
            outputs=tuple(op.outputs),
            writes=tuple(op.writes),
            random=op.random,
            opaque=opaque(op),
            workspace_bytes=op.workspace_bytes,
            blocks=op.blocks,
        )
        for op, duration_s, spread_s in zip(capture.ops, durations_s, spreads_s, strict=True)
    )


def build_values(capture: Capture, kinds: dict[int, Kind], last_tick: int) -> tuple[Value, ...]:
    """The values with names, kinds, lifetimes, and the reasons against swapping or recomputing them.

    ``kinds`` gives those known from outside (parameters, buffers, gradients, optimizer state) by value.
    """
    saved = {handle[0] for handle in capture.handles}
    first_use = _first_uses(capture)
    names = value_names(capture, kinds)
    writers = _writers(capture)
    values = []
    for number, captured in enumerate(capture.values):
        kind = kinds.get(number) or _kind(captured, number in saved)
        died = last_tick if captured.died is None else captured.died
        let_go = _let_go(capture, number, last_tick)
        values.append(
            Value(
                name=names[number],
                layer=captured.layer,
                kind=kind,
                size_bytes=captured.size_bytes,
                dtype=captured.dtype,
                shape=captured.shape,
                born=captured.born,
                born_tick=captured.born_tick,
                forward_death=died,
                freed=max(died, let_go),
                stretch_of=captured.stretch_of,
                pinned=_pinned(captured, number in saved, died, first_use.get(number)),
                unreplayable=_unreplayable(capture, number, writers.get(number, [])) if number in saved else "",
            )
        )
    return tuple(values)


def with_carried(
    capture: Capture, ops: tuple[Op, ...], op_ticks: Sequence[int], first: int
) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    """The ops with an additional output for each block that a part of compiled code makes and a later part releases,
    and these blocks as values, numbered from ``first``.

    A block released by a part of a backward is not live at the part's tick, but exists when the part begins. A block
    released by a part of a forward is live at its tick.
    """
    place = {id(op): number for number, op in enumerate(capture.ops)}
    found, values = list(ops), list[Value]()
    for number, op in enumerate(capture.ops):
        if not op.carried:
            continue
        numbers = tuple(range(first + len(values), first + len(values) + len(op.carried)))
        found[number] = msgspec.structs.replace(ops[number], outputs=(*ops[number].outputs, *numbers))
        values += [
            temporary(
                f"{op.layer or 'step'}/within {op.phase}#{number}.{index + 1}", size_bytes, number, last, layer=op.layer
            )
            for index, (size_bytes, until) in enumerate(op.carried)
            for last in (op_ticks[place[id(until)]] - (op.phase is Phase.BACKWARD),)
        ]
    return tuple(found), tuple(values)


def build_handles(capture: Capture) -> tuple[Handle, ...]:
    return tuple(
        Handle(value=value, layer=layer, dtype=dtype, shape=shape) for value, layer, dtype, shape in capture.handles
    )


def build_points(capture: Capture) -> tuple[Point, ...]:
    return tuple(Point(kind=kind, handle=handle, op=op) for kind, handle, op in capture.points)


def ops_fingerprint(ops: tuple[Op, ...], points: tuple[Point, ...], values: tuple[Value, ...]) -> str:
    """Digest of the sequence of ops and points with the values' sizes; independent of machine and durations."""
    digest = hashlib.sha256()
    for op in ops:
        digest.update(f"{op.name}|{op.layer}|{op.phase}|{op.inputs}|{op.outputs}|{op.writes}\n".encode())
    for point in points:
        digest.update(f"{point.kind}|{point.handle}|{point.op}\n".encode())
    for value in values:
        digest.update(f"{value.size_bytes}|{value.dtype}|{value.shape}\n".encode())
    return digest.hexdigest()[:16]


def _first_uses(capture: Capture) -> dict[int, int]:
    """Tick of the first use point of each saved value."""
    first: dict[int, int] = {}
    for index, (kind, handle, op) in enumerate(capture.points):
        if kind is PointKind.USE:
            first.setdefault(capture.handles[handle][0], op + index)
    return first


def _let_go(capture: Capture, number: int, last_tick: int) -> int:
    if number not in capture.saved_values:
        return -1
    let_go = capture.values[number].let_go
    return last_tick if let_go is None else let_go


def _kind(captured: CapturedValue, saved: bool) -> Kind:
    if captured.born < 0 and captured.born_tick is None:
        return Kind.INPUT
    return Kind.ACTIVATION if saved else Kind.TEMPORARY


def _pinned(captured: CapturedValue, saved: bool, died: int, first_use: int | None) -> str:
    if not saved:
        return ""
    if captured.pinned_because:
        return captured.pinned_because
    if captured.born < 0:
        return "input of the step: held by the caller, or made outside torch"
    if first_use is not None and died >= first_use:
        return "held by something other than autograd until backward uses it"
    return ""


def _writers(capture: Capture) -> dict[int, list[CapturedOp]]:
    """The forward ops that create or write each value, in order."""
    writers: dict[int, list[CapturedOp]] = {}
    for op in capture.ops:
        if op.phase is Phase.FORWARD:
            for number in (*op.outputs, *op.writes):
                writers.setdefault(number, []).append(op)
    return writers


def _unreplayable(capture: Capture, number: int, writers: list[CapturedOp]) -> str:
    if capture.values[number].born < 0:
        return "it was there before the step"
    for op in writers:
        if op.opaque:
            return f"{op.name} cannot be run again"
        if number in op.partly_unwritten:
            return f"{op.name} {UNWRITTEN}"
    if writers[0].uninitialised and not _overwritten(writers):
        return f"{writers[0].name} leaves it uninitialised, and the write to it is not seen"
    return ""


def _overwritten(writers: list[CapturedOp]) -> bool:
    """Whether the second writer completely writes the storage that the first one leaves uninitialised."""
    return len(writers) > 1 and writers[1].overwrites in writers[0].outputs


def value_names(capture: Capture, kinds: dict[int, Kind]) -> list[str]:
    """Readable and unique names: ``layer/operator`` of the op that created the value, with ``#2`` and so on for later
    ones.
    """
    seen: Counter[str] = Counter()
    names = []
    for number, captured in enumerate(capture.values):
        if captured.born_tick is not None:
            stem = f"{captured.layer or 'step'}/gathered"
        elif captured.born >= 0:
            parts = capture.ops[captured.born].name.split(".")
            stem = f"{captured.layer or 'step'}/{parts[1] if len(parts) > 1 else parts[0]}"
        else:
            stem = f"before/{kinds.get(number, Kind.INPUT)}"
        seen[stem] += 1
        names.append(stem if seen[stem] == 1 else f"{stem}#{seen[stem]}")
    return names
