"""Assembly: a captured step, its durations and its machine become a Profile."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np
import torch

from poochplan.formats.links import preset_link
from poochplan.formats.occupancy import held_until, live_bytes
from poochplan.formats.profile import Device, Kind, Link, Memory, Phase, Profile
from poochplan.formats.profile_parts import rounded_up
from poochplan.profiler.allocations.op_blocks import stray_values
from poochplan.profiler.capture.capture import Capture
from poochplan.runtime.model_check import model_signature
from poochplan.tensors.switches import kernel_switches

from .notes import step_facts, this_host, versions_here
from .reconcile import Floats, PhaseSeconds, reconcile
from .values import build_handles, build_ops, build_points, build_values, ops_fingerprint, with_carried


def assemble(
    capture: Capture,
    kinds: dict[int, Kind],
    runs: Floats,
    measured: list[PhaseSeconds],
    *,
    model: torch.nn.Module,
    link: Link,
    workload: str,
    mode: Literal["run", "swap-all", "fake"],
    device: Device,
    notes: list[str],
    accumulate: bool,
    held_bytes: Mapping[str, int] = MappingProxyType({}),
) -> Profile:
    """The profile: seconds of its ops, (steps, ops), reconciled with the ``measured`` steps, and the in-core peak of
    its lifetimes. ``held_bytes``: what else is there all step long, by name.
    """
    seconds = reconcile([op.phase for op in capture.ops], [op.layer for op in capture.ops], runs, measured)
    ops, points = build_ops(capture, seconds.durations_s, seconds.spreads_s), build_points(capture)
    last_tick = len(ops) + len(points) - 1
    values = build_values(capture, kinds, last_tick)
    fingerprint = ops_fingerprint(ops, points, values)
    values += tuple(
        held_until(f"before/{name}", size_bytes, last_tick) for name, size_bytes in held_bytes.items() if size_bytes
    )
    draft = Profile(
        workload=workload or type(model).__name__,
        mode=mode,
        device=device,
        versions=versions_here(device.kind),
        switches=kernel_switches(device.kind),
        host=this_host(),
        model=model_signature(model),
        inputs=capture.inputs or (),
        ops_fingerprint=fingerprint,
        times=seconds.times,
        layer_times=seconds.layer_times,
        in_core_peak_bytes=0,
        memory=capture.memory,
        in_core_peak_layer="",
        static_bytes={},
        gradients_live_through_forward=accumulate,
        link=link,
        facts=step_facts(model, capture),
        notes=tuple(notes),
        ops=ops,
        values=values,
        handles=build_handles(capture),
        points=points,
    )
    strays = stray_values(capture.strays(), draft.op_ticks, draft.tick_count)
    values += strays
    ops, carried = with_carried(capture, ops, draft.op_ticks, len(values))
    return _with_peak(msgspec.structs.replace(draft, ops=ops, values=(*values, *carried)))


def untimed(
    capture: Capture,
    kinds: dict[int, Kind],
    model: torch.nn.Module,
    mode: Literal["run", "fake"],
    *,
    accumulate: bool = False,
) -> Profile:
    """A profile for its values and lifetimes alone: the link is a preset, and no step was timed."""
    return assemble(
        capture,
        kinds,
        capture.durations(),
        [dict.fromkeys(Phase, 0.0)],
        model=model,
        link=preset_link("pcie4"),
        workload="",
        mode=mode,
        device=this_machine(torch.device("cpu")),
        notes=[],
        accumulate=accumulate,
    )


def _with_peak(draft: Profile) -> Profile:
    curve, live = live_bytes(draft), msgspec.structs.replace(draft, memory=Memory.LIVE)
    peak_tick = int(np.argmax(curve))
    peak_op = min(int(np.searchsorted(draft.op_ticks, peak_tick)), len(draft.ops) - 1)
    return msgspec.structs.replace(
        draft,
        static_bytes=_static_bytes(draft),
        in_core_peak_bytes=int(curve[peak_tick]),
        in_core_live_peak_bytes=int(live_bytes(live, workspace=False).max()),
        in_core_peak_layer=draft.ops[peak_op].layer,
    )


def _static_bytes(draft: Profile) -> dict[str, int]:
    """Each value rounded up, however small, whatever peaks count."""
    kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER_STATE, Kind.INPUT)
    return {
        str(kind): sum(rounded_up(value.size_bytes) for value in draft.values if value.kind is kind) for kind in kinds
    }


def this_machine(where: torch.device) -> Device:
    """What the step was measured on."""
    if where.type == "cuda":
        facts = torch.cuda.get_device_properties(where)
        return Device(kind="cuda", name=facts.name, memory_bytes=facts.total_memory)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        kind="cpu",
        name=platform.processor() or platform.machine(),
        memory_bytes=memory_bytes,
        threads=torch.get_num_threads(),
    )
