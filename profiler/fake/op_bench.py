"""Costs of the ops of a step that cannot run: each distinct op is run by itself on made-up tensors.

Two ops are the same if operator, arguments and the layout of every tensor are the same, and the processor's cache holds
the same of these tensors (:class:`Recency`). If a large tensor would be missing from the cache, the cache is emptied
before each run, and then reads the tensors that it would hold in the step. Some ops cannot run by themselves: those of
other namespaces, those too large for the free memory, and those that fail on made-up contents. Their time is estimated:
the bytes that they read and write at the rate of a copy. The user's cache folder has a file of costs for each version
of torch, device and thread count.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from poochplan.formats.files import cache_folder, not_kept, read_cache, write_cache
from poochplan.formats.profile import Device, OpBlock
from poochplan.formats.profile_parts import Bytes, Seconds
from poochplan.profiler.assembly.assemble import processor_name
from poochplan.profiler.capture.captured import CapturedOp, CapturedValue
from poochplan.profiler.capture.op_blocks import taken_in
from poochplan.profiler.step.preserve import kept_generators, restored
from poochplan.runtime.arena.library import AllocationLog, ThreadScope
from poochplan.runtime.messages import warn_once
from poochplan.runtime.metering.allocated import step_scope
from poochplan.tensors.host_memory import available_bytes
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import Geometry, has_storage
from poochplan.torch_private.tensor_internals import pytree, storage_identity, tensors_in

from .roofline import op_bytes

REPEATS = 5
ENOUGH_S, LONG_S = 0.4, 1.0
"""An op is not run again once its runs took ``ENOUGH_S`` together. An op that takes more than ``LONG_S`` runs once: the
set-up in its first run is negligible."""
_COPIED_BYTES = 64 << 20
_DRAWN = 1 << 18
"""Number of random elements of a made-up tensor; a larger tensor repeats them."""
SMALL_BYTES = 256 << 10
"""The cache is not emptied for fewer bytes than these. To read them from memory takes about ten microseconds. An empty
cache, which also loses the interpreter, would cost a small op more."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_BYTES = 16 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20}


class TensorSpec(NamedTuple):
    """A tensor argument: its layout, and which of the op's storages it lies on."""

    geometry: Geometry
    storage: int
    storage_bytes: int


class OpSpec:
    """One call of an operator, without its tensors. ``cached``: which of its storages, numbered in order of appearance,
    are in the processor's cache when it begins; None if all that matter are.
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
        """Some kernels depend on it: oneDNN's LSTM keeps its workspace only with gradients."""
        said = f"{func}|{self.leaves}|{self._spec}|{self.cached and sorted(self.cached)}|{self.with_grad}"
        self.key = hashlib.sha256(said.encode()).hexdigest()[:24]
        simple = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
        self.runnable = traits(func).trusted and all(
            leaf is None or isinstance(leaf, (*simple, TensorSpec)) for leaf in self.leaves
        )

    def prepared(self) -> Callable[[], tuple[Any, dict[str, Any]]]:
        """A function that returns the arguments of one run, on made-up storages: floats between a half and one,
        integers zero, booleans true. It leaves the processor's cache as the step would.
        """
        specs = {leaf.storage: leaf for leaf in reversed(self.leaves) if isinstance(leaf, TensorSpec)}
        storages = {storage: _filled(spec) for storage, spec in specs.items()}

        def prepare() -> tuple[Any, dict[str, Any]]:
            leaves = [
                leaf.geometry.on(storages[leaf.storage]) if isinstance(leaf, TensorSpec) else leaf
                for leaf in self.leaves
            ]
            if self.cached is not None:
                _fill_cache([storages[index] for index in sorted(self.cached) if index in storages])
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            return args, kwargs

        return prepare


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
    """Costs of ops, measured or from the cache. ``counts`` has the number of distinct ops by source."""

    def __init__(self, device: Device) -> None:
        self._scope = step_scope()
        self._path = cache_path(device)
        self._known = read_cache(self._path, dict[str, OpCost]) or {}
        self.counts = {"measured": 0, "cached": 0, "estimated": 0}

    def costs(self, specs: list[OpSpec], say: Callable[[str], None] = lambda _: None) -> list[OpCost]:
        """The cost of each op, in order. New costs are written to the cache."""
        found: dict[str, OpCost] = {}
        distinct = {spec.key: spec for spec in specs}
        say(f"running {len(distinct)} distinct ops by themselves")
        with restored(kept_generators()):
            for key, spec in distinct.items():
                found[key] = self._one(spec)
        warn_once(not_kept(cache_folder(), write_cache(self._path, msgspec.json.encode(self._known))))
        return [found[spec.key] for spec in specs]

    def _one(self, spec: OpSpec) -> OpCost:
        known = self._known.get(spec.key)
        if known is not None and (known.memory is not None or self._scope is None):
            self.counts["cached"] += 1
            return known if self._scope is not None else OpCost(known.seconds)
        if not spec.runnable and not spec.bytes:  # for example a mark of torch's own profiler
            return OpCost(0.0, OpMemory(0) if self._scope is not None else None)
        measured = _measured(spec, self._scope) if spec.runnable and 2 * spec.bytes < available_bytes() else None
        if measured is None:
            self.counts["estimated"] += 1
            return OpCost(spec.bytes / self._copy_rate)
        self.counts["measured"] += 1
        self._known[spec.key] = measured
        return measured

    @functools.cached_property
    def _copy_rate(self) -> float:
        """Bytes per second that a copy reads and writes together."""
        source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device="cpu")
        return 2 * _COPIED_BYTES / _median_cost(lambda: ((source,), {}), torch.clone, None).seconds


def _measured(spec: OpSpec, scope: ThreadScope | None) -> OpCost | None:
    """Median seconds and memory of the op; None if it fails on made-up contents."""
    try:
        prepare = spec.prepared()
        # An op in place changes its input in each run. A few runs leave values near one, which are not slower.
        with torch.set_grad_enabled(spec.with_grad):  # nothing requires gradients
            return _median_cost(prepare, spec.func, scope)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return None


def _median_cost(
    prepare: Callable[[], tuple[Any, dict[str, Any]]], run: Callable[..., Any], scope: ThreadScope | None
) -> OpCost:
    """The median of several runs without the first, each with fresh outputs; see :data:`ENOUGH_S`. The memory is that
    of the last run, because libraries set themselves up in the first.
    """
    times_s: list[float] = []
    memory: OpMemory | None = None
    for _ in range(1 + REPEATS):
        args, kwargs = prepare()
        log = AllocationLog(scope) if scope is not None else None
        with log or contextlib.nullcontext():
            start_s = time.perf_counter()
            result = run(*args, **kwargs)
            times_s.append(time.perf_counter() - start_s)
        if scope is not None and log is not None:
            memory = _memory_of_run(scope, log, result, (args, kwargs))
        del result
        if times_s[0] > LONG_S or (len(times_s) > 1 and sum(times_s) > ENOUGH_S):
            break
    return OpCost(median(times_s[1:] or times_s), memory)


def _fill_cache(storages: list[torch.UntypedStorage]) -> None:
    """Fills the processor's cache with these storages, and nothing else of an op."""
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


def cache_bytes() -> int:
    """Size of this processor's largest cache; 16 MiB if the system does not give it."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    known = [int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS and size[:-1].isdigit()]
    return max(known, default=_UNKNOWN_BYTES)


class Recency:
    """A model of a cache that evicts whole values, least recently touched first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._left_bytes = capacity_bytes
        self._held: OrderedDict[int, int] = OrderedDict()

    def holds(self, value: int) -> bool:
        return value in self._held

    def touch(self, value: int, size_bytes: int) -> None:
        """The value is read or written: the cache now holds it, and may have evicted others."""
        self._left_bytes += self._held.pop(value, 0)
        self._held[value] = size_bytes
        self._left_bytes -= size_bytes
        while self._left_bytes < 0:
            _, evicted_bytes = self._held.popitem(last=False)
            self._left_bytes += evicted_bytes


class OpMemory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    workspace_bytes: Bytes
    output_bytes: tuple[Bytes, ...] = ()
    """Sizes of its new storages, in order."""
    blocks: tuple[OpBlock, ...] = ()
    """As in ``Op.blocks``."""


class OpCost(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seconds: Seconds
    memory: OpMemory | None = None
    """None if it was not measured."""


def _memory_of_run(scope: ThreadScope, log: AllocationLog, result: Any, arguments: Any) -> OpMemory:
    """The memory of an op that has run on these arguments. ``log`` recorded it and has ended; ``result`` is alive."""
    before = _storages(arguments)
    fresh = [storage for key, storage in _storages(result).items() if key not in before]
    outputs = {scope.library.block_at(one.data_ptr()): number for number, one in enumerate(fresh)}
    taken = taken_in(log.events.tolist(), outputs, len(fresh))
    return OpMemory(taken.workspace_bytes, tuple(one.nbytes() for one in fresh), taken.blocks)


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    storages = (one.untyped_storage() for one in tensors_in(tree) if has_storage(one, "cpu"))
    return {storage_identity(storage): storage for storage in storages}


def give_memory(
    ops: Sequence[CapturedOp], values: Sequence[CapturedValue], keys: Sequence[str], costs: Sequence[OpCost]
) -> list[str]:
    """Gives each captured op its measured memory. Equal ops have equal ``keys``. Returns the name of each distinct op
    whose memory inside is unknown.

    An op gets blocks only if its outputs have the captured sizes: some sizes depend on data.
    """
    unknown: dict[str, str] = {}
    for op, key, cost in zip(ops, keys, costs, strict=True):
        if cost.memory is None:
            unknown.setdefault(key, op.name)
            continue
        op.workspace_bytes = cost.memory.workspace_bytes
        if cost.memory.output_bytes == tuple(values[number].size_bytes for number in op.outputs):
            op.blocks = cost.memory.blocks
    return list(unknown.values())


def memory_note(unknown: Sequence[str], distinct: int) -> str:
    if len(unknown) == distinct:
        return (
            "memory that ops take and give back inside is not known, and peaks count live tensors alone: measuring it "
            "needs the compiled allocator; run pooch doctor to see how to get it"
        )
    measured = distinct - len(unknown)
    known = f"memory that ops take and give back inside was measured on {measured} distinct ops run by themselves; "
    if not unknown:
        return f"{known}memory that the step takes between ops is not known"
    return f"{known}that of {len(unknown)} is not known, first {unknown[0]}: peaks may be higher"
