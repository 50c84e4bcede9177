"""A fork in mid-step: the child may allocate, and is neither served nor counted; the parent goes on."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable

import torch

from poochplan.runtime.arena.arena import Arena
from poochplan.runtime.arena.library import AllocationLog, Library, ThreadScope
from tests.runtime.arena.steps import filled, holds, places

KIB = 1024


def in_child(claim: Callable[[], bool]) -> int:
    """The exit code of a forked child that makes the claim: 0 where it holds, 1 where not, 2 where it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks beside threads
        child = os.fork()
    if child == 0:
        code = 2
        try:
            code = int(not claim())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_in_mid_step_leaves_the_parent_served_and_the_child_not(native: Library) -> None:
    arena = Arena(places((8 * KIB, 0, 0), (8 * KIB, 8 * KIB, 0), (8 * KIB, 16 * KIB, 0)), 64 * KIB)
    with arena.step():
        first = filled(8 * KIB, 1)

        def claim() -> bool:
            own = filled(8 * KIB, 9)  # the step is the parent's
            is_outside = not 0 <= own.data_ptr() - first.data_ptr() < 64 * KIB
            first.fill_(8)
            return is_outside and arena.live_blocks == 1 and holds(own, 9) and holds(first, 8)

        assert in_child(claim) == 0
        second = filled(8 * KIB, 2)
        assert (holds(first, 1), holds(second, 2), arena.live_blocks) == (True, True, 2)
    assert arena.fates().served == 2


def test_in_the_child_nothing_is_counted_or_recorded_and_blocks_may_die(scope: ThreadScope) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 8 * KIB)
    with AllocationLog(scope) as log, arena.step():
        scope.begin_count()
        held = [filled(8 * KIB, 1)]

        def claim() -> bool:
            before = scope.live_bytes
            held.append(filled(1 << 20, 2))
            held.clear()
            arena.close()
            with scope.joined():
                held.append(filled(1 << 20, 3))
            unchanged = scope.live_bytes == before
            scope.begin_count()  # of a thread that has not joined
            held.append(filled(1 << 20, 4))
            return unchanged and scope.live_bytes == 0

        assert in_child(claim) == 0
        held.clear()
        assert (scope.live_bytes, scope.peak_bytes, arena.live_blocks) == (0, 8 * KIB, 0)
    assert len(log.events) == 2


def test_the_child_may_begin_a_step_of_its_own(native: Library) -> None:
    arena = Arena(places((8 * KIB, 0, 0)), 8 * KIB)

    def claim() -> bool:
        with arena.step():
            block = filled(8 * KIB, 3)
            return arena.live_blocks == 1 and holds(block, 3)

    with arena.step():
        assert in_child(claim) == 0
        assert arena.live_blocks == 0


def test_no_child_finds_a_lock_held_by_a_thread_that_is_not_there(scope: ThreadScope) -> None:
    arena = Arena(places(*[(8 * KIB, 0, 0)] * 100), 8 * KIB)
    is_over = threading.Event()

    def churn() -> None:
        scope.join()
        while not is_over.is_set():
            with arena.step():
                for _ in range(100):
                    torch.empty(8 * KIB, dtype=torch.uint8)
            scope.reset_peak()

    def claim() -> bool:
        with arena.step(), AllocationLog(scope) as log:
            held = [torch.empty(8 * KIB, dtype=torch.uint8) for _ in range(100)]
        return len(held) == 100 == len(log.events)

    scope.begin_count()
    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert [in_child(claim) for _ in range(20)] == [0] * 20
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
