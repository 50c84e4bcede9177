"""The runtime carries out what every baseline policy plans: bitwise gradients, and the predicted peak."""

from __future__ import annotations

import pytest
from nets import CASES, Case, equal, train

import poochplan
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan
from poochplan.planner.policies import policy_names

SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)


@pytest.fixture(scope="module", params=["residual", "attention"])
def case_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def profile(case_name: str) -> Profile:
    return CASES[case_name].profile()


@pytest.mark.parametrize("name", policy_names())
def test_a_policys_plan_runs_as_predicted(name: str, case_name: str, profile: Profile) -> None:
    case = CASES[case_name]
    made = _tightest(profile, name)
    reference, _ = train(case, 2)
    planned, report = train(case, 2, made)
    assert equal(reference, planned)
    assert report is not None
    assert report.total.fallbacks == 0, report.total.fallback_reasons
    assert _peak_bytes(case, made) == made.prediction.peak_bytes
    assert report.last_step.out_bytes == made.prediction.out_bytes
    assert report.last_step.in_bytes == made.prediction.in_bytes


def _peak_bytes(case: Case, made: Plan) -> int | None:
    """Metered in a loop that holds the loss of the step before, as the profile was taken."""
    model, step, optimizer = case.fresh()
    with poochplan.apply(made, model) as session:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            loss = step()
            loss.backward()
            optimizer.step()
    return session.report().last_step.peak_bytes


def _tightest(profile: Profile, name: str) -> Plan:
    """The policy's plan for the smallest of a few budgets that it fits."""
    for share in SHARES:
        try:
            return plan(profile, int(share * profile.in_core_peak_bytes), policy=name)
        except InfeasibleError:
            continue
    raise AssertionError(f"{name} does not fit the in-core peak")
