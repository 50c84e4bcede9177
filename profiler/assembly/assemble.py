"""Assembly: a captured step, its durations and its machine become a Profile."""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from poochplan.formats.files import package_version
from poochplan.formats.occupancy import Floats, held_until, live_bytes
from poochplan.formats.profile import (
    Device,
    Host,
    Kind,
    Link,
    Memory,
    Op,
    Phase,
    Point,
    PointKind,
    Profile,
    RuntimeCost,
    StepFacts,
    Value,
)
from poochplan.formats.profile_parts import LOSS_IS_HELD, OptimizerState, rounded_up
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.captured import CapturedOp, CapturedValue
from poochplan.profiler.capture.op_blocks import stray_values
from poochplan.runtime.applying import model_signature
from poochplan.runtime.compiled_hooks import hooks_for
from poochplan.runtime.devices.allocator import in_session
from poochplan.runtime.devices.backend import backend_of
from poochplan.tensors.host_memory import available_bytes
from poochplan.tensors.signatures import kernel_switches
from poochplan.torch_private.tensor_internals import is_training
from poochplan.units import format_bytes

from .reconcile import PhaseSeconds, reconcile

EVAL_MODE = "the model was in eval mode: no dropout, no batch statistics"

UNWRITTEN = "leaves some of its bytes unwritten"
"""The end of the reason why outputs of such an op are not replayed."""

SWAPPED = (
    "every saved value was on the host while profiling: step times are estimates from steps that swap everything, "
    "minus the time of swapping"
)


def assemble(
    capture: Capture,
    kinds: dict[int, Kind],
    runs: Floats,
    measured: list[PhaseSeconds],
    *,
    link: Link,
    workload: str,
    mode: Literal["run", "swap-all", "fake"],
    device: Device,
    notes: list[str],
    optimizers: tuple[OptimizerState, ...],
    accumulate: bool,
    held_bytes: Mapping[tuple[str, Kind], int],
) -> Profile:
    """The profile: seconds of its ops, (steps, ops), reconciled with the ``measured`` steps, and the in-core peak of
    its lifetimes. ``held_bytes``: other memory that exists all step long, by name and kind.
    """
    seconds = reconcile([op.phase for op in capture.ops], [op.layer for op in capture.ops], runs, measured)
    ops = build_ops(capture, seconds.durations_s, seconds.spreads_s)
    points = tuple(capture.points)
    last_tick = len(ops) + len(points) - 1
    values = build_values(capture, kinds, last_tick)
    fingerprint = ops_fingerprint(ops, points, values)
    values += tuple(
        held_until(f"before/{name}", size_bytes, last_tick, before=kind)
        for (name, kind), size_bytes in held_bytes.items()
        if size_bytes
    )
    draft = Profile(
        workload=workload or type(capture.model).__name__,
        mode=mode,
        device=device,
        versions=versions_here(device.kind),
        switches=kernel_switches(device.kind),
        host=this_host(),
        model=model_signature(capture.model),
        inputs=capture.inputs or (),
        ops_fingerprint=fingerprint,
        times=seconds.times,
        layer_times=seconds.layer_times,
        in_core_peak_bytes=0,
        memory=capture.workspace.memory,
        in_core_peak_layer="",
        static_bytes={},
        gradients_live_through_forward=accumulate,
        link=link,
        facts=step_facts(capture),
        optimizers=optimizers,
        notes=tuple(notes),
        ops=ops,
        values=values,
        handles=tuple(capture.handles),
        points=points,
    )
    strays = stray_values(capture.workspace.strays, draft.op_ticks, draft.tick_count)
    values += strays
    ops, carried = with_carried(capture, ops, draft.op_ticks, len(values))
    ops = tuple(
        msgspec.structs.replace(op, adds_in_place=True) if _adds_in_place(draft, op, tick, captured.adds_to) else op
        for op, tick, captured in zip(ops, draft.op_ticks, capture.ops, strict=True)
    )
    return _with_peak(msgspec.structs.replace(draft, ops=ops, values=(*values, *carried)))


def _adds_in_place(draft: Profile, op: Op, tick: int, first: int) -> bool:
    """Whether the first summand, which an earlier node has made, ends with the op: then nothing else has held it."""
    if first < 0 or len(op.outputs) != 1 or op.writes or op.blocks:
        return False
    held, found = draft.values[first], draft.values[op.outputs[0]]
    return held.freed == tick and (held.size_bytes, held.dtype) == (found.size_bytes, found.dtype)


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
    saved = {handle.value for handle in capture.handles}
    first_use = {  # of the points of a value the first one counts, so it comes last
        capture.handles[point.handle].value: point.op + index
        for index, point in reversed(list(enumerate(capture.points)))
        if point.kind is PointKind.USE
    }
    names = value_names(capture, kinds)
    writers = _writers(capture)
    left_over = capture.left_over
    values = []
    for number, captured in enumerate(capture.values):
        was_there = captured.born < 0 and captured.born_tick is None
        kind = Kind.INPUT if was_there else Kind.ACTIVATION if number in saved else Kind.TEMPORARY
        ends = (captured.died, captured.let_go) if capture.lifetimes.is_saved(number) else (captured.died,)
        died = last_tick if captured.died is None else max(0, captured.died)  # it may die before the first op
        freed = max(died, *(last_tick if at is None else at for at in ends))
        lives_on = freed == last_tick if left_over is None else number in left_over
        values.append(
            Value(
                name=names[number],
                layer=captured.layer,
                kind=kinds.get(number) or kind,
                size_bytes=captured.size_bytes,
                dtype=captured.dtype,
                shape=captured.shape,
                born=captured.born,
                born_tick=captured.born_tick,
                forward_death=died,
                freed=freed,
                gone_by_next=captured.born >= 0 and freed == last_tick and not lives_on,
                stretch_of=captured.stretch_of,
                pinned=_pinned(captured, died, first_use.get(number), lives_on=lives_on) if number in saved else "",
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
            held_until(
                f"{op.layer or 'step'}/within {op.phase}#{number}.{index + 1}", size_bytes, last, number, layer=op.layer
            )
            for index, (size_bytes, until) in enumerate(op.carried)
            for last in (op_ticks[place[id(until)]] - (op.phase is Phase.BACKWARD),)
        ]
    return tuple(found), tuple(values)


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


def _pinned(captured: CapturedValue, died: int, first_use: int | None, *, lives_on: bool) -> str:
    if captured.pinned_because:
        return captured.pinned_because
    if captured.born < 0:
        return "input of the step: held by the caller, or made outside torch or by a compiled function"
    if first_use is None and lives_on:
        return "saved for an output that outlives the step, and that backward does not use"
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
        if op.early:
            return f"{op.name} runs before the model is called"
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
    """Unique names: ``layer/operator`` of the op that created the value; later ones have ``#2`` and so on."""
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


def _with_peak(draft: Profile) -> Profile:
    curve, live = live_bytes(draft), msgspec.structs.replace(draft, memory=Memory.LIVE)
    peak_tick = int(np.argmax(curve))
    peak_op = min(int(np.searchsorted(draft.op_ticks, peak_tick)), len(draft.ops) - 1)
    static_bytes = {
        str(kind): sum(rounded_up(value.size_bytes) for value in draft.values if value.kind is kind)
        for kind in (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER_STATE, Kind.INPUT)
    }
    library_bytes = sum(rounded_up(value.size_bytes) for value in draft.values if value.kind is Kind.LIBRARY)
    if library_bytes:
        static_bytes[str(Kind.LIBRARY)] = library_bytes
    return msgspec.structs.replace(
        draft,
        static_bytes=static_bytes,  # of small values too, whichever memory the peaks count
        in_core_peak_bytes=int(curve[peak_tick]),
        in_core_live_peak_bytes=int(live_bytes(live, workspace=False).max()),
        in_core_peak_layer=draft.ops[peak_op].layer,
    )


def this_machine(where: torch.device) -> Device:
    """The machine on which the step was measured."""
    if where.type != "cpu":
        there = backend_of(where)
        return Device(
            kind=where.type,
            name=there.name(),
            memory_bytes=there.total_bytes(),
            host_bytes=available_bytes(),
            expands=where.type != "cuda" or in_session().expand,
        )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        kind="cpu",
        name=platform.processor() or platform.machine(),
        memory_bytes=memory_bytes,
        threads=torch.get_num_threads(),
    )


def step_notes(capture: Capture, kinds: dict[int, Kind], *, is_fake: bool) -> list[str]:
    """Notes on the captured step that do not depend on times: on saved tensors about which no plan decides, on values
    that only Python's garbage collector has freed, on what the step before has left, and on compiled backwards.
    """
    notes, outside = [], "the step, outside the model"
    if capture.kept:
        kind, layer, _ = capture.kept[0]
        notes.append(
            "saved tensors that are sparse, nested or of a subclass are always kept: "
            f"{format_bytes(_kept_bytes(capture))} in {len(capture.kept)}, first {kind} in {layer or outside}"
        )
    if capture.garbage:
        first, held = min(capture.garbage), format_bytes(_garbage_bytes(capture))
        notes.append(
            f"values that only Python's garbage collector frees: {len(capture.garbage)} ({held}), first "
            f"{value_names(capture, kinds)[first]} in {capture.values[first].layer or outside}; a training loop holds "
            "up to that much more than a plan's budget for each step since the last collection; break the reference "
            "cycle (a closure or an attribute that refers to itself), or call gc.collect() after each step"
        )
    if capture.inherited_bytes:
        notes.append(
            f"{LOSS_IS_HELD}, as loops do: in forward there are {format_bytes(capture.inherited_bytes)} that the step "
            "before has left, on nodes of its graph, in attributes or for outputs; a loop that lets go of its loss "
            "takes less"
        )
    why = "" if is_fake else hooks_for(capture.model).why_none_deferred(capture.device_type)
    return [*notes, f"compiled backwards get all their saved tensors back at once: {why}"] if why else notes


def model_notes(model: torch.nn.Module) -> list[str]:
    """Notes on a model in eval mode, or with a part in eval mode."""
    resting = [(name, module) for name, module in model.named_modules() if not is_training(module)]
    if not resting:
        return []
    if len(resting) == sum(1 for _ in model.modules()):
        return [EVAL_MODE]
    name, module = resting[0]
    first = f"{name} ({type(module).__name__})" if name else "the model itself"
    return [f"modules in eval mode: {len(resting)}, first {first}: no dropout, no batch statistics there"]


def step_facts(capture: Capture) -> StepFacts:
    """How the captured step was run."""
    modules = list(capture.model.modules())
    return StepFacts(
        modules=len(modules),
        eval_modules=sum(not is_training(module) for module in modules),
        checkpointed=tuple(capture.tracker.ran_again),
        garbage_bytes=_garbage_bytes(capture),
        kept_bytes=_kept_bytes(capture),
        unmeasured_regions=capture.compiled_calls.unmeasured,
        graph_mode=hooks_for(capture.model).written_replays(capture.model) is not None,
        unmeasured_ops=capture.unmeasured_ops,
    )


def _kept_bytes(capture: Capture) -> int:
    return sum({key: size for _, _, parts in capture.kept for key, size in parts.items()}.values())


def _garbage_bytes(capture: Capture) -> int:
    return sum(capture.values[number].size_bytes for number in capture.garbage)


def runtime_notes(cost: RuntimeCost | None) -> list[str]:
    """Notes on those of the launching thread's seconds that could not be measured."""
    if cost is None or not cost.unmeasured:
        return []
    return [
        f"of the launching thread's costs, {', '.join(cost.unmeasured)} could not be distinguished from 0 and counts "
        "as 0; profile again on a quieter machine"
    ]


def this_host() -> Host:
    return Host(processor=processor_name(), system=platform.system(), cores=os.cpu_count() or 0)


def versions_here(device: str) -> dict[str, str]:
    """Versions of poochplan, torch and Python; on the device ``"cuda"`` also of CUDA and cuDNN."""
    versions = {"poochplan": package_version(), "torch": str(torch.__version__), "python": platform.python_version()}
    if device == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": cudnn_version()}
    return versions


def cudnn_version() -> str:
    """cuDNN's version, or why there is none: torch refuses one that is not its own."""
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError as error:
        return str(error).partition("\n")[0]


def processor_name() -> str:
    """The processor's model as the kernel gives it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()
