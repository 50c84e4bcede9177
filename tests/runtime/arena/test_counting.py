"""Live bytes and the log of a scope, against tensors of known sizes; and of a step, with what was there before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from poochplan.runtime.arena.library import BIRTH, DEATH, MARK, AllocationLog, ThreadScope, lifetimes
from poochplan.runtime.metering.allocated import AllocatedPeak, step_scope
from tests.runtime.arena.steps import Net, on_another_thread, recorded

SMALL_BYTES, ROUNDED_BYTES = 576, 1024


def empty(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


@pytest.fixture
def count(scope: ThreadScope) -> Iterator[ThreadScope]:
    """Its count has begun, and this thread counts."""
    with scope.joined():
        scope.begin_count()
        yield scope


def test_each_block_of_64_bytes_or_more_counts_rounded_up_to_the_unit(count: ThreadScope) -> None:
    held = [empty(64), empty(513), empty(5000), empty(63), empty(0)]
    assert count.live_bytes == count.peak_bytes == 512 + 1024 + 5120
    del held
    assert (count.live_bytes, count.peak_bytes) == (0, 512 + 1024 + 5120)


def test_what_an_op_takes_inside_is_in_the_peak_and_not_in_what_lives(count: ThreadScope) -> None:
    x = torch.randn(8192)
    y = x.exp().neg()  # the first result dies when the second is there
    assert (count.live_bytes, count.peak_bytes) == (65536, 98304)
    assert torch.equal(y, x.exp().neg())


def test_a_reset_gives_the_most_since_then(count: ThreadScope) -> None:
    first = empty(4096)
    del first
    second, third = empty(1024), empty(2048)
    del third
    assert count.peak_bytes == 4096
    count.reset_peak()
    assert count.peak_bytes == second.nbytes == 1024


def test_other_threads_births_and_deaths_never_count_but_a_block_of_the_scope_may_die_there(count: ThreadScope) -> None:
    held: list[torch.Tensor] = []
    on_another_thread(lambda: held.append(empty(1 << 20)))
    assert (count.live_bytes, count.peak_bytes) == (0, 0)
    held.clear()
    assert count.live_bytes == 0
    held.append(empty(1 << 20))
    on_another_thread(held.clear)
    assert (count.live_bytes, count.peak_bytes) == (0, 1 << 20)


def test_deaths_of_what_this_thread_made_before_the_begin_count_down(scope: ThreadScope) -> None:
    before, others = [empty(4096)], []
    on_another_thread(lambda: others.append(empty(8192)))
    with scope.joined():
        scope.begin_count()
        others.clear()
        assert scope.live_bytes == 0
        on_another_thread(before.clear)
        assert (scope.live_bytes, scope.peak_bytes) == (-4096, 0)


def test_a_thread_that_has_joined_counts_and_what_is_set_aside_does_not(count: ThreadScope) -> None:
    held: list[torch.Tensor] = []

    def joined() -> None:
        with count.joined():
            held.append(empty(4096))
            with count.set_aside():
                held.append(empty(1 << 20))

    on_another_thread(joined)
    assert count.live_bytes == 4096
    with count.set_aside():
        aside = empty(1 << 20)
    assert count.live_bytes == 4096
    del aside
    held.clear()
    assert (count.live_bytes, count.peak_bytes) == (0, 4096)


def test_two_scopes_count_beside_each_other(native: object) -> None:
    one, other = scopes = ThreadScope(), ThreadScope()
    held: dict[str, torch.Tensor] = {}

    def run() -> None:
        with other.joined():
            other.begin_count()
            held["other"] = empty(2048)

    with one.joined():
        one.begin_count()
        held["one"] = empty(1024)
        on_another_thread(run)
        assert [scope.live_bytes for scope in scopes] == [1024, 2048]
        held.clear()
        assert [scope.live_bytes for scope in scopes] == [0, 0]


def test_a_count_is_exact_while_many_threads_allocate(scope: ThreadScope) -> None:
    def churn(joins: bool) -> None:
        if joins:
            scope.join()
        for number in range(2000):
            empty(512 * (1 + number % 7))

    scope.begin_count()
    threads = [threading.Thread(target=churn, args=(joins,)) for joins in (True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scope.live_bytes == 0
    assert 7 * 512 <= scope.peak_bytes <= 2 * 7 * 512


def test_after_the_end_nothing_changes(count: ThreadScope) -> None:
    held = empty(4096)
    count.end_count()
    del held
    empty(1 << 20)
    assert (count.live_bytes, count.peak_bytes) == (4096, 4096)


@pytest.fixture
def peak(scope: ThreadScope) -> Iterator[AllocatedPeak]:
    """With a census that found nothing; this thread is in the scope of steps, and then in none."""
    meter = AllocatedPeak()
    meter.step_begins()
    yield meter
    found = step_scope()
    assert found is not None
    found.library.scope_join(None)


def test_what_was_born_since_the_census_counts_and_what_no_tensor_shows_where_it_is_told(peak: AllocatedPeak) -> None:
    peak.looked_around({})
    known_bytes = peak.now().peak_bytes
    born = empty(SMALL_BYTES)
    assert peak.now().peak_bytes == known_bytes + ROUNDED_BYTES
    del born
    peak.looked_around({}, unseen_bytes=ROUNDED_BYTES)
    assert peak.now().peak_bytes == known_bytes + 2 * ROUNDED_BYTES


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


def test_other_threads_are_left_out_and_their_hand_in_a_death_is_told(scope: ThreadScope) -> None:
    held = [torch.empty(4096, dtype=torch.uint8)]

    def run() -> None:
        torch.empty(1 << 20, dtype=torch.uint8)
        held.clear()

    with AllocationLog(scope) as log:
        on_another_thread(run)
    assert log.events[["kind", "size_bytes", "value"]].tolist() == [(DEATH, 4096, 1)]


@pytest.mark.parametrize("smallest_bytes", [0, 4096])
def test_lifetimes_of_a_step_agree_with_a_walk_over_its_events(scope: ThreadScope, smallest_bytes: int) -> None:
    net = Net()
    net.step()
    events = recorded(net.step, scope)[:-40]  # some blocks outlive it
    point, expected = 0, {}
    for index, (kind, block, size_bytes, value) in enumerate(events.tolist()):
        if kind == MARK:
            point = value
        elif kind == BIRTH and size_bytes >= smallest_bytes:
            expected[block] = [size_bytes, point, index, -1]
        elif block in expected:
            expected[block][3] = index
    found = lifetimes(events, smallest_bytes)
    assert found.tolist() == [tuple(row) for row in expected.values()]
    assert {1, 2} < {*found["point"].tolist()}
    assert -1 < found["death"].max() > found["death"].min() == -1


def test_a_long_log_loses_nothing(scope: ThreadScope) -> None:
    with AllocationLog(scope) as log:
        for _ in range(50_000):
            torch.empty(64, dtype=torch.uint8)
    assert len(log.events) == 100_000
    assert np.unique(log.events["block"]).size == 50_000


def test_an_error_within_the_block_passes_and_the_log_ends(scope: ThreadScope) -> None:
    log = AllocationLog(scope)
    with pytest.raises(KeyError), log:
        torch.empty(4096, dtype=torch.uint8)
        raise KeyError("in the step")
    torch.empty(4096, dtype=torch.uint8)
    assert len(log.events) == 2
    with AllocationLog(scope) as log:
        pass
    assert len(log.events) == len(lifetimes(log.events)) == 0
