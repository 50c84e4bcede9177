"""``pooch plan --policy``: one baseline alone, or all of them beside the ILP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import poochplan
from poochplan.planner.sweep import all_policies

Pooch = Any


def test_one_policy_decides_alone_and_the_plan_names_it(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "85%", "--policy", "greedy", "-o", "plan.json")
    assert (result.code, result.err) == (0, "")
    assert re.search(r"^found +greedy, without a solver", result.out, re.MULTILINE)
    assert poochplan.Plan.load("plan.json").solve.policy == "greedy"


def test_all_policies_are_a_table_and_the_plan_is_the_ilps(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "85%", "--policy", "all", "-o", "plan.json")
    assert (result.code, result.err) == (0, "")
    table = result.out[result.out.index("Policies, those that fit first") :]
    for name in all_policies():
        assert re.search(rf"^{name} +\S+ \S+ +(yes|no) +[+-]\d", table, re.MULTILINE), name
    assert re.search(r"^keep-all .* no .* - ", table, re.MULTILINE)
    assert max(map(len, table.splitlines())) <= 100
    assert poochplan.Plan.load("plan.json").solve.policy in ("ilp", "annealing")


def test_the_comparison_is_data_too(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "85%", "--policy", "all", "-o", "plan.json", "--json")
    data = json.loads(result.out)
    rows = {row["policy"]: row for row in data["policies"]}
    assert set(rows) == set(all_policies())
    assert rows["ilp"]["step_s"] == data["step_s"]
    assert rows["ilp"]["ilp_margin"] == 0
    assert rows["keep-all"]["fits"] is False
    assert rows["keep-all"]["ilp_margin"] is None
    assert all(row["wall_s"] > 0 for row in rows.values())


def test_a_policy_whose_plan_does_not_fit_ends_with_code_3_and_writes_nothing(pooch: Pooch, profile_path: Path) -> None:
    result = pooch("plan", profile_path, "--budget", "85%", "--policy", "keep-all", "-o", "plan.json")
    assert result.code == 3
    assert "the plan of policy 'keep-all' does not fit" in result.error
    assert "raise the budget, or take policy 'ilp'" in result.error
    assert not Path("plan.json").exists()
