"""The kernels for bits of masks, compiled for the processor: numpy's bits, the very patterns, and nothing beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poochplan.runtime.replays.bits import ALIGNED_BYTES, NAMES, SOURCE, THREADS
from tests.cuda_rules.kernels import run
from tests.runtime.served import needs_compiler

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
PATTERNS = {1: [(0, 1)], 2: [(0, 0x3F80), (0x8000, 0x7FC1)], 4: [(0, 0x3F800000), (0x80000000, 0xFFC00001), (5, 5)]}
LENGTHS = (*range(1, 201), 4 * 4096 - 1, 4 * 4096, 100_003, 1_000_001)
BESIDE = 0xA5
"""What lies before and behind each buffer."""
Array = np.ndarray[Any, Any]


def beside(size_bytes: int) -> tuple[Array, Array]:
    """A buffer that begins where kernels need it, and the memory around it."""
    around = np.full(size_bytes + 4 * ALIGNED_BYTES, BESIDE, np.uint8)
    first = -around.ctypes.data % ALIGNED_BYTES + ALIGNED_BYTES
    return around[first : first + size_bytes], around


def is_untouched(around: Array, size_bytes: int) -> bool:
    first = -around.ctypes.data % ALIGNED_BYTES + ALIGNED_BYTES
    return bool((around[:first] == BESIDE).all() and (around[first + size_bytes :] == BESIDE).all())


def both_ways(drawn: Array, element_bytes: int, zero: int, one: int) -> None:
    """Narrows and widens a mask. The bytes behind it are ones to a kernel that reads them."""
    table = np.repeat(np.array([zero, one], UNSIGNED[element_bytes]), 8 * 128)
    mask, _ = beside(element_bytes * len(drawn))
    mask.view(UNSIGNED[element_bytes])[:] = np.where(drawn, one, zero)
    packed = np.packbits(drawn, bitorder="little")
    bits, around_bits = beside(len(packed))
    back, around_back = beside(mask.nbytes)
    for name, source, into, each in (("narrow", mask, bits, 16), ("widen", bits, back, 16 // element_bytes)):
        given = source.ctypes.data, len(drawn), into.ctypes.data, table.ctypes.data
        run(f"{name}_{element_bytes}", -(-len(drawn) // (each * THREADS)), THREADS, given)
    wanted = np.where(drawn | (zero == one), 1, 0)
    assert np.array_equal(bits, np.packbits(wanted.astype(bool), bitorder="little"))
    assert np.array_equal(back, mask)
    assert is_untouched(around_bits, len(bits))
    assert is_untouched(around_back, len(back))


@needs_compiler
@pytest.mark.parametrize("element_bytes", UNSIGNED)
def test_narrowing_gives_numpys_bits_and_widening_the_very_patterns(element_bytes: int) -> None:
    chance = np.random.default_rng(element_bytes)
    for zero, one in PATTERNS[element_bytes]:
        for count in LENGTHS:
            for share in (0.0, 0.6, 1.0):
                both_ways(chance.random(count) < share, element_bytes, zero, one)


@needs_compiler
def test_every_sixteen_bools_have_their_own_bits() -> None:
    every = np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8), bitorder="little")
    both_ways(every.astype(bool), 1, 0, 1)


@needs_compiler
def test_each_byte_but_zero_is_a_one() -> None:
    mask, _ = beside(256)
    mask[:] = np.arange(256)
    for count in (256, 250):
        bits, _ = beside(32)
        run("narrow_1", 1, THREADS, (mask.ctypes.data, count, bits.ctypes.data, mask.ctypes.data))
        assert np.unpackbits(bits, bitorder="little")[:count].tolist() == [0, *[1] * (count - 1)]


def test_the_source_has_the_kernels_that_are_launched() -> None:
    assert all(f"KERNEL({name}, " in SOURCE.read_text() for name in NAMES)
