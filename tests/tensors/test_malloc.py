"""Freed memory goes back to the system while a session or a profile lasts, and is kept for the next tensor after it.

Each claim is tried in a process of its own, since what it is about holds for a whole process. Asked is what the C
library says, not the clock: how many mappings of their own its blocks have.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poochplan.tensors.host_memory import freed_memory_given_back, page_fault_s, page_faults

ROOT = Path(__file__).parents[2]
PRELUDE = """
import ctypes
from poochplan.tensors.host_memory import freed_memory_given_back

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def mapped(size_bytes=1 << 20, make=bytearray):
    # whether a block of that size is a mapping of its own, once one like it has been freed
    block = make(size_bytes)
    del block
    before = mallinfo().hblks
    block = make(size_bytes)
    return mallinfo().hblks - before == 1
"""
OF_TENSORS = """
import torch
import poochplan
from tests.runtime.nets import CASES, LINK
from tests.runtime.random_plans import random_plan

def mapped_tensor(size_bytes=1 << 20):
    return mapped(size_bytes, lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8))

def watched():
    seen.append(mapped_tensor())
    return step()

seen = []
model, step, _ = CASES["residual"].fresh()
profile = poochplan.profile(watched, model=model, iterations=1, link=LINK)
print("by_pytorch_alone", any(seen[:2]))
print("in_the_profile", all(seen[2:5]))  # captured, and timed without an arena
print("after_the_profile", mapped_tensor())

plan = random_plan(profile, 0, (0, 1, 0))  # gives everything up
with poochplan.apply(plan, model):
    loss = step()
    print("in_the_session", mapped_tensor(30 << 20))  # no hole in the heap is that large
print("while_values_are_held", mapped_tensor(30 << 20))
loss.backward()
print("after_the_session", mapped_tensor())

def broken():
    print("entering", mapped_tensor(30 << 20))
    raise OSError

try:
    poochplan.apply(plan, model, device=broken).__enter__()
except OSError:
    print("not_entered", mapped_tensor(31 << 20))
"""

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library does not tell of its mappings"
)


def said(script: str, **environment: str) -> list[str]:
    """The words that the script prints, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PRELUDE + script]
    done = subprocess.run(command, cwd=ROOT, env=clean | environment, check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.fixture(scope="module")
def mapped() -> dict[str, bool]:
    """Whether a tensor was a mapping of its own at several moments of one process."""
    words = said(OF_TENSORS)
    return {moment: answer == "True" for moment, answer in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize(
    ("within", "outside"),
    [
        ("in_the_session", "after_the_session"),
        ("while_values_are_held", "after_the_session"),
        ("entering", "not_entered"),
        ("in_the_profile", "by_pytorch_alone"),
        ("in_the_profile", "after_the_profile"),
    ],
)
def test_freed_memory_is_given_back_while_a_session_or_a_profile_lasts_and_not_otherwise(
    mapped: dict[str, bool], within: str, outside: str
) -> None:
    assert (mapped[within], mapped[outside]) == (True, False)


SEVERAL = """
first, second = freed_memory_given_back(), freed_memory_given_back()
first.__enter__(); second.__enter__(); first.__exit__(None, None, None)
print(mapped())
second.__exit__(None, None, None)
print(mapped())
"""
ON_THREADS = """
import threading
def often():
    for _ in range(200):
        with freed_memory_given_back():
            pass
with freed_memory_given_back():
    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(mapped())
print(mapped())
"""


@pytest.mark.parametrize("script", [SEVERAL, ON_THREADS], ids=["in any order", "on many threads"])
def test_the_last_of_several_blocks_ends_it(script: str) -> None:
    assert said(script) == ["True", "False"]


@pytest.mark.parametrize(
    ("environment", "below_kib"),
    [
        ({"MALLOC_MMAP_THRESHOLD_": "524288"}, 256),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.mmap_threshold=0x80000"}, 256),
        ({"MALLOC_MMAP_THRESHOLD_": "4096", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=524288"}, 256),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, 100),
    ],
    ids=["variable", "tunable", "both", "the fixed one of glibc, whose rule it switches off"],
)
def test_the_threshold_that_the_environment_asks_for_is_put_back(environment: dict[str, str], below_kib: int) -> None:
    script = f"""
def both(): print(mapped(1 << 20), mapped({below_kib} << 10))
both()
with freed_memory_given_back(): pass
both()
"""
    assert said(script, **environment) == ["True", "False", "True", "False"]


def test_threads_of_later_have_arenas_of_their_own_again() -> None:
    script = """
import threading
libc = ctypes.CDLL(None)
libc.open_memstream.restype = ctypes.c_void_p

def arenas():
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    return text.value.count(b"<heap nr")

def with_threads(count):
    all_there = threading.Barrier(count + 1)
    def allocate():
        blocks = [bytearray(5000) for _ in range(10)]
        all_there.wait(); all_there.wait()
    threads = [threading.Thread(target=allocate) for _ in range(count)]
    for thread in threads: thread.start()
    all_there.wait()
    found = arenas()
    all_there.wait()
    for thread in threads: thread.join()
    return found

before = arenas()
with freed_memory_given_back():
    with_threads(2)
print(with_threads(4) - before)
"""
    assert said(script) == ["4"]


def test_it_is_also_a_decorator() -> None:
    @freed_memory_given_back()
    def two() -> int:
        return 2

    assert two() == 2


@pytest.mark.parametrize("way", ["give_back_freed()", "block = freed_memory_given_back(); block.__enter__()"])
def test_what_was_freed_before_is_given_back_at_once_and_as_a_block_begins(way: str) -> None:
    script = f"""
import pathlib
from poochplan.tensors.host_memory import give_back_freed

def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) << 12

blocks = [bytearray(100_000) for _ in range(400)]
last = bytearray(100_000)  # above them: the heap cannot shrink
del blocks
before = resident_bytes()
{way}
print(before - resident_bytes() > 20_000_000)
"""
    assert said(script) == ["True"]


@pytest.mark.parametrize("asked", [{}, {"MALLOC_PERTURB_": "252"}], ids=["alone", "asked for by the environment"])
def test_new_memory_holds_the_byte_within_the_block_and_what_it_held_before_behind_it(asked: dict[str, str]) -> None:
    script = """
from poochplan.tensors.host_memory import new_memory_holds
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def held():
    return [{*ctypes.string_at(libc.malloc(size), size)} for size in (5_000, 5_000_000)]

for byte in (0, 1):
    with new_memory_holds(byte):
        print(held() == [{byte}, {byte}])
print(*held()[1])
"""
    *within, begins = said(script, **asked)[:3]
    assert within == ["True", "True"]
    assert begins == "3" if asked else begins != "1"


def test_a_page_fault_is_counted_and_timed_where_memory_is_fresh() -> None:
    with mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        counts, place = [], ctypes.c_char.from_buffer(fresh)
        for _ in range(2):
            before = page_faults()
            ctypes.memset(ctypes.addressof(place), 1, len(fresh))
            counts.append(page_faults() - before)
        del place
    assert counts[0] >= counts[1] + 2  # pages of 2 MiB at most
    assert 1e-8 < page_fault_s() < 1e-2
