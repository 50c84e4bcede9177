"""What no plan can be made from is refused with one line that names the field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from poochplan.errors import InfeasibleError, PoochError, UsageError
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.profile import PointKind, Profile, RuntimeCost
from poochplan.planner.planning import plan, smallest_budget
from tests.planner.random_profiles import resnet_like, with_facts

replace = msgspec.structs.replace
PROFILE = resnet_like(1)
LAST = next(i for i in reversed(range(len(PROFILE.ops))) if PROFILE.ops[i].outputs)
FIRST = next(i for i, op in enumerate(PROFILE.ops) if op.inputs and i < LAST)
CYCLE = (*PROFILE.ops[FIRST].inputs, PROFILE.ops[LAST].outputs[0])


def costing(**seconds: float) -> Profile:
    return replace(PROFILE, runtime=RuntimeCost(**{"handle_s": 0.0, "swap_s": 0.0, "record_s": 0.0, **seconds}))


BROKEN: dict[str, tuple[Profile, str]] = {
    **{
        f"a duration of {seconds}": (
            with_facts(PROFILE, "ops", 2, duration_s=seconds), r"ops\[2\] .*expected a duration of at least 0 s, found",
        )
        for seconds in (-1e-6, math.nan, math.inf)
    },
    "a cycle": (
        with_facts(PROFILE, "ops", FIRST, inputs=CYCLE),
        rf"ops\[{FIRST}\].*found one that ops\[\d+\] creates later \(a cycle\); profile again",
    ),
    "no backward": (
        replace(PROFILE, points=tuple(point for point in PROFILE.points if point.kind is PointKind.SAVE)),
        "the profile has no backward",
    ),
    "a link without bandwidth": (
        replace(
            PROFILE, link=replace(PROFILE.link, inward=replace(PROFILE.link.inward, bandwidth_bytes_per_s=0.0))
        ),
        r"link\.inward",
    ),
    "negative seconds": (costing(swap_s=-1.0), "swap_s"),
    "seconds that are no number": (costing(record_s=math.nan), "record_s"),
    "unpacks that take longer than handles": (costing(handle_s=1.0, unpack_s=2.0), "unpack_s"),
    "fetches that take longer than swaps": (costing(fetch_s=1.0), "fetch_s"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_profile_that_no_plan_can_be_made_from_is_refused_by_its_field(name: str) -> None:
    profile, fault = BROKEN[name]
    with pytest.raises(PoochError, match=fault) as caught:
        plan(profile, "80%")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"solver": "nonesuch"}, "solver 'nonesuch' is unknown"),
        ({"ranks_per_host": 0}, "ranks per host: expected a number of at least 1, found 0"),
    ],
)
def test_an_argument_that_means_nothing_is_refused_by_its_name(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        plan(PROFILE, "80%", **options)


def test_a_budget_under_the_static_bytes_says_what_they_are() -> None:
    profile = replace(PROFILE, static_bytes={"parameter": smallest_budget(PROFILE) // 2})
    with pytest.raises(InfeasibleError, match="else stays in memory for the whole step") as raised:
        plan(profile, sum(static_bytes(profile).values()) - 1)
    assert raised.value.smallest_budget_bytes == smallest_budget(profile)
