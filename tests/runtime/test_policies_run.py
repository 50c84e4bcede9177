"""The runtime carries out what every baseline policy plans: bitwise gradients, and the predicted peak."""

from __future__ import annotations

import functools

import pytest

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.planner.planning import plan
from poochplan.planner.policies import policy_names
from tests.runtime.nets import CASES, equal, in_core, train

SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)


@pytest.fixture(scope="module", params=["residual", "attention"])
def case_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", policy_names())
def test_a_policys_plan_runs_as_predicted(name: str, case_name: str) -> None:
    case = CASES[case_name]
    made = _tightest(case_name, name)
    reference = in_core(case, 2)
    planned, report = train(case, 2, made)
    assert equal(reference, planned)
    assert report is not None
    assert report.total.fallbacks == 0, report.total.fallback_reasons
    assert report.last_step.peak_bytes == made.prediction.peak_bytes
    assert report.last_step.out_bytes == made.prediction.out_bytes
    assert report.last_step.in_bytes == made.prediction.in_bytes


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
