"""``pooch plan --policy``: one baseline alone, or all of them beside the ILP."""

from __future__ import annotations

import re
from pathlib import Path

import poochplan
from poochplan.planner.sweep import all_policies
from tests.cli.conftest import Pooch


def test_one_policy_decides_alone_and_the_plan_names_it(pooch: Pooch, profile_path: Path) -> None:
    result = pooch.ok(f"plan {profile_path} --budget 85% --policy greedy -o plan.json")
    assert result.err == ""
    assert re.search(r"^found +greedy, without a solver", result.out, re.MULTILINE)
    assert poochplan.Plan.load("plan.json").solve.policy == "greedy"


def test_all_policies_are_a_table_and_data_and_the_plan_is_the_ilps(pooch: Pooch, profile_path: Path) -> None:
    result = pooch.ok(f"plan {profile_path} --budget 85% --policy all -o plan.json --json")
    table = result.err[result.err.index("Policies, those that fit first") :]
    for name in all_policies():
        assert re.search(rf"^{name} +\S+ \S+ +(yes|no) +[+-]\d", table, re.MULTILINE), name
    assert re.search(r"^keep-all .* no .* - ", table, re.MULTILINE)
    assert max(map(len, table.splitlines())) <= 100
    assert poochplan.Plan.load("plan.json").solve.policy in ("ilp", "annealing")
    rows = {row["policy"]: row for row in result.data["policies"]}
    assert set(rows) == set(all_policies())
    assert (rows["ilp"]["step_s"], rows["ilp"]["ilp_margin"]) == (result.data["step_s"], 0)
    assert (rows["keep-all"]["fits"], rows["keep-all"]["ilp_margin"]) == (False, None)
    assert all(row["wall_s"] > 0 for row in rows.values())
