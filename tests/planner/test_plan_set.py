"""A set of plans: the plan for just these inputs, else the nearest larger one, else none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from poochplan import PlanSet
from poochplan.errors import ModelMismatchError, UsageError
from poochplan.formats.plan import Plan
from poochplan.planner.planning import plan
from tests.planner.tiny_profiles import one_value

PLAN = plan(one_value(1.0), "100%")


def _plan(*inputs: str, **changes: Any) -> Plan:
    return msgspec.structs.replace(PLAN, inputs=inputs, **changes)


def sized(size: int) -> tuple[str, str]:
    return f"0 float32[{size}, 3]", f"1.mask bool[{size}]"


SMALL, MIDDLE, LARGE = (_plan(*sized(size)) for size in (4, 8, 16))
SET = PlanSet([MIDDLE, LARGE, SMALL])


def test_the_nearest_has_the_fewest_elements_among_those_that_are_as_large_in_every_dimension() -> None:
    long, square, wide = _plan("ids int64[4, 100]"), _plan("ids int64[16, 16]"), _plan("ids int64[90, 4]")
    plans = PlanSet([wide, long, square])
    assert plans.choose(("ids int64[3, 10]",)) is square
    assert plans.choose(("ids int64[4, 17]",)) is long
    assert plans.choose(("ids int64[17, 4]",)) is wide
    assert plans.choose(("ids int64[17, 17]",)) is None


CHOSEN = {
    "its own": [(one.inputs, one) for one in (SMALL, MIDDLE, LARGE)],
    "the nearest larger": [(sized(1), SMALL), (sized(3), SMALL), (sized(5), MIDDLE), (sized(9), LARGE)],
    "larger": [(("0 float32[17, 3]", "1.mask bool[8]"), None)],
    "wider": [(("0 float32[8, 4]", "1.mask bool[8]"), None)],
    "dtype": [(("0 float64[8, 3]", "1.mask bool[8]"), None)],
    "more dimensions": [(("0 float32[8, 3, 1]", "1.mask bool[8]"), None)],
    "fewer dimensions": [(("0 float32[8]", "1.mask bool[8]"), None)],
    "path": [(("0 float32[8, 3]", "1.other bool[8]"), None)],
    "fewer inputs": [(("0 float32[8, 3]",), None), ((), None)],
}


@pytest.mark.parametrize("name", CHOSEN)
def test_inputs_choose_the_plan_for_just_these_else_the_nearest_larger_else_none(name: str) -> None:
    for inputs, wanted in CHOSEN[name]:
        assert SET.choose(inputs) is wanted


def test_scalars_and_empty_tensors_and_odd_names_are_read() -> None:
    wanted = _plan("step int64[]", "a dict key [1] float32[0, 3]")
    plans = PlanSet([wanted])
    assert plans.choose(("a dict key [1] float32[0, 2]", "step int64[]")) is wanted
    assert plans.choose(("a dict key [1] float32[1, 3]", "step int64[]")) is None


def test_the_largest_has_the_most_elements() -> None:
    assert SET.largest is LARGE


def test_plans_that_make_no_set_are_refused() -> None:
    other_model = msgspec.structs.replace(PLAN.model, fingerprint="other")
    slow = msgspec.structs.replace(PLAN.link, throttle_bytes_per_s=1e6)
    with pytest.raises(UsageError, match="at least one plan, found none"):
        PlanSet([])
    with pytest.raises(UsageError, match=r"found none in plan 2 .*make a new profile"):
        PlanSet([SMALL, _plan()])
    with pytest.raises(UsageError, match=r"plans 1 and 3 both for 0 float32\[4, 3\], 1\.mask bool\[4\]; drop one"):
        PlanSet([SMALL, LARGE, SMALL])
    with pytest.raises(ModelMismatchError, match=r"plans for one model, found .* and plan 2 for"):
        PlanSet([SMALL, _plan("0 float32[5, 3]", model=other_model)])
    with pytest.raises(UsageError, match="one device, found cpu in plan 1 and cuda in plan 2"):
        PlanSet([SMALL, _plan("0 float32[5, 3]", device="cuda")])
    with pytest.raises(UsageError, match=r"one throttle, found None in plan 1 and 1000000\.0 in plan 2"):
        PlanSet([SMALL, _plan("0 float32[5, 3]", link=slow)])
    with pytest.raises(UsageError, match=r"entries such as '0 float32\[8, 3\]', found 'images 4x3'"):
        PlanSet([_plan("images 4x3")])


def test_a_set_is_read_from_files(tmp_path: Path) -> None:
    paths = [one.save(tmp_path / f"{number}.json") for number, one in enumerate((SMALL, LARGE))]
    assert PlanSet.load(*paths).plans == (SMALL, LARGE)
