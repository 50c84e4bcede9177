"""Budgets on reserved bytes: plans have a margin for what the allocator takes more, or say that none was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from poochplan.errors import InfeasibleError, UsageError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Memory, Profile
from poochplan.planner.arena.reserved import (
    MARGIN,
    MORE_FOR_LESS,
    NOT_WITHIN,
    FittingReserved,
    budget_bytes_of,
    reserved_peak,
)
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import STYLES, Candidate, swap_all_on_demand, try_style
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import transformer_like, unet_like

MIB = 1 << 20


def _on_gpu(profile: Profile) -> Profile:
    """The same step with a GPU's sizes, measured there."""
    factor = 1 + (2 << 30) // profile.in_core_peak_bytes
    values = tuple(msgspec.structs.replace(one, size_bytes=factor * one.size_bytes) for one in profile.values)
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=factor * op.workspace_bytes) for op in profile.ops)
    larger: dict[str, Any] = {
        "in_core_peak_bytes": factor * profile.in_core_peak_bytes,
        "static_bytes": {kind: factor * size for kind, size in profile.static_bytes.items()},
        "device": msgspec.structs.replace(profile.device, kind="cuda"),
        "memory": Memory.ALLOCATED,
    }
    return msgspec.structs.replace(profile, values=values, ops=ops, **larger)


INSTANCES = Path(__file__).parents[2] / "benchmarks" / "instances"
PROFILES = {"gpt": _on_gpu(transformer_like(3)), "unet": _on_gpu(unet_like(3))}
EVERY = pytest.mark.parametrize("name", PROFILES)


@EVERY
@pytest.mark.parametrize("share", ["80%", "90%"])
def test_what_a_plan_reserves_is_within_its_budget_with_a_margin(name: str, share: str) -> None:
    found = plan(PROFILES[name], share, on="reserved", evaluations=1000)
    reserved_bytes = found.prediction.reserved_peak_bytes
    assert reserved_bytes is not None
    assert found.on == "reserved"
    assert reserved_bytes + int(MARGIN * reserved_bytes) <= found.budget_bytes
    assert found.prediction.peak_bytes <= reserved_bytes
    assert found.decided()[Decision.SWAP] or found.decided()[Decision.RECOMPUTE]
    assert "reserved bytes" in found.rows()["budget is on"]


@EVERY
def test_a_share_is_one_of_what_the_in_core_step_reserves(name: str) -> None:
    profile = PROFILES[name]
    problem = Problem.of(profile)
    whole_bytes = reserved_peak(problem, keep_all(problem), is_expandable=True)
    assert whole_bytes is not None
    assert whole_bytes > profile.in_core_peak_bytes
    assert budget_bytes_of(profile, "50%", "reserved") == whole_bytes // 2
    assert budget_bytes_of(profile, "50%", "allocated") == profile.in_core_peak_bytes // 2
    assert budget_bytes_of(profile, "1GiB", "reserved") == 1 << 30


@EVERY
def test_a_budget_that_holds_what_the_in_core_step_reserves_keeps_everything(name: str) -> None:
    found = plan(PROFILES[name], "110%", on="reserved", evaluations=100)
    assert {value.decision for value in found.values} == {Decision.KEEP}


def test_tiny_values_do_not_stay_in_the_way_of_a_plan_that_fits() -> None:
    """Plans with the fewest live bytes are the only ones that fit this budget, and many of them are fast."""
    profile = Profile.load(INSTANCES / "unet3d-192-v100.json.gz")
    device = msgspec.structs.replace(
        profile.device, name="a GPU", kind="cuda", expands=True
    )  # measured, and no roofline
    profile = msgspec.structs.replace(profile, device=device, memory=Memory.ALLOCATED)
    problem = Problem.of(profile)
    smallest_bytes = reserved_peak(problem, swap_all_on_demand(problem).schedule)
    assert smallest_bytes is not None
    found = plan(profile, int(1.15 * smallest_bytes), on="reserved", evaluations=400)
    assert found.covered_bytes <= found.budget_bytes
    assert found.prediction.overhead < 0.3


@EVERY
def test_where_no_plan_reserves_so_little_one_is_made_and_says_so(name: str) -> None:
    profile = PROFILES[name]
    found = plan(profile, smallest_budget(profile), on="reserved", evaluations=300)
    assert found.prediction.peak_bytes <= found.budget_bytes < (found.prediction.reserved_peak_bytes or 0)
    assert NOT_WITHIN in found.notes
    assert "ABOVE THE BUDGET" in found.rows()["predicted reserved"]
    with pytest.raises(InfeasibleError):
        plan(profile, smallest_budget(profile) - 512, on="reserved", evaluations=100)


@EVERY
def test_a_plan_that_reserves_about_as_little_goes_before_a_much_slower_one(name: str) -> None:
    """If none is within the budget. One that reserves many more bytes does not."""
    problem = Problem.of(PROFILES[name])
    smallest = swap_all_on_demand(problem)
    fewest_bytes = reserved_peak(problem, smallest.schedule)
    assert fewest_bytes is not None
    chosen = set[bool]()
    for seed in range(12):
        wish = random_decisions(problem, seed)
        most_bytes = problem.profile.in_core_peak_bytes
        other = min((try_style(problem, "", wish, most_bytes, style) for style in STYLES), key=_step)
        fitting = FittingReserved(problem, problem.profile.in_core_peak_bytes)
        fitting.pack(smallest)
        other_bytes = reserved_peak(problem, other.schedule)
        assert other_bytes is not None
        is_near = other_bytes <= (1 + MORE_FOR_LESS) * fewest_bytes
        assert fitting.nearest(other) is (other if is_near else smallest)
        chosen.add(is_near)
    assert False in chosen
    assert fitting.nearest(smallest) is smallest


def _step(candidate: Candidate) -> float:
    return candidate.simulation.step_s


def test_where_nothing_is_reserved_no_budget_covers_it() -> None:
    profile = transformer_like(3)
    with pytest.raises(UsageError, match="where no allocator reserves any"):
        plan(profile, "80%", on="reserved")
    with pytest.raises(UsageError, match='on: expected "allocated" or "reserved", found'):
        plan(profile, "80%", on="live")  # type: ignore[arg-type]
    found = plan(profile, "80%", evaluations=100)
    assert found.prediction.reserved_peak_bytes is None
    assert "predicted reserved" not in found.rows()
