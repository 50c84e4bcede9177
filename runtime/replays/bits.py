"""Bits: a mask is narrowed to one bit for each element, and widened again with the bits that it had.

What made a mask decides, and never its contents: recorded ops fill its whole storage by ``bernoulli_``, and scale it by
numbers, or one op makes bools. So each element is one of two patterns, which the same ops give for 0 and 1. The whole
storage is narrowed, in the order of its memory. On the CPU numpy does both, in parts that stay in the processor's
cache. On CUDA a kernel does each in one pass (``native/bits.cu``). CuPy compiles them, and queues them on torch's
current stream; they take no memory. Where there is no CuPy that fits, ops of torch give the same bits. Nothing waits
for either: contents are not compared with both patterns there.
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from poochplan.formats.forms import FORM_BYTES, HALF
from poochplan.formats.narrow import DEVICE_PART, TABLE_ROWS
from poochplan.runtime.devices.pinned import cupy_or_none, fitting_cupy, tried
from poochplan.runtime.metering.allocated import aside
from poochplan.tensors.operators import Flat
from poochplan.tensors.storages import Geometry, new_storage, on_whole
from poochplan.torch_private.cuda_internals import raw_stream
from poochplan.torch_private.tensor_internals import version_of

from . import fewer_bytes
from .replay import Birth, RecordedOp, StorageRecord, View

Integers = npt.NDArray[Any]

DRAWING: Any = torch.ops.aten.bernoulli_.float
SCALING: tuple[Any, ...] = (torch.ops.aten.div_.Scalar, torch.ops.aten.mul_.Scalar)
MAKING: tuple[Any, ...] = (torch.ops.aten.native_dropout.default, torch.ops.aten.bernoulli.p)
"""The ops of ``formats/narrow.py``."""
_INTEGERS = {
    torch.bool: (torch.uint8, np.uint8),
    torch.float32: (torch.int32, np.uint32),
    torch.bfloat16: (torch.int16, np.uint16),
    torch.float16: (torch.int16, np.uint16),
}
"""Integers of the same size, for the dtypes of masks."""
NO_MASK = "other ops than the planned ones have made it"
PART = 1 << 16
"""Elements that are narrowed or widened at a time on the CPU; a multiple of 8."""
GATHERING = 0x0102040810204080
"""By this product of eight bytes of 0 or 1, the highest byte has all of them as bits, the first one as the lowest."""
SOURCE = Path(__file__).parent / "native" / "bits.cu"
NAMES = tuple(f"{name}_{size_bytes}" for name in ("narrow", "widen") for size_bytes in (1, 2, 4))
ALIGNED_BYTES = 16
"""At a multiple of this begin the buffers of a kernel."""
THREADS = 256
"""Of a block."""
_TRIED = 77
"""Bools: the last of them are read and written one by one."""
Scales = tuple[tuple[Any, int | float], ...]
"""Ops that scale a mask, and their numbers."""


class OnDevice(NamedTuple):
    """The two contents on CUDA, in a table that widens bits, and what narrows and widens there."""

    table: torch.Tensor
    kernels: Kernels | None


Tables = dict[tuple[torch.device, torch.dtype, Scales], OnDevice]
"""By the device and by what has made a mask."""


class Patterns(NamedTuple):
    """The two contents of a mask's elements, as integers."""

    zero: int
    one: int


def patterns_of(record: StorageRecord, dtype: torch.dtype, tables: Tables) -> Patterns | OnDevice | None:
    """The two contents of the elements of a storage; on CUDA one of the ``tables``, to which it is added. None if the
    storage's recorded writers are not those of a mask.
    """
    storage, scales = record.storage(), _scales_of(record, dtype)
    patterns = _patterns(dtype, scales) if scales is not None else None
    if storage is None or scales is None or patterns is None or storage.device.type == "cpu":
        return patterns
    key = storage.device, dtype, scales
    if key not in tables:
        tables[key] = on_device(*key)
    return tables[key]


def _scales_of(record: StorageRecord, dtype: torch.dtype) -> Scales | None:
    storage, birth, writes = record.storage(), record.birth, record.writes
    if storage is None or birth is None or dtype not in _INTEGERS:
        return None
    if birth.func in MAKING and not writes and dtype is torch.bool:
        return ()
    if not birth.uninitialised or not writes:
        return None
    scales = []
    for number, op in enumerate(writes):
        if op is None or len(op.reads) != 1 or not _covers(op.reads[0], record, storage, dtype):
            return None
        if number == 0 and op.func is not DRAWING:
            return None
        if number:
            factor = op.arguments[1]
            if op.func not in SCALING or len(op.arguments) != 2 or type(factor) not in (int, float):
                return None
            scales.append((op.func, factor))
    return tuple(scales)


def _covers(view: View, record: StorageRecord, storage: torch.UntypedStorage, dtype: torch.dtype) -> bool:
    """Whether an op that writes the view in place writes every element of the storage."""
    geometry, count = view.geometry, 1
    for extent, stride in sorted(zip(geometry.shape, geometry.stride, strict=True), key=lambda axis: axis[1]):
        if extent != 1 and stride != count:
            return False
        count *= extent
    is_whole = geometry.offset == 0 and count * dtype.itemsize == storage.nbytes()
    return is_whole and view.record is record and geometry.dtype is dtype


@functools.cache
def _patterns(dtype: torch.dtype, scales: Scales) -> Patterns | None:
    """The contents that the ops make of 0 and 1, wherever in a tensor these are."""
    with aside():
        found = torch.tensor([0.0, 1.0], dtype=dtype, device="cpu").repeat(65)[:129]
        for func, factor in scales:
            func(found, factor)
        if not bool(torch.isfinite(found).all()):
            return None
        integers = _array(found.untyped_storage(), dtype)[:129]
    zeros, ones = set(integers[::2].tolist()), set(integers[1::2].tolist())
    return Patterns(zeros.pop(), ones.pop()) if len(zeros) == len(ones) == 1 else None


def on_device(where: torch.device, dtype: torch.dtype, scales: Scales) -> OnDevice:
    """The table has the eight elements for each byte of bits, as the ops make them of 0 and 1, in words of eight bytes.

    It waits for the device: from then on every stream may read the table.
    """
    numbers = torch.arange(TABLE_ROWS, dtype=torch.uint8, device=where)
    found = (numbers[:, None] >> numbers[:8]).bitwise_and_(1).to(dtype)
    for func, factor in scales:
        func(found, factor)
    torch.cuda.current_stream(where).synchronize()
    return OnDevice(found.view(torch.int64), kernels_on(where))


def _array(storage: torch.UntypedStorage, dtype: torch.dtype) -> Integers:
    """The whole storage as integers, without a copy."""
    integer, unsigned = _INTEGERS.get(dtype, (torch.uint8, np.uint8))
    return on_whole(storage, integer).numpy().view(unsigned)


def narrow(
    storage: torch.UntypedStorage, dtype: torch.dtype, patterns: Patterns | OnDevice
) -> torch.UntypedStorage | None:
    """One bit for each element of the storage, the first one the lowest of a byte. None if there is a third content,
    which is looked for on the CPU.
    """
    if isinstance(patterns, OnDevice):
        return _narrow_on_device(on_whole(storage, _INTEGERS[dtype][0]), *patterns)
    whole = _array(storage, dtype)
    made = new_storage(-(-len(whole) // 8), storage.device)
    bits = _array(made, torch.uint8)
    for start in range(0, len(whole), PART):
        part = whole[start : start + PART]
        ones = part == patterns.one
        others = 0 if patterns.one == patterns.zero else np.count_nonzero(part == patterns.zero)
        if np.count_nonzero(ones) + others != len(part):
            return None
        bits[start // 8 : -(-(start + len(part)) // 8)] = np.packbits(ones, bitorder="little")
    return made


def _narrow_on_device(whole: torch.Tensor, table: torch.Tensor, kernels: Kernels | None) -> torch.UntypedStorage:
    """Without a kernel by words of eight elements. Other elements than bools are compared with the pattern for 1."""
    made = new_storage(-(-len(whole) // 8), whole.device)
    bits = on_whole(made, torch.uint8)
    if kernels is not None and kernels.narrow(whole, bits, table):
        return made
    one = table.view(whole.dtype)[-1, -1]
    room = on_whole(new_storage(8 * min(len(bits), DEVICE_PART // 8), whole.device), torch.int64)
    for start in range(0, len(whole), DEVICE_PART):
        part, read = whole[start : start + DEVICE_PART], 0
        words = room[: -(-len(part) // 8)]
        if whole.dtype is torch.uint8:
            read = len(part) // 8
            torch.mul(part[: 8 * read].view(torch.int64), GATHERING, out=words[:read])
        if read < len(words):
            ones = words.view(torch.bool)
            ones[len(part) :] = False
            torch.eq(part[8 * read :], one, out=ones[8 * read : len(part)])
            words[read:].mul_(GATHERING)
        bits[start // 8 : start // 8 + len(words)] = words.view(torch.uint8)[7::8]
    return made


def widen(bits: torch.Tensor, count: int, dtype: torch.dtype, patterns: Patterns | OnDevice) -> torch.Tensor:
    """A new storage of ``count`` elements, as :func:`narrow` has found them."""
    storage = new_storage(count * dtype.itemsize, bits.device)
    if isinstance(patterns, OnDevice):
        _widen_on_device(bits, on_whole(storage, dtype), *patterns)
        return on_whole(storage, dtype)
    whole, table = _array(storage, dtype), _table(_INTEGERS[dtype][1], patterns)
    packed, full = bits.numpy(), count - count % 8
    bytewise = whole[:full].reshape(-1, 8)
    for start in range(0, full // 8, PART // 8):
        part = packed[start : min(start + PART // 8, full // 8)]
        np.take(table, part, axis=0, out=bytewise[start : start + len(part)], mode="clip")
    if full < count:
        whole[full:] = table[packed[-1]][: count - full]
    return on_whole(storage, dtype)


def _widen_on_device(bits: torch.Tensor, whole: torch.Tensor, table: torch.Tensor, kernels: Kernels | None) -> None:
    if kernels is not None and kernels.widen(bits, whole, table):
        return
    room = on_whole(new_storage(4 * min(len(bits), DEVICE_PART // 8), bits.device), torch.int32)
    for start in range(0, len(whole), DEVICE_PART):
        part = whole[start : start + DEVICE_PART]
        full, rows = len(part) // 8, room[: -(-len(part) // 8)]
        rows.copy_(bits[start // 8 : start // 8 + len(rows)])
        into = part[: 8 * full].view(torch.int64).view(full, table.shape[1])
        torch.index_select(table, 0, rows[:full], out=into)
        if full < len(rows):
            last = torch.index_select(table, 0, rows[full:]).view(whole.dtype)[0]
            part[8 * full :] = last[: len(part) - 8 * full]


@functools.cache
def _table(integer: Any, patterns: Patterns) -> Integers:
    """The eight elements for each byte of bits."""
    each = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.array(patterns, dtype=integer)[each]


def bits_of(
    whole: StorageRecord, dtype: torch.dtype, form: str, order: int, most_bytes: int, tables: Tables
) -> tuple[StorageRecord, torch.Tensor] | None:
    """Narrows a mask, or a value with another form, to at most so many bytes: their record, and a tensor with all of
    them. From then on an op of that ``order`` recomputes the value. ``form``: the type of the narrow elements, as plans
    name it.

    None, without effect, if other ops than those of such a value have made it, or it is too large.
    """
    storage = whole.storage()
    if storage is None:
        return None
    count, made = storage.nbytes() // dtype.itemsize, None
    widening: Any = widen
    with torch.no_grad():
        if dtype is not torch.int64 and form not in (HALF, ""):
            patterns = patterns_of(whole, dtype, tables) if count <= 8 * most_bytes else None
            made = narrow(storage, dtype, patterns) if patterns is not None else None
            given: tuple[Any, ...] = count, dtype, patterns
        elif fewer_bytes.has_form(whole, dtype, form) and count * FORM_BYTES[form] <= most_bytes:
            made, widening, given = fewer_bytes.narrow(storage, form), fewer_bytes.widen, (count, form)
        if made is None:
            return None
        tensor = on_whole(made, torch.uint8)
    record = StorageRecord(weakref.ref(made), version_of(tensor))
    view = View(record, 0, Geometry.of(tensor), None)
    arguments = (view, *given)
    op = RecordedOp(order, widening, arguments, (view,), Flat(len(arguments), ()), False)
    op.births = (Birth(0, whole),)
    whole.widened = len(whole.writes), op
    return record, tensor


# -- kernels on CUDA --------------------------------------------------------------------------------------------------


class _Stream(NamedTuple):
    """What CuPy reads of a stream that is not its own."""

    ptr: int


class Kernels:
    """The kernels on the current GPU."""

    def __init__(self, cupy: Any) -> None:
        module = cupy.RawModule(code=SOURCE.read_text())
        self._functions = {name: module.get_function(name) for name in NAMES}

    def narrow(self, whole: torch.Tensor, bits: torch.Tensor, table: torch.Tensor) -> bool:
        """Queues narrowing. False, without effect, if a buffer begins at another place than a kernel needs."""
        return self._queue(f"narrow_{whole.itemsize}", whole, len(whole), bits, table, 16)

    def widen(self, bits: torch.Tensor, whole: torch.Tensor, table: torch.Tensor) -> bool:
        """The same for widening."""
        return self._queue(f"widen_{whole.itemsize}", bits, len(whole), whole, table, 16 // whole.itemsize)

    def _queue(
        self, name: str, source: torch.Tensor, count: int, into: torch.Tensor, table: torch.Tensor, each: int
    ) -> bool:
        """``each``: the elements of a thread."""
        if source.data_ptr() % ALIGNED_BYTES or into.data_ptr() % ALIGNED_BYTES:
            return False
        where, blocks = source.device, -(-count // (each * THREADS))
        assert where.index is not None
        with torch.cuda.device(where):  # CuPy takes the kernel of the current GPU
            given = source.data_ptr(), count, into.data_ptr(), table.data_ptr()
            self._functions[name]((blocks,), (THREADS,), given, stream=_Stream(raw_stream(where.index)))
        return True


def kernels_on(where: torch.device) -> Kernels | None:
    """Those of a GPU; None without a CuPy that fits and compiles them. They are tried once for each GPU."""
    cupy = cupy_or_none()
    return _fitting(cupy, where) if cupy is not None and fitting_cupy(cupy, where) is not None else None


@functools.lru_cache(maxsize=4)
def _fitting(cupy: Any, where: torch.device) -> Kernels | None:
    def trial() -> tuple[Kernels, str]:
        kernels = Kernels(cupy)
        return kernels, "" if _is_right(kernels, where) else "they gave other bits"

    return tried(
        trial,
        where,
        f"CuPy {cupy.__version__} has no kernels for the bits of masks here",
        "ops of torch make them, in more time; install the CuPy for this CUDA (poochplan[cuda12] or [cuda13]) with its "
        "compiler, NVRTC",
    )


def _is_right(kernels: Kernels, where: torch.device) -> bool:
    """Whether some bools have numpy's bits, and come back. It takes less than plans count for the smallest mask."""
    packed = np.packbits(np.arange(_TRIED) % 3 == 0, bitorder="little").tolist()
    whole = (torch.arange(_TRIED, dtype=torch.uint8, device=where) % 3 == 0).view(torch.uint8)
    table = torch.zeros(8 * TABLE_ROWS, dtype=torch.uint8, device=where)
    table[-1] = 1
    bits, back = torch.zeros(len(packed), dtype=torch.uint8, device=where), torch.full_like(whole, 2)
    was_queued = kernels.narrow(whole, bits, table) and kernels.widen(bits, back, table)
    return was_queued and bits.tolist() == packed and back.tolist() == whole.tolist()
