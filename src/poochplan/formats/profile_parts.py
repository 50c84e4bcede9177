"""The parts of a profile: ops, values, the points of the runtime's clock, and the link. ``ProfileData`` has them all.

**Ticks.** Time inside a step is counted in ticks. The merged order of all ops and all points is numbered from 0. A
point with ``op == k`` comes before op ``k`` and after op ``k - 1``. Points with the same ``op`` follow in list order. A
value is live at tick ``t`` when ``born_tick <= t <= death``. The bytes at an op's tick include its outputs.

A profile has thousands of some structs. Python's garbage collector does not track these (``gc=False``): they can be in
no cycle, and a large profile is read in two thirds of the time.

Fields have a range. A value out of range is refused when the file is read, so sums and quotients of the others are
numbers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from poochplan.units import format_bytes

SCHEMA_VERSION = 9
"""Version 2 has more costs of the launching thread (``RuntimeCost``); 3 has how the step was run (``StepFacts``); 4 has
the blocks that each op takes (``OpBlock``); 5 has which nodes of compiled graphs save a value; 6 has the step's time by
PyTorch alone (``StepTimes.plain_step_s``); 7 has the values that are stretches of one storage
(``Value.stretch_of``); 8 has launches by phase (``RuntimeCost.phase_launch_s``); 9 has the state of each parameter
(``OptimizerState``)."""
HOST_ALIGNMENT_BYTES = 4096
"""Every swapped value begins at a multiple of this in host memory and in the spill file."""
ALLOCATION_UNIT_BYTES = 512
LEAST_COUNTED_BYTES = 64
"""On the CPU, smaller blocks of allocated memory do not count: Python's numbers become such blocks on their way into
ops."""
LEAST_PLACED_BYTES = 4096
"""Smaller blocks lie in no arena. They are in no list of blocks either, unless they are an output: they are many, and
together they take little memory."""
ROOFLINE = " (roofline)"
"""This follows the name of a device that is not there."""
LOSS_IS_HELD = "the loss is held until the next one is made"
"""A note of a profile, and of its plans, begins with this if memory depends on it."""
MOST_BYTES = 2**48
"""Numbers of bytes and elements are below this, 256 TiB. The sum of tens of thousands of them fits into an int64."""
MOST_ITEMS = 2**31
"""Lengths of lists, positions in them, and ticks are below this."""
MOST_S = 1e9
"""Some thirty years."""

Bytes = Annotated[int, Meta(ge=0, lt=MOST_BYTES)]
Offset = Annotated[int, Meta(ge=-1, lt=MOST_BYTES)]
"""-1 means no offset."""
AllocationUnit = Annotated[int, Meta(ge=1, le=2**30)]
"""Bytes; other sizes are rounded up to a multiple of it."""
Count = Annotated[int, Meta(ge=0, lt=MOST_ITEMS)]
Index = Annotated[int, Meta(ge=0, lt=MOST_ITEMS)]
IndexOrNone = Annotated[int, Meta(ge=-1, lt=MOST_ITEMS)]
"""-1 means no index."""
RankCount = Annotated[int, Meta(ge=1, lt=MOST_ITEMS)]
"""A number of processes that train together, each on its own device."""
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
    """The next place in host memory, at or after ``size_bytes``, where a swapped value may begin."""
    return -(-size_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES


def rounded_up(size_bytes: int, unit_bytes: int = ALLOCATION_UNIT_BYTES) -> int:
    """The bytes that an allocator takes for a request."""
    return -(-size_bytes // unit_bytes) * unit_bytes


def counted_bytes(size_bytes: int, least_bytes: int = LEAST_COUNTED_BYTES) -> int:
    """The bytes of a block on the CPU as a meter counts them: smaller ones than ``least_bytes`` count nothing."""
    return rounded_up(size_bytes) if size_bytes >= least_bytes else 0


class Phase(StrEnum):
    """The part of a step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(StrEnum):
    """The role of a value in the step."""

    ACTIVATION = "activation"  # created in forward and saved for backward
    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"  # the storage of a parameter's gradient
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"  # from before the step, but neither parameter, buffer nor optimizer state
    LIBRARY = "library"  # what cuBLAS holds between ops, in no tensor
    TEMPORARY = "temporary"  # created in the step and not saved


class PointKind(StrEnum):
    """The two kinds of point of the runtime's clock."""

    SAVE = "save"  # first pack of a saved value
    USE = "use"  # first unpack of a handle


class Memory(StrEnum):
    """Which memory peaks count."""

    LIVE = "live"  # storages alone
    ALLOCATED = "allocated"  # all bytes from the device's allocator, including those that ops take and give back inside

    def peak_text(self, peak_bytes: int, live_bytes: int | None) -> str:
        """A peak in words; if it is of allocated bytes, also that of live bytes, where it is known."""
        peak = format_bytes(peak_bytes)
        if self is Memory.LIVE or live_bytes is None:
            return peak
        return f"{peak} allocated, {format_bytes(live_bytes)} live"


class OpBlock(NamedTuple):
    """One block that the device's allocator hands out to an op."""

    size_bytes: Bytes
    output: IndexOrNone
    """Index of the op's output that lies in the block; -1 if no output does."""
    until: IndexOrNone
    """The number of blocks that the op has taken when it gives this one back; -1 if the block outlives the op."""


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
    """Interquartile range over the timed steps, scaled as ``duration_s`` was; 0 if the op was not timed twice."""
    inputs: tuple[Index, ...] = ()
    """Values read, in argument order, each once (also those in ``writes``)."""
    outputs: tuple[Index, ...] = ()
    """Values that the op creates."""
    writes: tuple[Index, ...] = ()
    """Values that existed before the op, which writes them in place."""
    random: bool = False
    """The op draws from a generator; a replay needs its recorded state."""
    adds_in_place: bool = False
    """It adds two gradients: autograd writes the sum over the first, unless a dispatch mode is on, as here."""
    opaque: bool = False
    """The op cannot be replayed: a compiled region, an uninitialised allocation, or data from outside torch."""
    workspace_bytes: Bytes = 0
    """Bytes taken and given back inside the op. On the CPU the compiled allocator measures them. Without it only those
    of compiled regions are known, and all others are 0."""
    blocks: tuple[OpBlock, ...] = ()
    """The blocks that the op takes from the allocator, in that order. The list is empty if these are exactly its
    outputs in their order, or if the blocks are not known."""


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
    """The op that created it; -1 if it existed before the step. If no op creates it, the last op before it."""
    born_tick: Index | None = None
    """The first tick at which it is live, if no op creates it because the step takes it between ops."""
    forward_death: Index
    """The last tick at which something other than autograd holds it. It may lie in backward. It is the last tick of the
    step if the value outlives the step."""
    freed: Index
    """Last tick at which the in-core step holds it, autograd included."""
    gone_by_next: bool = False
    """Whether it is gone when the next step begins, though this one holds it to the end, as a local variable does."""
    stretch_of: IndexOrNone = -1
    """Some storages give up their memory and take it again, as FSDP2's gathered weights do. Each stretch of the step in
    which such a storage has memory is a value, from ``born_tick`` to ``freed``; replays read the storage only there.
    This is the value of its first stretch; -1 for all other values."""
    pinned: Text = ""
    """Why it must be kept; empty when it may be swapped."""
    unreplayable: Text = ""
    """Why it cannot be recomputed; empty when its writers can be replayed."""
    nodes: tuple[Text, ...] = ()
    """The nodes of compiled graphs that save it, as ``graph/node``. Empty if no graph was examined."""


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
    """Number of ops completed before this point."""


class LinkDirection(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of the link: ``seconds = latency_s + bytes / bandwidth_bytes_per_s``."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Rate
    """From the line that fits the curve best (``profiler/link.py``)."""
    curve: tuple[tuple[Bytes, Seconds], ...] = ()
    """Measured pairs (bytes, seconds), from small to large."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer path between device and host tier."""

    name: Text
    """``spill`` (process memory to a file), or a preset such as ``pcie4``."""
    outward: LinkDirection
    inward: LinkDirection
    duplex: Share = 1.0
    """Share of its own rate that each direction keeps while both run; 1 means full duplex."""
    interference_out: Factor = 0.0
    """How much slower compute is while a copy out runs: 0.2 means that an op takes 1.2 times as long."""
    interference_in: Factor = 0.0
    """The same while a copy in runs. While both run, the two add up."""
    throttle_bytes_per_s: Rate | None = None
    """The rate that the copies were limited to while they were measured, so that the link is a known constant. The
    runtime limits its copies to it too."""
    pageable_out: LinkDirection | None = None
    """Copies to pageable host memory, on CUDA, for comparison. The runtime copies to pinned memory, which ``outward``
    describes."""
    pageable_in: LinkDirection | None = None
    """The same from pageable memory."""
    ranks: RankCount = 1
    """The number of ranks of one host that copy at once. Rates and interference are those of each."""

    @property
    def out_bytes_per_s(self) -> float:
        """Bandwidth of copies out, at most the throttle."""
        return self._held(self.outward)

    @property
    def in_bytes_per_s(self) -> float:
        """Bandwidth of copies in, at most the throttle."""
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

    kind: Text
    """Its type, as torch names it: ``cpu``, ``cuda`` or another accelerator's."""
    name: Text
    memory_bytes: Bytes
    threads: Count = 0
    host_bytes: Bytes | None = None
    """Bytes of the host's memory that a process could still take, within its cgroups; None on the CPU or if unknown."""
    expands: bool | None = True
    """On CUDA, whether the segments of torch's allocator expand within a session; None if it follows other rules than
    those of the planner's model."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that the device is in, described by its make and never by its name."""

    processor: Text
    system: Text
    cores: Count


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the in-core step without instruments, and their spread over ``iterations``. ``step_s`` is the median.
    Each phase is its own median, scaled so that the phases add up to ``step_s``.
    """

    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    step_s: Seconds
    spread_s: Seconds
    """Interquartile range of ``step_s``; the next three are those of its phases."""
    forward_spread_s: Seconds = 0.0
    backward_spread_s: Seconds = 0.0
    optimizer_spread_s: Seconds = 0.0
    iterations: Count
    forward_scale: Factor
    """The factor by which the sum of forward's op durations became ``forward_s``; the next two are those of the other
    phases."""
    backward_scale: Factor
    optimizer_scale: Factor
    plain_step_s: Seconds | None = None
    """The median step by PyTorch alone, timed before any setting of a session: the reference of every overhead. None if
    it was not timed, for example because the step does not fit."""
    unserved_step_s: Seconds | None = None
    """Set if the timed steps allocated from one arena, as planned steps do. It is then the time of the step in which
    each tensor is fresh memory, which is returned when it is freed, as in steps without an arena. In a running loop the
    timed steps have no arena: then the seconds of their page faults are subtracted from them, and this is the time of
    the whole step. None if ``step_s`` is of steps without an arena."""


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Seconds of all ops of a layer, in each timed step: medians and interquartile ranges over the steps.

    They include the phase's reconciliation, so they can be compared with the durations of ops.
    """

    layer: Text
    """Empty for ops outside the model."""
    forward_s: Seconds = 0.0
    forward_spread_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    backward_spread_s: Seconds = 0.0


class RuntimeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the launching thread: for a plain op, and for the runtime's work between the step's ops.

    They are measured on a separate small network. In a profile of mode ``run``, the time of handles is measured on the
    model itself, and on CUDA that of launches; so are the costs of recording and replays, and on the CPU of swaps, in
    that of a step function with short ops. ``docs/semantics.md`` says where they are spent. All are at least 0.
    """

    handle_s: Seconds
    """For each handle, pack and unpack together."""
    swap_s: Seconds
    """For each swapped value: queueing its copies, giving it up, taking memory for it again."""
    record_s: Seconds
    """For each recorded op, in addition to the op itself."""
    drop_s: Seconds = 0.0
    """For each value that a replay will bring back: its recipe, and giving it up. 0 where ``replay_s`` has it."""
    replay_s: Seconds = 0.0
    """For each replayed op, in addition to the op itself: its part of the recipe and of the replay."""
    launch_s: Seconds = 0.0
    """For each plain op, if the thread is ahead of the device. 0 on the CPU, where an op's duration includes it."""
    phase_launch_s: dict[Phase, Seconds] = {}
    """The same by phase of the model's own steps, with their Python between ops; empty if that was not measured."""
    unpack_s: Seconds = 0.0
    """The unpack's part of ``handle_s``."""
    fetch_s: Seconds = 0.0
    """The part of ``swap_s`` for the way back."""
    unmeasured: tuple[Text, ...] = ()
    """Those of the above that could not be distinguished from 0 and count as 0."""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the captured step was run. These facts limit what a plan can do for it."""

    modules: Count = 0
    """Number of modules of the model, itself included."""
    eval_modules: Count = 0
    """Number of these modules that are in eval mode."""
    checkpointed: tuple[Text, ...] = ()
    """Layers whose forward ran again in backward (activation checkpointing), in that order."""
    garbage_bytes: Bytes = 0
    """Bytes of the values that only Python's garbage collector frees."""
    kept_bytes: Bytes = 0
    """Bytes of saved tensors that are sparse, nested or of a subclass. No plan decides about them."""
    graph_mode: bool = False
    """Whether ``poochplan.compile`` has compiled the model. Saved tensors then leave within a compiled forward."""
    unmeasured_regions: Count = 0
    """Number of calls of compiled modules whose inner allocations are unknown."""
    unmeasured_ops: Count = 0
    """Number of distinct ops whose inner allocations are unknown, if those of others are known (mode ``fake``)."""


class OptimizerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one optimizer that steps the model's parameters: what of it may leave the device between steps."""

    name: Text
    """The optimizer's class, for example ``AdamW``."""
    separable: bool = False
    """Whether steps of some parameters after the others have the bits of one step of all. Only then may a plan cut the
    parameters into chunks."""
    parameters: tuple[tuple[Index, ...], ...] = ()
    """By parameter, in the order of the groups: the values of its state that may leave the device. Small ones, and
    those that something other than the optimizer's state holds, may not."""


class ModelSignature(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the model: every parameter and buffer in order, independent of the machine."""

    fingerprint: Text
    tensors: tuple[Text, ...]
    """``name dtype[shape]`` of each parameter and buffer."""
