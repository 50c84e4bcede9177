"""The log of a scope's allocations."""

from __future__ import annotations

import threading

import numpy as np
import torch

from poochplan.runtime.arena.library import BIRTH, DEATH, MARK, AllocationLog, ThreadScope, lifetimes
from tests.runtime.arena.steps import Net, recorded


def test_births_deaths_and_marks_are_in_order(scope: ThreadScope) -> None:
    with AllocationLog(scope) as log:
        first = torch.empty(100, dtype=torch.uint8)
        log.mark(7)
        second = torch.empty(3000, dtype=torch.uint8)
        del first
        log.mark(9)
        del second
    assert log.events["kind"].tolist() == [BIRTH, MARK, BIRTH, DEATH, MARK, DEATH]
    assert log.events["size_bytes"].tolist() == [100, 0, 3000, 100, 0, 3000]
    assert log.events["value"].tolist() == [0, 7, 0, 0, 9, 0]
    blocks = log.events["block"]
    assert (blocks[0], blocks[2]) == (blocks[3], blocks[5])
    assert blocks[0] < blocks[2]


def test_a_step_gives_the_same_births_twice(scope: ThreadScope) -> None:
    net = Net()
    net.step()
    first, second = (recorded(net.step, scope) for _ in range(2))
    born = [events[events["kind"] != DEATH] for events in (first, second)]
    assert len(born[0]) > 50
    assert born[0]["size_bytes"].tolist() == born[1]["size_bytes"].tolist()
    assert born[0]["value"].tolist() == born[1]["value"].tolist()


def test_other_threads_are_left_out_and_their_hand_in_a_death_is_told(scope: ThreadScope) -> None:
    held = [torch.empty(4096, dtype=torch.uint8)]

    def run() -> None:
        torch.empty(1 << 20, dtype=torch.uint8)
        held.clear()

    with AllocationLog(scope) as log:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert log.events[["kind", "size_bytes", "value"]].tolist() == [(DEATH, 4096, 1)]


def test_lifetimes_say_point_birth_and_death_of_each_block(scope: ThreadScope) -> None:
    with AllocationLog(scope) as log:
        a = torch.empty(4096, dtype=torch.uint8)
        log.mark(3)
        small = torch.empty(16, dtype=torch.uint8)
        b = torch.empty(8192, dtype=torch.uint8)
        del a
        c = torch.empty(4096, dtype=torch.uint8)
        del b, small
    found = lifetimes(log.events, smallest_bytes=4096)
    assert found.tolist() == [(4096, 0, 0, 4), (8192, 3, 3, 6), (4096, 3, 5, -1)]
    assert c.nbytes == 4096


def test_lifetimes_of_a_step_agree_with_a_walk_over_its_events(scope: ThreadScope) -> None:
    net = Net()
    net.step()
    events = recorded(net.step, scope)
    point, expected = 0, {}
    for index, (kind, block, size_bytes, value) in enumerate(events.tolist()):
        if kind == MARK:
            point = value
        elif kind == BIRTH:
            expected[block] = [size_bytes, point, index, -1]
        elif block in expected:
            expected[block][3] = index
    assert lifetimes(events).tolist() == [tuple(row) for row in expected.values()]


def test_a_log_in_which_nothing_happens_is_empty(scope: ThreadScope) -> None:
    with AllocationLog(scope) as log:
        pass
    assert len(log.events) == len(lifetimes(log.events)) == 0


def test_a_long_log_loses_nothing(scope: ThreadScope) -> None:
    with AllocationLog(scope) as log:
        for _ in range(50_000):
            torch.empty(64, dtype=torch.uint8)
    assert len(log.events) == 100_000
    assert np.unique(log.events["block"]).size == 50_000


def test_an_error_within_the_block_passes_and_the_log_ends(scope: ThreadScope) -> None:
    log = AllocationLog(scope)
    try:
        with log:
            torch.empty(4096, dtype=torch.uint8)
            raise KeyError("in the step")
    except KeyError:
        pass
    torch.empty(4096, dtype=torch.uint8)
    assert len(log.events) == 2
