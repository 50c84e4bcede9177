"""What a profile is made of: ops, values, the points of the runtime's clock, the link; and all of it together.

**Ticks.** Time inside a step is counted in ticks. The merged order of all ops and all points is numbered from 0;
a point with ``op == k`` comes before op ``k`` and after op ``k - 1``, points with the same ``op`` in list order.
A value is live at tick ``t`` when ``born_tick <= t <= death``; bytes at an op's tick include its outputs.

Structs of which a profile has thousands are out of the garbage collector's sight (``gc=False``): they can be in no
cycle, and a large profile is read in two thirds of the time.

Fields have a range. What is out of it is refused where it is read, so that sums and quotients of the rest are numbers.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from .files import Document

SCHEMA_VERSION = 7
"""2 says more of what the launching thread takes (``RuntimeCost``), 3 how the step was run (``StepFacts``), 4 which
blocks each op takes (``OpBlock``), 5 which nodes of compiled graphs save a value, 6 what the step takes
by PyTorch alone (``StepTimes.plain_step_s``), 7 which values are stretches of one storage (``Value.stretch_of``).
"""
HOST_ALIGNMENT_BYTES = 4096
"""Every swapped value begins at a multiple of this in host memory and in the spill file."""
ALLOCATION_UNIT_BYTES = 512
LEAST_COUNTED_BYTES = 64
"""Of memory allocated on the CPU: smaller blocks count nothing; Python's numbers become such on their way into ops."""
LEAST_PLACED_BYTES = 4096
"""Smaller blocks lie in no arena, and in no list of blocks unless they are an output: they are many, and together they
are little.
"""
ROOFLINE = " (roofline)"
"""Behind the name of a device that is not there."""
MOST_BYTES = 2**48
"""Bytes and elements are below this, 256 TiB: tens of thousands of them together are an int64."""
MOST_ITEMS = 2**31
"""Lengths of lists, places in them and ticks are below this."""
MOST_S = 1e9
"""Some thirty years."""

Bytes = Annotated[int, Meta(ge=0, lt=MOST_BYTES)]
Offset = Annotated[int, Meta(ge=-1, lt=MOST_BYTES)]
"""-1 for none."""
Unit = Annotated[int, Meta(ge=1, le=2**30)]
"""Bytes that others are rounded up to."""
Count = Annotated[int, Meta(ge=0, lt=MOST_ITEMS)]
Index = Annotated[int, Meta(ge=0, lt=MOST_ITEMS)]
IndexOrNone = Annotated[int, Meta(ge=-1, lt=MOST_ITEMS)]
"""-1 for none."""
Seconds = Annotated[float, Meta(ge=0, le=MOST_S)]
Rate = Annotated[float, Meta(ge=1, le=1e18)]
"""Bytes per second."""
Share = Annotated[float, Meta(gt=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=1e18)]
Change = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""A difference of seconds, or a ratio less 1."""

Text = Annotated[str, Meta(max_length=10_000)]
Shape = Annotated[tuple[Bytes, ...], Meta(max_length=64)]
"""No tensor has more dimensions."""
Input = Annotated[str, Meta(max_length=10_000, pattern=r"^[\s\S]* \w+\[(\d{1,16}(, \d{1,16})*)?\]$")]
"""``path dtype[shape]``."""


def host_aligned(size_bytes: int) -> int:
    """The next place in host memory, at or behind ``size_bytes``, where a swapped value may begin."""
    return -(-size_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES


def rounded_up(size_bytes: int, unit_bytes: int = ALLOCATION_UNIT_BYTES) -> int:
    """Bytes as an allocator takes them."""
    return -(-size_bytes // unit_bytes) * unit_bytes


class Phase(StrEnum):
    """The part of a step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(StrEnum):
    """What a value is to the step."""

    ACTIVATION = "activation"  # created in forward and saved for backward
    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"  # the storage of a parameter's gradient
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"  # there before the step, and neither parameter, buffer nor optimizer state
    TEMPORARY = "temporary"  # created in the step and not saved


class PointKind(StrEnum):
    """The two kinds of point of the runtime's clock."""

    SAVE = "save"  # first pack of a saved value
    USE = "use"  # first unpack of a handle


class Memory(StrEnum):
    """What peaks count."""

    LIVE = "live"  # storages alone
    ALLOCATED = "allocated"  # all that the device's allocator hands out, what ops take and give back inside among it


class OpBlock(NamedTuple):
    """One block that the device's allocator hands out to an op."""

    size_bytes: Bytes
    output: IndexOrNone
    """Which of the op's outputs lies in it; -1 for none of them."""
    until: IndexOrNone
    """How many blocks the op has taken by the time this one is given back; -1 where the op leaves it behind."""


class Op(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One dispatched operator that creates or writes a value, or takes time. Pure views are not listed."""

    name: Text
    """Operator, for example ``aten.convolution.default``; ``compiled_region`` for a ``torch.compile``d callable."""
    layer: Text
    """Path of the innermost module, the forward layer for backward ops; empty outside the model."""
    phase: Phase
    duration_s: Seconds
    """Median seconds, reconciled so that all durations add up to the uninstrumented step."""
    spread_s: Seconds = 0.0
    """Interquartile range over the timed steps, scaled as ``duration_s`` where that is scaled down; 0 where the op was
    timed once or not at all."""
    inputs: tuple[Index, ...] = ()
    """Values read, in argument order, each once (also those in ``writes``)."""
    outputs: tuple[Index, ...] = ()
    """Values created."""
    writes: tuple[Index, ...] = ()
    """Values that were there before and are written in place."""
    random: bool = False
    """Draws from a generator; a replay needs its recorded state."""
    opaque: bool = False
    """Cannot be replayed: a compiled region, an uninitialised allocation, or data from outside torch."""
    workspace_bytes: Bytes = 0
    """Bytes taken and given back inside the op. On the CPU they need the compiled allocator; without it only those of
    compiled regions are known, and all others 0."""
    blocks: tuple[OpBlock, ...] = ()
    """What it takes of the allocator, in the order of the taking; empty where that is its outputs in their order and
    nothing else, or is not known."""


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One device storage; all views of it are one value."""

    name: Text
    """Readable and unique, for example ``layer1.0.conv1/out``."""
    layer: Text
    kind: Kind
    size_bytes: Bytes
    """Bytes of the storage, not rounded; see :attr:`Profile.allocation_unit_bytes`."""
    dtype: Text
    shape: Shape
    born: IndexOrNone
    """Op that created it; -1 when it was there before the step. Of what no op creates, the last one before that."""
    born_tick: Index | None = None
    """First tick at which it is live, where no op creates it: of what the step takes between ops."""
    forward_death: Index
    """Last tick at which something other than autograd holds it (may lie in backward; the last tick of the step
    when it outlives it)."""
    freed: Index
    """Last tick at which the in-core step holds it, autograd included."""
    stretch_of: IndexOrNone = -1
    """Of a storage that gives up its memory and takes it again, as FSDP's gathered weights: the value of the first
    stretch in which it has memory in this step. Each stretch is a value, from ``born_tick`` to ``freed``, and replays
    read it there alone."""
    pinned: Text = ""
    """Why it must be kept; empty when it may be swapped."""
    unreplayable: Text = ""
    """Why it cannot be recomputed; empty when its writers can be replayed."""
    nodes: tuple[Text, ...] = ()
    """Which nodes of which compiled graphs save it, as ``graph/node``; empty where no graph was looked into."""


class Handle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One pack of a saved value: autograd holds a handle for each."""

    value: Index
    layer: Text
    dtype: Text
    shape: Shape


class Point(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tick of the runtime's clock."""

    kind: PointKind
    handle: Index
    """Handle whose pack or unpack this is: its ordinal in pack order."""
    op: Index
    """Ops completed before this point."""


class LinkDirection(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of the link: ``seconds = latency_s + bytes / bandwidth_bytes_per_s``."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Rate
    """Of the line that comes nearest to the curve (``profiler/link.py``)."""
    curve: tuple[tuple[Bytes, Seconds], ...] = ()
    """Measured (bytes, seconds), from small to large."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer path between device and host tier."""

    name: Text
    """``spill`` (process memory to a file), or a preset such as ``pcie4``."""
    outward: LinkDirection
    inward: LinkDirection
    duplex: Share = 1.0
    """Share of its own rate that each direction keeps while both run; 1 means full duplex."""
    interference_out: Factor = 0.0
    """How much slower compute runs while a copy out runs: 0.2 means an op takes 1.2 times as long."""
    interference_in: Factor = 0.0
    """The same while a copy in runs; while both run the two add up."""
    throttle_bytes_per_s: Rate | None = None
    """Rate that the copies were held to, so that the link is a known constant; the runtime holds them to it too."""
    pageable_out: LinkDirection | None = None
    """Copies to pageable host memory, on CUDA, to compare: the runtime's are pinned, as ``outward`` is."""
    pageable_in: LinkDirection | None = None
    """The same from pageable memory."""

    @property
    def out_bytes_per_s(self) -> float:
        """Bandwidth of copies out, as far as the throttle lets it."""
        return self._held(self.outward)

    @property
    def in_bytes_per_s(self) -> float:
        """Bandwidth of copies in, as far as the throttle lets it."""
        return self._held(self.inward)

    def out_seconds(self, size_bytes: int) -> float:
        """Seconds of a copy out that is alone on the link: latency plus bytes over bandwidth."""
        return self.outward.latency_s + size_bytes / self.out_bytes_per_s

    def in_seconds(self, size_bytes: int) -> float:
        """Seconds of a copy in that is alone on the link."""
        return self.inward.latency_s + size_bytes / self.in_bytes_per_s

    def _held(self, direction: LinkDirection) -> float:
        held = self.throttle_bytes_per_s
        return direction.bandwidth_bytes_per_s if held is None else min(direction.bandwidth_bytes_per_s, held)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The machine the step was measured on."""

    kind: Literal["cpu", "cuda"]
    name: Text
    memory_bytes: Bytes
    threads: Count = 0


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What the device is in, by its make; never by its name."""

    processor: Text
    system: Text
    cores: Count


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Uninstrumented seconds of the in-core step, and the spread over ``iterations``: ``step_s`` is the median, and the
    phases are their own medians, scaled so that they add up to it.
    """

    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    step_s: Seconds
    spread_s: Seconds
    """Interquartile range of ``step_s``; the three below are those of its phases."""
    forward_spread_s: Seconds = 0.0
    backward_spread_s: Seconds = 0.0
    optimizer_spread_s: Seconds = 0.0
    iterations: Count
    forward_scale: Factor
    """Factor that brought the summed op durations of forward to ``forward_s``; also for the two below."""
    backward_scale: Factor
    optimizer_scale: Factor
    plain_step_s: Seconds | None = None
    """The median step by PyTorch alone, timed before anything was set for sessions: what overheads are beside. None
    where it was not run, as where it does not fit."""
    unserved_step_s: Seconds | None = None
    """Where the timed steps had their memory from one arena, as planned steps have: the same where each tensor is fresh
    memory that is given back as it is freed, as in steps that are not served. None where they were such themselves."""


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Seconds of a layer's ops together, in each timed step: medians and interquartile ranges over the steps.

    The phase's reconciliation is in them, so that they compare with the durations of ops.
    """

    layer: Text
    """Empty for the ops outside the model."""
    forward_s: Seconds = 0.0
    forward_spread_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    backward_spread_s: Seconds = 0.0


class RuntimeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the launching thread: for a plain op, and for what the runtime does beside the step's ops.

    Measured on a small network of its own; of a profile of mode ``run``, what handles take on the model itself.
    ``docs/semantics.md`` says where in a step they are spent. All are at least 0.
    """

    handle_s: Seconds
    """For each handle, pack and unpack together."""
    swap_s: Seconds
    """For each swapped value: queueing its copies, giving it up, taking memory for it again."""
    record_s: Seconds
    """For each recorded op, beside the op itself."""
    replay_s: Seconds = 0.0
    """For each replayed op, beside the op itself: its part of the recipe and of the replay."""
    launch_s: Seconds = 0.0
    """For each plain op, on a device that works behind the thread; 0 on the CPU, where an op's duration holds it."""
    unpack_s: Seconds = 0.0
    """Of ``handle_s``, what the unpack takes."""
    fetch_s: Seconds = 0.0
    """Of ``swap_s``, what the way back takes."""
    unmeasured: tuple[Text, ...] = ()
    """Those of the above that could not be told from 0 and stand as 0."""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the captured step was run: what decides how much a plan can do for it."""

    modules: Count = 0
    """Of the model, itself included."""
    eval_modules: Count = 0
    """Those of them in eval mode."""
    checkpointed: tuple[Text, ...] = ()
    """Layers whose forward ran again in backward (activation checkpointing), in that order."""
    garbage_bytes: Bytes = 0
    """Of values that only Python's garbage collector frees."""
    kept_bytes: Bytes = 0
    """Of saved tensors that are sparse, nested or of a subclass, which no plan decides about."""
    graph_mode: bool = False
    """Whether ``poochplan.compile`` has compiled the model: what is saved leaves within a compiled forward."""
    unmeasured_regions: Count = 0
    """Calls of compiled modules whose inner allocations are unknown."""
    unmeasured_ops: Count = 0
    """Distinct ops whose inner allocations are unknown, where those of others are known (mode ``fake``)."""


class ModelSignature(msgspec.Struct, frozen=True, kw_only=True):
    """Which model this is: every parameter and buffer in order, independent of the machine."""

    fingerprint: Text
    tensors: tuple[Text, ...]
    """``name dtype[shape]`` of each parameter and buffer."""


class ProfileData(Document, frozen=True, kw_only=True, dict=True):
    """The fields of a :class:`~.profile.Profile`, and what follows from them alone."""

    kind: Literal["profile"] = "profile"
    schema_version: int = SCHEMA_VERSION
    workload: Text
    mode: Literal["run", "swap-all", "fake"]
    device: Device
    versions: dict[Text, Text]
    """Of poochplan, torch, python, and on CUDA of that and cuDNN."""
    switches: dict[Text, Text] = msgspec.field(default_factory=dict)
    """Of torch, that decide which kernels a GPU runs: precision, cuDNN, determinism. Empty on the CPU, and in files
    that do not say."""
    host: Host | None = None
    """Where it was measured; None in files that do not say."""
    model: ModelSignature
    inputs: tuple[Input, ...] = ()
    """``path dtype[shape]`` of each tensor that the model is first called with; empty when the step never calls it."""
    ops_fingerprint: Text
    """Digest of the sequence of ops and points, without durations."""
    times: StepTimes
    layer_times: tuple[LayerTimes, ...] = ()
    """Of each layer; empty where the ops were not timed in several steps."""
    in_core_peak_bytes: Bytes
    """Most bytes live at any tick with everything kept, each value rounded up to the allocation unit, workspace
    included."""
    in_core_live_peak_bytes: Bytes | None = None
    """The same without workspace; None in profiles of schema 3 and before."""
    memory: Memory = Memory.LIVE
    """Whether workspace is known, and so what peaks and budgets count."""
    in_core_peak_layer: Text
    static_bytes: dict[Text, Bytes]
    """Bytes that live through the step, by kind."""
    gradients_live_through_forward: bool
    """Whether gradients of the step before are still there in forward (accumulation)."""
    allocation_unit_bytes: Unit = ALLOCATION_UNIT_BYTES
    link: Link
    runtime: RuntimeCost | None = None
    """What ops and the runtime take of the launching thread; None where it was not measured."""
    facts: StepFacts | None = None
    """How the step was run; None in profiles of schema 2 and before."""
    notes: tuple[Text, ...] = ()
    assumed: tuple[Text, ...] = ()
    """What stands in place of a measurement (``planner/whatif.py``); plans made from it are estimates."""
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
        """From the seconds of the ops to those of the step by PyTorch alone; 1 where that was not timed."""
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
