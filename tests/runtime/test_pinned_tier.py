"""The pinned tier: a slab and pages behind it, no more of them than the limit, each given back once."""

from __future__ import annotations

import errno
import os

import pytest

import poochplan
from poochplan.errors import UsageError
from poochplan.runtime.devices import pinned
from poochplan.runtime.devices.pinned import PinnedTier
from tests.runtime.adversarial import OrdinaryMemory, pinned_bytes
from tests.runtime.nets import CASES
from tests.runtime.random_plans import random_plan

pytestmark = pytest.mark.cpu_device


class Tier(PinnedTier):
    """Of pages of 100 bytes; ``taken`` is what is not given back yet, of which there can be ``most`` at once."""

    def __init__(self, slab_bytes: int = 150, most: int = 1000, **options: int) -> None:
        self.taken: list[OrdinaryMemory] = []

        def pin(size_bytes: int) -> OrdinaryMemory:
            if len(self.taken) == most:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return OrdinaryMemory(size_bytes, self.taken)

        super().__init__(pin, page_bytes=100, **options)
        self.reserve(slab_bytes)

    @property
    def sizes(self) -> list[int]:
        return [memory.size_bytes for memory in self.taken]

    def places(self, offset: int, size_bytes: int) -> list[tuple[int, int]]:
        """Offsets and sizes of the parts there."""
        return [(part.offset, part.size_bytes) for part in self.parts(offset, size_bytes)]

    def bytes_apart(self) -> int:
        """Of the first 600: each has a place of its own."""
        return len({(id(part.memory), part.offset) for at in range(600) for part in self.parts(at, 1)})


def test_the_slab_has_its_exact_size_and_pages_are_pinned_when_a_value_needs_them() -> None:
    tier = Tier()
    assert tier.places(20, 130) == [(20, 130)]
    assert tier.sizes == [150]
    parts = tier.parts(180, 200)
    assert [part[1:] for part in parts] == [(30, 70), (0, 100), (0, 30)]
    assert [part.memory for part in parts] == tier.taken[1:]
    assert tier.behind_bytes == 300
    assert tier.parts(180, 200) == parts  # nothing new is pinned
    assert tier.parts(140, 0) == []


def test_every_byte_has_a_place_of_its_own() -> None:
    tier = Tier()
    assert tier.bytes_apart() == 600
    single = [(id(part.memory), part.offset) for at in range(600) for part in tier.parts(at, 1)]
    whole = [(id(part.memory), part.offset + byte) for part in tier.parts(0, 600) for byte in range(part.size_bytes)]
    assert whole == single


def test_pages_beyond_the_limit_are_refused_and_those_within_it_stay() -> None:
    tier = Tier(limit_bytes=250)
    tier.parts(150, 100)
    with pytest.raises(OSError, match=r"is limited to 250 B, needed 300 B; free host memory") as raised:
        tier.parts(200, 200)
    assert raised.value.errno == errno.ENOMEM
    assert tier.behind_bytes == 100
    tier.parts(200, 100)
    assert tier.behind_bytes == 200
    tier.free()
    assert tier.taken == []


def test_without_a_limit_given_it_is_a_share_of_what_is_available_at_the_first_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = Tier()
    monkeypatch.setattr(pinned, "available_bytes", lambda: 400)
    tier.parts(150, 200)
    monkeypatch.setattr(pinned, "available_bytes", lambda: 0)
    tier.parts(350, 100)
    with pytest.raises(OSError, match="is limited to 300 B, needed 400 B"):
        tier.parts(450, 1)


def test_memory_that_cannot_be_pinned_is_an_error_and_the_rest_serves() -> None:
    tier = Tier(0, most=2, limit_bytes=1000)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        tier.parts(0, 300)
    assert tier.places(0, 200) == [(0, 100), (0, 100)]


def test_pages_are_pinned_ahead_as_many_as_there_are_and_the_next_values_take_them() -> None:
    tier = Tier(0, most_ahead=4)
    for count, there in ((1, 2), (2, 4), (3, 6), (4, 8), (8, 12)):
        tier.parts(0, 100 * count)
        for page in tier._ahead:
            page.result()
        assert len(tier.taken) == there
        assert pinned_bytes(tier) == 100 * count
    tier.free()
    assert tier.taken == []


def test_none_is_pinned_ahead_of_the_limit_and_a_plan_needs_none() -> None:
    tier = Tier(0, limit_bytes=350, most_ahead=4)
    tier.parts(0, 200)
    tier.reserve(250)
    assert sorted(memory.size_bytes for memory in tier.taken) == [50, 100, 100]
    tier.parts(250, 100)
    assert tier.behind_bytes + 100 * len(tier._ahead) <= 350
    tier.forget_ahead()
    assert pinned_bytes(tier) == sum(memory.size_bytes for memory in tier.taken) == 350


def test_what_cannot_be_pinned_ahead_is_an_error_of_the_value_that_needs_it() -> None:
    tier = Tier(0, most=1, most_ahead=4)
    tier.parts(0, 100)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        tier.parts(100, 100)
    tier.free()
    assert tier.taken == []


def test_trimming_gives_back_the_pages_wholly_beyond_and_freeing_everything_once() -> None:
    tier = Tier()
    tier.parts(150, 400)
    tier.trim([(0, 351)])
    assert tier.behind_bytes == 300
    tier.trim([(0, 350)])
    assert tier.behind_bytes == 200
    tier.trim([(0, 150)])
    assert tier.sizes == [150]
    tier.free()
    tier.free()
    assert tier.taken == []


def test_a_plan_is_pinned_where_no_page_lies_yet_and_pages_stay_as_they_are() -> None:
    tier = Tier(slab_bytes=0)
    tier.parts(120, 30)
    pages = list(tier.taken)
    tier.reserve(330)
    assert tier.taken[: len(pages)] == pages
    assert sorted(memory.size_bytes for memory in tier.taken[len(pages) :]) == [100, 130]
    assert tier.parts(120, 30)[0].memory is pages[0]
    assert tier.bytes_apart() == 600


def test_a_plans_bytes_may_begin_behind_others_and_what_lies_between_is_pinned_when_needed() -> None:
    tier = Tier()
    tier.reserve(1000, 310)
    assert pinned_bytes(tier) == 1150
    assert tier.places(100, 260) == [(100, 50), (0, 100), (0, 60), (0, 50)]
    assert pinned_bytes(tier) == 1310
    assert tier.behind_bytes == 310  # the old slab among them


def test_pages_under_a_plan_do_not_count_against_the_limit() -> None:
    tier = Tier(limit_bytes=200, slab_bytes=0)
    tier.parts(0, 200)
    tier.reserve(200)
    assert tier.behind_bytes == 0
    tier.parts(200, 200)
    assert tier.behind_bytes == 200


def test_what_nobody_lies_on_is_given_back_wherever_it_is() -> None:
    tier = Tier()
    slab = tier.taken[0]
    tier.reserve(1000, 310)
    tier.trim([(149, 150), (310, 1310)])
    assert slab in tier.taken
    tier.trim([(310, 1310)])
    assert tier.sizes == [1000]


def test_a_limit_is_refused_where_the_disk_is_the_limit() -> None:
    plan = random_plan(CASES["residual"].profile(), 0, (0, 1, 0))
    with pytest.raises(UsageError, match="host_limit_bytes: expected a plan for cuda, found one for cpu"):
        poochplan.apply(plan, CASES["residual"].fresh()[0], host_limit_bytes=1 << 30)
