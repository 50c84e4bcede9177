"""The runtime carries out what every baseline policy plans: bitwise gradients, and the predicted peak."""

from __future__ import annotations

import functools

import pytest

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.planner.planning import plan
from poochplan.planner.policies import policy_names
from tests.runtime.nets import CASES, followed

SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)


@pytest.mark.parametrize("case_name", ["residual", "attention"])
@pytest.mark.parametrize("name", policy_names())
def test_a_policys_plan_runs_as_predicted(name: str, case_name: str) -> None:
    made = _tightest(case_name, name)
    found, predicted = followed(CASES[case_name], made).last_step, made.prediction
    assert found.peak_bytes == predicted.peak_bytes
    assert (found.out_bytes, found.in_bytes) == (predicted.out_bytes, predicted.in_bytes)


@functools.cache
def _tightest(case_name: str, name: str) -> Plan:
    """The policy's plan for the smallest of a few budgets that it fits."""
    profile = CASES[case_name].profile()
    for share in SHARES:
        try:
            return plan(profile, int(share * profile.in_core_peak_bytes), policy=name)
        except InfeasibleError:
            continue
    raise AssertionError(f"{name} does not fit the in-core peak")
