"""What ops take of the allocator when each is run by itself, and what a step without memory makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from poochplan.formats.fields import Bytes, Seconds
from poochplan.formats.profile import Memory, OpBlock
from poochplan.profiler.allocations.op_blocks import taken_in
from poochplan.profiler.capture.captured import CapturedOp, CapturedValue
from poochplan.runtime.allocator.allocation_log import AllocationLog, Table
from poochplan.runtime.allocator.library import ThreadScope
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import pytree, storage_identity


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
