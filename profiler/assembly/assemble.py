"""Assembly: a captured step, its durations and its machine become a Profile."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from poochplan.formats.links import preset_link
from poochplan.formats.occupancy import live_bytes
from poochplan.formats.profile import ALLOCATION_UNIT_BYTES, Device, Kind, Link, Phase, Profile, Value
from poochplan.profiler.capture.capture import Capture
from poochplan.runtime.model_check import model_signature

from .reconcile import Floats, PhaseSeconds, reconcile
from .values import build_handles, build_ops, build_points, build_values, ops_fingerprint


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
    values += tuple(_held_value(name, size_bytes, last_tick) for name, size_bytes in held_bytes.items() if size_bytes)
    draft = Profile(
        workload=workload or type(model).__name__,
        mode=mode,
        device=device,
        versions=_versions(device),
        model=model_signature(model),
        inputs=capture.inputs or (),
        ops_fingerprint=fingerprint,
        times=seconds.times,
        layer_times=seconds.layer_times,
        in_core_peak_bytes=0,
        in_core_peak_layer="",
        static_bytes=_static_bytes(values),
        gradients_live_through_forward=accumulate,
        link=link,
        notes=tuple(notes),
        ops=ops,
        values=values,
        handles=build_handles(capture),
        points=points,
    )
    return _with_peak(draft)


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
    curve = live_bytes(draft)
    peak_tick = int(np.argmax(curve))
    peak_op = min(int(np.searchsorted(draft.op_ticks, peak_tick)), len(draft.ops) - 1)
    return msgspec.structs.replace(
        draft, in_core_peak_bytes=int(curve[peak_tick]), in_core_peak_layer=draft.ops[peak_op].layer
    )


def _static_bytes(values: tuple[Any, ...]) -> dict[str, int]:
    kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER_STATE, Kind.INPUT)
    return {
        str(kind): sum(
            -(-v.size_bytes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES for v in values if v.kind is kind
        )
        for kind in kinds
    }


def with_more_beside(profile: Profile, name: str, size_bytes: int) -> Profile:
    """The same, where so many bytes more are there all step long."""
    if size_bytes <= 0:
        return profile
    last_tick = len(profile.ops) + len(profile.points) - 1
    values = (*profile.values, _held_value(name, size_bytes, last_tick))
    more = msgspec.structs.replace(profile, values=values, static_bytes=_static_bytes(values))
    return _with_peak(more)


def _held_value(name: str, size_bytes: int, last_tick: int) -> Value:
    """What is there all step long, such as what cuBLAS holds: part of every peak, and nobody's to decide about."""
    return Value(
        name=f"before/{name}",
        layer="",
        kind=Kind.INPUT,
        size_bytes=size_bytes,
        dtype="uint8",
        shape=(size_bytes,),
        born=-1,
        forward_death=last_tick,
        freed=last_tick,
    )


def _versions(device: Device) -> dict[str, str]:
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    if device.kind == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return versions


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
