"""What no plan can be made from is refused with one line that names the field."""

from __future__ import annotations

import math

import msgspec
import pytest

from poochplan.errors import InfeasibleError, PoochError
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.profile import PointKind, Profile
from poochplan.planner.planning import plan, smallest_budget
from tests.planner.random_profiles import resnet_like


def _with_op(profile: Profile, index: int, **changes: object) -> Profile:
    ops = list(profile.ops)
    ops[index] = msgspec.structs.replace(ops[index], **changes)
    return msgspec.structs.replace(profile, ops=tuple(ops))


@pytest.mark.parametrize("duration_s", [-1e-6, math.nan, math.inf])
def test_an_op_without_a_duration_is_named(duration_s: float) -> None:
    broken = _with_op(resnet_like(1), 2, duration_s=duration_s)
    with pytest.raises(PoochError, match=r"ops\[2\] .*expected a duration of at least 0 s, found"):
        plan(broken, "80%")


def test_a_cycle_is_named() -> None:
    profile = resnet_like(1)
    last = next(i for i in reversed(range(len(profile.ops))) if profile.ops[i].outputs)
    first = next(i for i, op in enumerate(profile.ops) if op.inputs and i < last)
    broken = _with_op(profile, first, inputs=(*profile.ops[first].inputs, profile.ops[last].outputs[0]))
    with pytest.raises(
        PoochError, match=rf"ops\[{first}\].*found one that ops\[\d+\] creates later \(a cycle\); profile again"
    ):
        plan(broken, "80%")


def test_a_profile_without_a_backward_is_refused() -> None:
    profile = resnet_like(1)
    forward = tuple(point for point in profile.points if point.kind is PointKind.SAVE)
    with pytest.raises(PoochError, match="the profile has no backward"):
        plan(msgspec.structs.replace(profile, points=forward), "80%")


def test_a_budget_under_the_static_bytes_says_what_they_are() -> None:
    profile = resnet_like(1)
    profile = msgspec.structs.replace(profile, static_bytes={"parameter": smallest_budget(profile) // 2})
    with pytest.raises(InfeasibleError, match="else stays in memory for the whole step") as raised:
        plan(profile, sum(static_bytes(profile).values()) - 1)
    assert raised.value.smallest_budget_bytes == smallest_budget(profile)
