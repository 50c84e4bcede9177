"""All policies side by side: the same referee, the same budget."""

from __future__ import annotations

import pytest

from poochplan.planner.planning import plan
from poochplan.planner.policies import policy_names
from poochplan.planner.sweep import all_policies, compare_policies
from tests.planner.random_profiles import transformer_like, unet_like


def test_every_policy_is_compared_and_the_ilp_is_the_first_of_all() -> None:
    profile = unet_like(2)
    assert all_policies() == ("ilp", *policy_names())
    rows = compare_policies(profile, plan(profile, profile.in_core_peak_bytes))
    assert sorted(row.policy for row in rows) == sorted(all_policies())


def test_rows_that_fit_come_first_and_the_fastest_of_them_first() -> None:
    profile = unet_like(3)
    budget = int(0.75 * profile.in_core_peak_bytes)
    rows = compare_policies(profile, plan(profile, budget, evaluations=1000))
    assert [row.fits for row in rows] == sorted((row.peak_bytes <= budget for row in rows), reverse=True)
    fitting = [row.step_s for row in rows if row.fits]
    assert fitting == sorted(fitting)
    assert rows[0].policy == "ilp"
    assert {"keep-all", "vdnn"} <= {row.policy for row in rows if not row.fits}


def test_the_margin_is_what_the_ilp_gains_and_is_told_of_plans_that_fit() -> None:
    profile = transformer_like(2, link_gb_per_s=0.5)
    budget = int(0.6 * profile.in_core_peak_bytes)
    made = plan(profile, budget, evaluations=1000)
    rows = {row.policy: row for row in compare_policies(profile, made)}
    assert (rows["ilp"].step_s, rows["ilp"].wall_s) == (made.prediction.step_s, made.solve.wall_s)
    assert rows["ilp"].ilp_margin == 0
    assert rows["keep-all"].ilp_margin is None
    margin = rows["swap-all"].ilp_margin
    assert margin is not None
    assert margin == pytest.approx(rows["swap-all"].overhead - rows["ilp"].overhead)
