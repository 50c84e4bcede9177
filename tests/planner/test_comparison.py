"""All policies side by side: the same referee, the same budget."""

from __future__ import annotations

import subprocess
import sys

import pytest

from poochplan.errors import InfeasibleError, UsageError
from poochplan.planner.comparison import all_policies, compare_policies, comparison_rows
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.policies import policy_names
from tests.planner.random_profiles import transformer_like, unet_like

NAMES = ("ilp", "greedy", "swap-all", "keep-all", "vdnn")


def test_every_policy_is_compared_and_the_ilp_comes_first() -> None:
    assert all_policies() == ("ilp", *policy_names())
    found = compare_policies(unet_like(2), unet_like(2).in_core_peak_bytes)
    assert tuple(found) == all_policies()


def test_rows_that_fit_come_first_and_the_fastest_of_them_first() -> None:
    profile = unet_like(3)
    budget = int(0.75 * profile.in_core_peak_bytes)
    made = plan(profile, budget, evaluations=1000)
    found = compare_policies(profile, budget, NAMES, ilp_plan=made)
    rows = comparison_rows(found, budget, profile.times.step_s)
    assert [row.fits for row in rows] == sorted((row.peak_bytes <= budget for row in rows), reverse=True)
    fitting = [row.step_s for row in rows if row.fits]
    assert fitting == sorted(fitting)
    assert rows[0].policy == "ilp"
    assert {row.policy for row in rows if not row.fits} == {"keep-all", "vdnn"}


def test_the_margin_is_what_the_ilp_gains_and_is_told_of_plans_that_fit() -> None:
    profile = transformer_like(2, link_gb_per_s=0.5)
    budget = int(0.6 * profile.in_core_peak_bytes)
    made = plan(profile, budget, evaluations=1000)
    found = compare_policies(profile, budget, NAMES, ilp_plan=made)
    rows = {row.policy: row for row in comparison_rows(found, budget, 1.0)}
    assert rows["ilp"].ilp_margin == 0
    assert rows["keep-all"].ilp_margin is None
    margin = rows["swap-all"].ilp_margin
    assert margin is not None
    assert margin == pytest.approx(rows["swap-all"].overhead - rows["ilp"].overhead)


def test_a_plan_that_is_there_is_not_made_again() -> None:
    profile = unet_like(3)
    budget = int(0.75 * profile.in_core_peak_bytes)
    made = plan(profile, budget, evaluations=1000)
    seconds: dict[str, float] = {}
    found = compare_policies(profile, budget, ("ilp",), ilp_plan=made, seconds=seconds)["ilp"]
    assert found.simulation.step_s == made.prediction.step_s
    assert found.schedule.actions == made.schedule
    assert seconds == {"ilp": made.solve.wall_s}


def test_without_the_ilp_no_budget_is_too_small_to_compare() -> None:
    profile = unet_like(2)
    budget = smallest_budget(profile) - 1
    rows = comparison_rows(compare_policies(profile, budget, policy_names()), budget, profile.times.step_s)
    assert not any(row.fits for row in rows)
    assert all(row.ilp_margin is None for row in rows)
    with pytest.raises(InfeasibleError):
        compare_policies(profile, budget)


def test_an_unknown_name_is_told_before_anything_is_planned() -> None:
    with pytest.raises(UsageError, match="policy 'best' is unknown"):
        compare_policies(unet_like(2), 1, ("ilp", "best"))


def test_comparing_imports_no_torch() -> None:
    code = "import sys, poochplan.planner.comparison; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
