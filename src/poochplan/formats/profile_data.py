"""All fields of a profile, and queries that need only these: the base of :class:`~.profile.Profile`."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from .files import Document
from .profile_parts import (
    ALLOCATION_UNIT_BYTES,
    LEAST_COUNTED_BYTES,
    ROOFLINE,
    SCHEMA_VERSION,
    AllocationUnit,
    Bytes,
    Device,
    Handle,
    Host,
    Input,
    LayerTimes,
    Link,
    Memory,
    ModelSignature,
    Op,
    OptimizerState,
    Point,
    RuntimeCost,
    StepFacts,
    StepTimes,
    Text,
    Value,
    rounded_up,
)


class ProfileData(Document, frozen=True, kw_only=True, dict=True):
    """The fields of a :class:`~.profile.Profile`, and queries that need only these fields."""

    kind: Literal["profile"] = "profile"
    schema_version: int = SCHEMA_VERSION
    workload: Text
    mode: Literal["run", "swap-all", "fake"]
    device: Device
    versions: dict[Text, Text]
    """Versions of poochplan, torch and Python; on CUDA also of CUDA and cuDNN."""
    switches: dict[Text, Text] = msgspec.field(default_factory=dict)
    """Torch's switches that decide which kernels a GPU runs: precision, cuDNN, determinism. Empty on the CPU, and in
    files that lack them."""
    host: Host | None = None
    """The machine that it was measured on; None in files that lack it."""
    model: ModelSignature
    inputs: tuple[Input, ...] = ()
    """``path dtype[shape]`` of each tensor that the model is first called with; empty if the step never calls it."""
    ops_fingerprint: Text
    """Digest of the sequence of ops and points, without durations."""
    times: StepTimes
    layer_times: tuple[LayerTimes, ...] = ()
    """Times of each layer; empty if the ops were not timed in several steps."""
    in_core_peak_bytes: Bytes
    """Most bytes live at any tick with everything kept. Each value is rounded up to the allocation unit, and workspace
    is included."""
    in_core_live_peak_bytes: Bytes | None = None
    """The same without workspace; None in profiles of schema 3 and before."""
    memory: Memory = Memory.LIVE
    """Whether workspace is known, and therefore which memory peaks and budgets count."""
    in_core_peak_layer: Text
    static_bytes: dict[Text, Bytes]
    """Bytes that live through the step, by kind."""
    gradients_live_through_forward: bool
    """Whether gradients of the previous step still exist in forward (accumulation)."""
    allocation_unit_bytes: AllocationUnit = ALLOCATION_UNIT_BYTES
    link: Link
    runtime: RuntimeCost | None = None
    """Seconds that ops and the runtime take of the launching thread; None if they were not measured."""
    facts: StepFacts | None = None
    """How the step was run; None in profiles of schema 2 and before."""
    optimizers: tuple[OptimizerState, ...] = ()
    """The optimizers that step the model's parameters, in the order in which they first step; empty in profiles of
    schema 8 and before."""
    notes: tuple[Text, ...] = ()
    assumed: tuple[Text, ...] = ()
    """Assumptions in place of measurements (``planner/whatif.py``); plans made from them are estimates."""
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    handles: tuple[Handle, ...]
    points: tuple[Point, ...]

    @property
    def roofline(self) -> str:
        """Name of the device whose roofline gave the durations; empty when they were measured."""
        named = self.device.name.endswith(ROOFLINE)
        return self.device.name.removesuffix(ROOFLINE) if self.mode == "fake" and named else ""

    @cached_property
    def op_ticks(self) -> tuple[int, ...]:
        """Tick of each op."""
        before = [0] * (len(self.ops) + 1)
        for point in self.points:
            before[point.op] += 1
        ticks, count = [], 0
        for index in range(len(self.ops)):
            count += before[index]
            ticks.append(index + count)
        return tuple(ticks)

    @cached_property
    def point_ticks(self) -> tuple[int, ...]:
        """Tick of each point."""
        return tuple(point.op + index for index, point in enumerate(self.points))

    @property
    def plain_scale(self) -> float:
        """Factor from the seconds of the ops to those of the step by PyTorch alone; 1 if the latter was not timed."""
        plain_s, ops_s = self.times.plain_step_s, sum(op.duration_s for op in self.ops)
        return 1.0 if plain_s is None or ops_s <= 0 else plain_s / ops_s

    @property
    def tick_count(self) -> int:
        """Number of ticks of the step."""
        return len(self.ops) + len(self.points)

    def rounded_bytes(self, size_bytes: int) -> int:
        """Bytes as they are counted: rounded up to the allocation unit."""
        if self.memory is Memory.ALLOCATED and self.device.kind == "cpu" and size_bytes < LEAST_COUNTED_BYTES:
            return 0
        return rounded_up(size_bytes, self.allocation_unit_bytes)
