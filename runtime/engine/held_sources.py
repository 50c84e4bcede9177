"""Sources and bits as values from which replays start: what a plan holds in place of a saved value."""

from __future__ import annotations

import torch

from poochplan.formats.plan import Decision, PlannedValue
from poochplan.runtime.devices.device import Stream
from poochplan.runtime.replays.bits import Tables, bits_of
from poochplan.runtime.replays.replay import StorageRecord, source_of
from poochplan.tensors.storages import Geometry, version_probe
from poochplan.torch_private.tensor_internals import version_of

from .saved_value import SavedValue


def held_source(record: StorageRecord, planned: PlannedValue, home: Stream | None) -> SavedValue | None:
    """The source of a storage; None if no replay starts from it, or it is not as planned."""
    read = source_of(record) if planned.until >= 0 else None  # Rule 12
    storage = read.record.storage() if read is not None else None
    if read is None or read.source is None or storage is None or storage.nbytes() > planned.size_bytes:
        return None
    if read.record.value is not None and read.record.value() is not None:
        return None
    (probe, version), size_bytes = read.source, storage.nbytes()
    value = SavedValue(
        planned.decision, read.record, read.generation, probe, version, read.geometry, size_bytes, storage, home
    )
    read.record.attach(value)
    return value


def wants_bits(planned: PlannedValue) -> bool:
    """Whether the bits are to be made: a replay starts from them, and does not draw the mask again."""
    return planned.until >= 0 and planned.decision is not Decision.RECOMPUTE


def held_bits(
    mask: StorageRecord, dtype: torch.dtype, planned: PlannedValue, home: Stream | None, order: int, tables: Tables
) -> SavedValue | None:
    """The bits of a mask, or its other form, made now; None if it has none. ``order``: of the op that widens them."""
    made = bits_of(mask, dtype, planned.dtype, order, planned.size_bytes, tables)  # Rule 14
    if made is None:
        return None
    record, bits = made
    probe, geometry, storage = version_probe(bits), Geometry.of(bits), bits.untyped_storage()
    value = SavedValue(planned.decision, record, 0, probe, version_of(bits), geometry, storage.nbytes(), storage, home)
    record.attach(value)
    return value
