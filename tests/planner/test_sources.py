"""Sources, which a plan may hold in place of larger copies of them that autograd saves."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poochplan.errors import InputFileError, UsageError
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Kind, Profile
from poochplan.planner.arena.packing import live_peak
from poochplan.planner.arena.step_layout import blocks_of
from poochplan.planner.planning import plan
from poochplan.planner.search.bound import integral_bound, lower_bound
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.simulator.evaluator import STYLE_OF, Evaluator
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import simulate, swap_all, try_style
from poochplan.planner.simulator.sources import sources_of, with_sources
from poochplan.planner.writing import with_decisions
from poochplan.report.differences import differences
from tests.depth import seeds, tries
from tests.planner.checker import Violation, check
from tests.planner.oracle import best_schedule
from tests.planner.plans import budget_at, held, plan_with, random_decisions, random_schedule
from tests.planner.random_profiles import Recorder, link, with_facts, with_random_thread
from tests.planner.tiny_profiles import cast_profile, tiny_with_sources

KEEP, SWAP, RECOMPUTE = Decision
SAME = 1 + 1e-9
FAR = 1e-3
"""Share of the step by which a plan may be longer than the best: in 150 tiny steps one was, by 3.5e-4."""


def norm(written: bool = False, name: str = "aten._to_copy.default", opaque: bool = False, widths: int = 2) -> Profile:
    """A residual, its copy that a norm saves, and a layer behind it."""
    r = Recorder()
    (stem,) = r.op("linear", [r.before(4096, Kind.INPUT)], [4096], seconds=1.0, opaque=opaque)
    (wide,) = r.op(name, [stem], [widths * 4096], saves_outputs=True, seconds=0.1)
    (narrow,) = r.op("mul", [wide], [4096], saves=[wide], seconds=0.1)
    if written:
        r.op("add_", [stem], writes=[stem], seconds=0.1)
    r.op("add", [stem, narrow], [512], saves=[narrow], seconds=1.0)
    return r.finish(link(1e-3))


def test_a_source_is_the_smaller_tensor_that_a_cast_or_a_clone_reads() -> None:
    for name in ("aten._to_copy.default", "aten.clone.default"):
        ((_, source),) = sources_of(norm(name=name)).items()
        assert norm().values[source].kind is Kind.TEMPORARY
    assert sources_of(norm(name="aten.relu.default")) == {}


def test_a_source_that_is_written_later_or_is_no_smaller_is_none() -> None:
    assert sources_of(norm(written=True)) == {}
    assert sources_of(norm(widths=1)) == {}


def test_a_copy_can_be_replayed_from_its_source_where_nothing_else_makes_it() -> None:
    assert Problem.of(norm(opaque=True)).replay.replays[0] is None
    graph = Problem.of(norm(opaque=True), has_sources=True).replay
    assert graph.replays[0] is None  # the source itself
    replay = graph.of(1)
    assert (replay.ops, replay.inputs) == ((1,), (0,))


def test_an_idle_source_costs_nothing_whatever_is_decided_about_it() -> None:
    profile = with_sources(norm())
    problem = Problem.of(profile)
    for style in STYLE_OF:
        kept = try_style(problem, "", (KEEP, SWAP, SWAP), 0, style)
        swapped = try_style(problem, "", (SWAP, SWAP, SWAP), 0, style)
        assert swapped.schedule == kept.schedule
        assert swap_all(problem)[0] is KEEP


def test_a_profile_without_any_stays_itself_and_one_with_them_gets_no_more() -> None:
    assert with_sources(norm(written=True)) == norm(written=True)
    once = with_sources(norm())
    assert len(once.points) == len(norm().points) + 1
    assert with_sources(once) is once


def test_what_is_held_takes_its_own_bytes_in_place_of_the_values() -> None:
    problem = Problem.of(norm(), has_sources=True)
    held, kept, gone = (
        try_style(problem, "", (first, second, KEEP), 1 << 40, STYLE_OF[0]).simulation
        for first, second in ((KEEP, RECOMPUTE), (KEEP, KEEP), (RECOMPUTE, RECOMPUTE))
    )
    tick = int(problem.point_ticks[problem.use_points[0]])  # behind the last op of forward
    assert kept.memory_bytes[tick] - held.memory_bytes[tick] == 4096
    assert held.memory_bytes[tick] - gone.memory_bytes[tick] == 4096
    assert held.step_s == pytest.approx(kept.step_s + 0.1)
    assert gone.step_s == pytest.approx(kept.step_s + 1.1)


def test_plans_of_one_step_compare_whether_they_hold_any_or_not() -> None:
    made, kept = held(norm()), plan(norm(), norm().in_core_peak_bytes)
    found = differences(kept, made).data
    assert found["same_step"]
    assert {value["name"]: (value["first"], value["second"]) for value in found["values"]} == {
        made.values[0].name: ("-", "keep"),
        made.values[1].name: ("keep", "recompute"),
    }
    other = with_facts(msgspec.structs.replace(made, schedule=kept.schedule), "values", 0, name="another source")
    assert "points do not compare" in str(differences(made, other))
    assert differences(made, other).data["points"] == []


def test_a_checked_plan_holds_only_what_may_be_held() -> None:
    made = held(norm())
    check(norm(), made)
    with pytest.raises(Violation, match="written after"):
        check(norm(written=True), made)
    with pytest.raises(Violation, match="away"):
        check(norm(), with_facts(made, "values", 0, until=-1))


def test_decisions_about_it_can_be_changed_by_hand() -> None:
    made = held(norm())
    assert [(value.source, value.until) for value in made.values] == [(True, 1), (False, -1), (False, -1)]
    assert Problem.of(norm(), made).profile == with_sources(norm())
    assert made.sources()[KEEP] == [4096]
    assert made.rows()["sources of larger copies"] == "keep 1 (4.00 KiB)"
    assert made.decided()[RECOMPUTE] == [8192]
    for decision in ("swap", "recompute"):
        changed = with_decisions(norm(), made, {made.values[0].name: decision})
        assert check(norm(), changed).peak_bytes == changed.prediction.peak_bytes
        assert differences(made, changed).data["same_step"]
    assert changed.sources()[RECOMPUTE] == [4096]


def test_without_sources_a_plan_holds_none() -> None:
    profile = cast_profile(0)
    budget_bytes = budget_at(profile, 0.5)
    assert any(value.source for value in plan(profile, budget_bytes, evaluations=50).values)
    assert not any(value.source for value in plan(profile, budget_bytes, evaluations=50, without=["sources"]).values)
    with pytest.raises(UsageError, match="expected sources or state, found 'masks'"):
        plan(profile, budget_bytes, without=["masks"])


@pytest.mark.parametrize(
    ("place", "changes", "fault"),
    [
        (0, {"until": 0}, "values[0].until: expected a later save point"),
        (0, {"source": False}, "values[0].until: expected -1 for a value that is no source"),
    ],
)
def test_a_plan_file_with_a_wrong_source_is_refused(
    place: int, changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    made = held(norm())
    assert Plan.load(made.save(tmp_path / "right.json")) == made
    path = with_facts(made, "values", place, **changes).save(tmp_path / "plan.json")
    with pytest.raises(InputFileError, match=re.escape(fault)):
        Plan.load(path)


@pytest.mark.parametrize("seed", seeds(12, 400))
def test_both_simulators_and_the_checker_agree(seed: int) -> None:
    profile = cast_profile(seed, 2 + seed % 6)
    thread = with_random_thread(profile, seed) if seed % 2 else profile
    planned = with_sources(thread)
    problem, evaluator = Problem.of(planned), Evaluator(Problem.of(planned))
    for turn, style in enumerate(STYLE_OF):
        wish = random_decisions(problem, 10 * seed + turn)
        budget_bytes = int(profile.in_core_peak_bytes * (0.3 + 0.2 * turn))
        found = try_style(problem, "random", wish, budget_bytes, style)
        compiled = evaluator.evaluate(wish, budget_bytes, style)
        assert (compiled.step_s, compiled.peak_bytes) == (found.simulation.step_s, found.peak_bytes)
        assert evaluator.decisions == found.schedule.decisions
        verdict = check(thread, plan_with(planned, found.schedule))
        assert verdict.peak_bytes == found.simulation.peak_bytes
        assert verdict.first_step_peak_bytes == found.simulation.first_step_peak_bytes


@pytest.mark.parametrize("seed", seeds(6, 200))
def test_the_blocks_of_such_steps_are_live_as_the_simulator_says(seed: int) -> None:
    profile = with_sources(cast_profile(seed, 2 + seed % 6))
    problem = Problem.of(profile)
    schedule = try_style(problem, "", random_decisions(problem, seed), 0, STYLE_OF[seed % 4]).schedule
    blocks = blocks_of(problem, schedule)
    assert live_peak(blocks.before + blocks.of_step) == simulate(problem, schedule).peak_bytes


@pytest.mark.parametrize("seed", seeds(25, 2000))
def test_no_plan_is_faster_than_the_bound_for_its_own_peak(seed: int) -> None:
    problem = Problem.of(cast_profile(seed, 1 + seed % 7), has_sources=True)
    wish = random_decisions(problem, seed)
    for schedule in (
        random_schedule(problem, seed),
        try_style(problem, "", wish, int(random.Random(seed).random() * 40_000), STYLE_OF[0]).schedule,
    ):
        found = simulate(problem, schedule)
        peak_bytes = max(found.peak_bytes, found.first_step_peak_bytes)
        assert lower_bound(problem, peak_bytes, "highs", SolverLimits(60)) <= found.step_s * SAME


@pytest.mark.parametrize("seed", seeds(4, 200))
def test_the_planner_finds_the_best_plan_of_a_tiny_step(seed: int) -> None:
    profile, problem, budget_bytes = tiny_with_sources(seed)
    best = best_schedule(problem, budget_bytes)
    assert best is not None
    made = plan(profile, budget_bytes, time_limit_s=5, gap=0.0)
    assert check(profile, made).peak_bytes == made.prediction.peak_bytes <= budget_bytes
    assert best.step_s / SAME <= made.prediction.step_s <= best.step_s * (1 + FAR)
    assert made.solve.bound_s is not None
    assert made.solve.bound_s <= best.step_s * SAME
    for is_whole in (False, True):
        found_s = integral_bound(problem, budget_bytes, SolverLimits(tries(5, 60)), is_whole=is_whole)
        assert found_s <= best.step_s * SAME
