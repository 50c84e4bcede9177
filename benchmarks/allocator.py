"""What the compiled allocator costs: CPU nanoseconds for a block's birth and death, plain, wrapped, counted and served.

The loop is C++, compiled beside the library; in each round all kinds run right after each other.

    python -m benchmarks.allocator [--rounds 21] [-o FILE.json]
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.facts import facts_of_run, parser_of, write_results
from poochplan.native import FLAGS
from poochplan.runtime.arena.arena import Arena, Places
from poochplan.runtime.arena.library import AllocationLog, ThreadScope, build, compiler_name, is_built

SIZES_BYTES = 64, 4096, 65536
PAIRS = 20_000
LIVE_BLOCKS = 2000
"""Blocks that live meanwhile, in the table of the allocator."""
LOOP = """
#include <c10/core/CPUAllocator.h>
#include <ctime>
static double now_ns() { // of this thread alone, since others share the cores
  timespec at;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
  return 1e9 * at.tv_sec + at.tv_nsec;
}
extern "C" double ns_per_pair(int is_default, size_t size_bytes, int pairs) {
  c10::Allocator* allocator = is_default ? c10::GetDefaultCPUAllocator() : c10::GetCPUAllocator();
  const double start_ns = now_ns();
  for (int at = 0; at < pairs; ++at) allocator->allocate(size_bytes);
  return (now_ns() - start_ns) / pairs;
}
"""
Pair = Callable[[int], float]


def compiled_loop(folder: Path) -> Callable[[int, int, int], float]:
    source, library, home = folder / "loop.cpp", folder / "loop.so", Path(torch.__file__).parent
    source.write_text(LOOP)
    flags = [flag for flag in FLAGS if "visibility" not in flag]
    call = [compiler_name(), *flags, f"-I{home / 'include'}", str(source), f"-L{home / 'lib'}", "-lc10"]
    subprocess.run([*call, "-o", str(library)], check=True)
    found = ctypes.PyDLL(str(library)).ns_per_pair
    found.restype, found.argtypes = ctypes.c_double, (ctypes.c_int, ctypes.c_size_t, ctypes.c_int)
    return found


def kinds(loop: Callable[[int, int, int], float], scope: ThreadScope) -> dict[str, Pair]:
    """Nanoseconds of a pair of that many bytes, by kind."""

    def counted(size_bytes: int) -> float:
        with scope.joined():
            scope.begin_count()
            taken_ns = loop(0, size_bytes, PAIRS)
            scope.end_count()
        return taken_ns

    def recorded(size_bytes: int) -> float:
        with AllocationLog(scope):
            return loop(0, size_bytes, PAIRS)

    def served(size_bytes: int) -> float:
        same = np.zeros(PAIRS, np.int64)
        arena = Arena(Places(same + size_bytes, same, same), max(512, size_bytes), smallest_bytes=1)
        with arena.step():
            taken_ns = loop(0, size_bytes, PAIRS)
        assert arena.fates().served == PAIRS
        arena.close()
        return taken_ns

    return {
        "plain": lambda size_bytes: loop(1, size_bytes, PAIRS),
        "wrapped": lambda size_bytes: loop(0, size_bytes, PAIRS),
        "counted": counted,
        "recorded": recorded,
        "served": served,
    }


def measure(rounds: int) -> dict[str, object]:
    """Medians in nanoseconds by size and kind, of what each kind adds to plain, and of the calls from Python."""
    start_s = time.perf_counter()
    was_built = is_built()
    build()
    build_s = None if was_built else time.perf_counter() - start_s
    scope = ThreadScope()
    held = [torch.empty(1000) for _ in range(LIVE_BLOCKS)]
    found: dict[str, object] = {"build_s": build_s, "live_blocks": len(held), "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        by_kind = kinds(compiled_loop(Path(folder)), scope)
        for size_bytes in SIZES_BYTES:
            times = [{kind: pair(size_bytes) for kind, pair in by_kind.items()} for _ in range(rounds)]
            found[f"{size_bytes} B"] = {
                kind: {
                    "ns": round(statistics.median(row[kind] for row in times), 1),
                    "added_ns": round(statistics.median(row[kind] - row["plain"] for row in times), 1),
                }
                for kind in by_kind
            }
    return found | calls_ns(scope)


def calls_ns(scope: ThreadScope) -> dict[str, object]:
    """Of what a runtime calls after each op and at each point."""
    arena = Arena(Places(*(np.zeros(0, np.int64) for _ in range(3))), 0)
    scope.begin_count()
    with arena.step():
        found = {"peak_ns": _each_ns(lambda _: scope.peak_bytes), "at_ns": _each_ns(arena.at)}
    scope.end_count()
    return dict(found)


def _each_ns(call: Callable[[int], object]) -> float:
    rounds = []
    for _ in range(7):
        start_s = time.thread_time()
        for number in range(PAIRS):
            call(number)
        rounds.append((time.thread_time() - start_s) / PAIRS * 1e9)
    return round(statistics.median(rounds), 1)


def main() -> None:
    asked = parser_of(__doc__, rounds=21).parse_args()
    found = facts_of_run(asked) | measure(asked.rounds)
    print(json.dumps(found, indent=1))
    write_results(asked.output, found)


if __name__ == "__main__":
    main()
