"""Costs of the ops of a step that cannot run: each distinct op is run by itself on tensors of its own.

Two ops are the same when operator, arguments and the layout of every tensor are, and what the processor's cache holds
of them (:class:`Recency`): where something large is not there, the cache is emptied before each run, and what the
step's op would find is read. What cannot be run by itself (operators of other namespaces, ops too large for the memory
there is, ops that fail on made-up contents) is estimated: the bytes it reads and writes at the rate of a copy. Seconds
are kept in a file of the user's cache folder, one for each version of torch, device and thread count.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from poochplan.formats.files import cache_folder, read_cache, write_cache
from poochplan.formats.profile import Device, Memory, OpBlock
from poochplan.formats.profile_parts import Bytes, Seconds
from poochplan.profiler.assembly.assemble import processor_name
from poochplan.profiler.capture.captured import CapturedOp, CapturedValue
from poochplan.profiler.capture.op_blocks import taken_in
from poochplan.profiler.step.preserve import kept_generators, restored
from poochplan.runtime.arena.library import AllocationLog, Table, ThreadScope
from poochplan.runtime.metering.allocated import step_scope
from poochplan.tensors.host_memory import available_bytes
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import Geometry, has_storage
from poochplan.torch_private.tensor_internals import pytree, storage_identity

from .roofline import op_bytes

REPEATS = 5
ENOUGH_S, LONG_S = 0.4, 1.0
"""No further run of an op whose runs took this long together; an op that takes longer than the second is run once: what
the first run has to set up is nothing beside it."""
_COPIED_BYTES = 64 << 20
_DRAWN = 1 << 18
"""Numbers that are drawn at random for a made-up tensor; over a larger one they are repeated."""
SMALL_BYTES = 256 << 10
"""What an op reads of so little from memory takes some ten microseconds; emptying the cache, which also has the
interpreter in it, would cost a small op more."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_BYTES = 16 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20}


class TensorSpec(NamedTuple):
    """A tensor argument: its layout, and which of the op's storages it lies on."""

    geometry: Geometry
    storage: int
    storage_bytes: int


class Arguments(NamedTuple):
    """Of one run of an op. ``cached`` alone is in the processor's cache when it begins; None for as it comes."""

    args: Any
    kwargs: dict[str, Any]
    cached: list[torch.UntypedStorage] | None = None


class OpSpec:
    """One call of an operator, without its tensors. ``cached``: those of its storages, in order of appearance, that are
    in the processor's cache when it begins; None where it finds all that matters there.
    """

    def __init__(
        self, func: Any, args: Any, kwargs: dict[str, Any], outputs: Any, cached: frozenset[int] | None = None
    ) -> None:
        self.func = func
        storages: dict[int, int] = {}
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self.leaves = [_spec_of(leaf, storages) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.bytes = op_bytes(func, args, kwargs, outputs)
        missing_bytes = sum(
            leaf.storage_bytes
            for leaf in self.leaves
            if isinstance(leaf, TensorSpec) and cached is not None and leaf.storage not in cached
        )
        self.cached = cached if missing_bytes > SMALL_BYTES else None
        self.with_grad = torch.is_grad_enabled()
        """Some kernels ask: oneDNN's LSTM for one keeps what backward needs only then."""
        said = f"{func}|{self.leaves}|{self._spec}|{self.cached and sorted(self.cached)}|{self.with_grad}"
        self.key = hashlib.sha256(said.encode()).hexdigest()[:24]
        simple = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
        self.runnable = traits(func).trusted and all(
            leaf is None or isinstance(leaf, (*simple, TensorSpec)) for leaf in self.leaves
        )

    def made_up(self) -> dict[int, torch.UntypedStorage]:
        """Contents for its storages: floats between a half and one, integers zero, booleans true."""
        specs = {leaf.storage: leaf for leaf in reversed(self.leaves) if isinstance(leaf, TensorSpec)}
        return {storage: _filled(spec) for storage, spec in specs.items()}

    def arguments(self, storages: dict[int, torch.UntypedStorage]) -> Arguments:
        """Arguments on these storages."""
        leaves = [
            leaf.geometry.on(storages[leaf.storage]) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        if self.cached is None:
            return Arguments(args, kwargs)
        return Arguments(args, kwargs, [storages[index] for index in sorted(self.cached) if index in storages])


def _spec_of(tensor: torch.Tensor, storages: dict[int, int]) -> TensorSpec | str:
    if not has_storage(tensor, "cpu"):
        return TensorSpec(Geometry.of(tensor), -1, 0) if tensor.numel() == 0 else "a tensor of another kind"
    storage = tensor.untyped_storage()
    return TensorSpec(
        Geometry.of(tensor), storages.setdefault(storage_identity(storage), len(storages)), storage.nbytes()
    )


def _filled(spec: TensorSpec) -> torch.UntypedStorage:
    dtype = spec.geometry.dtype
    flat = torch.empty(spec.storage_bytes // dtype.itemsize, dtype=dtype, device="cpu")
    if dtype.is_floating_point or dtype.is_complex:
        flat.fill_(1.0)
        if dtype in (torch.float32, torch.float64):
            drawn = torch.empty(min(_DRAWN, flat.numel()), dtype=dtype, device="cpu").uniform_(0.5, 1.0)
            torch.cat([drawn] * (flat.numel() // _DRAWN) + [drawn[: flat.numel() % _DRAWN]], out=flat)
    else:
        flat.fill_(dtype is torch.bool)
    return flat.untyped_storage()


class OpBench:
    """Costs of ops, measured or remembered. ``counts`` says how many distinct ones came from where."""

    def __init__(self, device: Device) -> None:
        self._scope = step_scope()
        self._path = cache_path(device)
        self._known = _read(self._path)
        self.counts = {"measured": 0, "cached": 0, "estimated": 0}
        self._copy_bytes_per_s = 0.0

    def costs(self, specs: list[OpSpec], say: Callable[[str], None] = lambda _: None) -> list[OpCost]:
        """That of each, in order; what is new is written to the cache."""
        found: dict[str, OpCost] = {}
        distinct = {spec.key: spec for spec in specs}
        say(f"running {len(distinct)} distinct ops by themselves")
        with restored(kept_generators()):
            for key, spec in distinct.items():
                found[key] = self._one(spec)
        write_cache(self._path, msgspec.json.encode(self._known))
        return [found[spec.key] for spec in specs]

    def _one(self, spec: OpSpec) -> OpCost:
        known = self._known.get(spec.key)
        if known is not None and (known.memory is not None or self._scope is None):
            self.counts["cached"] += 1
            return known if self._scope is not None else OpCost(known.seconds)
        if not spec.runnable and not spec.bytes:  # a mark of torch's own profiler, say
            return OpCost(0.0, OpMemory(0) if self._scope is not None else None)
        measured = _measured(spec, self._scope) if spec.runnable and 2 * spec.bytes < available_bytes() else None
        if measured is None:
            self.counts["estimated"] += 1
            return OpCost(spec.bytes / self._copy_rate())
        self.counts["measured"] += 1
        self._known[spec.key] = measured
        return measured

    def _copy_rate(self) -> float:
        """Bytes per second that a copy reads and writes."""
        if not self._copy_bytes_per_s:
            source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device="cpu")
            took = _median_cost(lambda: Arguments((source,), {}), torch.clone, None)
            self._copy_bytes_per_s = 2 * _COPIED_BYTES / took.seconds
        return self._copy_bytes_per_s


def _measured(spec: OpSpec, scope: ThreadScope | None) -> OpCost | None:
    """Median seconds of the op, and what it takes; None when it fails on made-up contents."""
    try:
        storages = spec.made_up()
        # What is written in place is written again: a few runs take numbers of about one nowhere where they are slower.
        with torch.set_grad_enabled(spec.with_grad):  # nothing requires gradients
            return _median_cost(lambda: spec.arguments(storages), spec.func, scope)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return None


def _median_cost(prepare: Callable[[], Arguments], run: Callable[..., Any], scope: ThreadScope | None) -> OpCost:
    """Of several runs behind a first that is thrown away, each with fresh outputs; see :data:`ENOUGH_S`. What it takes
    is that of the last run: libraries set themselves up in the first.
    """
    times_s: list[float] = []
    memory: OpMemory | None = None
    for _ in range(1 + REPEATS):
        arguments = prepare()
        if arguments.cached is not None:
            _fill_cache(arguments.cached)
        log = AllocationLog(scope) if scope is not None else None
        with log or contextlib.nullcontext():
            start_s = time.perf_counter()
            result = run(*arguments.args, **arguments.kwargs)
            times_s.append(time.perf_counter() - start_s)
        if scope is not None and log is not None:
            memory = memory_of_run(scope, log, result, (arguments.args, arguments.kwargs))
        del result
        if times_s[0] > LONG_S or (len(times_s) > 1 and sum(times_s) > ENOUGH_S):
            break
    return OpCost(median(times_s[1:] or times_s), memory)


def _fill_cache(storages: list[torch.UntypedStorage]) -> None:
    """Has the processor's cache hold these, and nothing else of an op's."""
    _evictor().add_(1)
    for storage in storages:
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).any()


@functools.cache
def _evictor() -> torch.Tensor:
    return torch.zeros(cache_bytes(), dtype=torch.uint8, device="cpu")


def cache_path(device: Device) -> Path:
    """The file of costs for this torch, device and thread count, in the user's cache folder."""
    machine = f"costs|{torch.__version__}|{device.kind}|{device.name}|{processor_name()}|{device.threads}"
    return cache_folder() / f"ops-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, OpCost]:
    """What the file knows; nothing when there is none, or it is broken."""
    return read_cache(path, dict[str, OpCost]) or {}


def cache_bytes() -> int:
    """Size of this processor's largest cache; 16 MiB where the system does not tell."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    known = [int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS and size[:-1].isdigit()]
    return max(known, default=_UNKNOWN_BYTES)


class Recency:
    """A cache of ``capacity_bytes`` that evicts whole values, least recently touched first. State: what it holds."""

    def __init__(self, capacity_bytes: int) -> None:
        self._left_bytes = capacity_bytes
        self._held: OrderedDict[int, int] = OrderedDict()

    def holds(self, value: int) -> bool:
        """Whether the value is there."""
        return value in self._held

    def touch(self, value: int, size_bytes: int) -> None:
        """Reads or writes the value: it is there now, and others may no longer be."""
        self._left_bytes += self._held.pop(value, 0)
        self._held[value] = size_bytes
        self._left_bytes -= size_bytes
        while self._left_bytes < 0:
            _, evicted_bytes = self._held.popitem(last=False)
            self._left_bytes += evicted_bytes


class OpMemory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of one run of an op."""

    workspace_bytes: Bytes
    output_bytes: tuple[Bytes, ...] = ()
    """Of its new storages, in order."""
    blocks: tuple[OpBlock, ...] = ()
    """As in ``Op.blocks``."""


class OpCost(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an op takes by itself."""

    seconds: Seconds
    memory: OpMemory | None = None
    """None where it was not measured."""


def memory_of_run(scope: ThreadScope, log: AllocationLog, result: Any, arguments: Any) -> OpMemory:
    """Of the op that has run on these arguments within the log, which has ended, and whose ``result`` lives."""
    before = _storages(arguments)
    fresh = {key: storage for key, storage in _storages(result).items() if key not in before}
    outputs = {scope.library.block_at(one.data_ptr()): number for number, one in enumerate(fresh.values())}
    return _memory_of(log.events, outputs, tuple(one.nbytes() for one in fresh.values()))


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Those of its tensors, in order of appearance."""
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and has_storage(leaf, "cpu"))
    storages = (leaf.untyped_storage() for leaf in leaves)
    return {storage_identity(storage): storage for storage in storages}


def _memory_of(events: Table, outputs: Mapping[int, int], output_bytes: tuple[int, ...]) -> OpMemory:
    taken = taken_in(events.tolist(), outputs, len(output_bytes))
    return OpMemory(taken.workspace_bytes, output_bytes, taken.blocks)


class Told(NamedTuple):
    """What the peaks of a step without memory count."""

    memory: Memory
    unknown: tuple[str, ...]
    """Of each distinct op of which it is not known what it takes inside: its name."""


def give_memory(
    ops: Sequence[CapturedOp], values: Sequence[CapturedValue], keys: Sequence[str], costs: Sequence[OpCost]
) -> Told:
    """Notes with each captured op what it takes, by the cost of its own; ``keys`` are equal where ops are the same.

    Blocks are taken over where the storages it makes are those it was captured with: what data decides may differ.
    """
    unknown: dict[str, str] = {}
    for op, key, cost in zip(ops, keys, costs, strict=True):
        if cost.memory is None:
            unknown.setdefault(key, op.name)
            continue
        op.workspace_bytes = cost.memory.workspace_bytes
        if cost.memory.output_bytes == tuple(values[number].size_bytes for number in op.outputs):
            op.blocks = cost.memory.blocks
    is_known = len(unknown) < len(set(keys))
    return Told(Memory.ALLOCATED if is_known else Memory.LIVE, tuple(unknown.values()))


def memory_note(told: Told, distinct: int) -> str:
    """What is known, in one line."""
    if told.memory is Memory.LIVE:
        return (
            "what ops take and give back inside is not known, and peaks count live tensors alone: that takes the "
            "compiled allocator, of which pooch doctor says how to have it"
        )
    known = f"what ops take and give back inside is that of {distinct - len(told.unknown)} distinct ops run by "
    if not told.unknown:
        return f"{known}themselves; what a step takes between ops is not known"
    return f"{known}themselves; of {len(told.unknown)} it is not known, first {told.unknown[0]}: peaks may be higher"
