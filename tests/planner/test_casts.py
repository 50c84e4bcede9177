"""Sources: what a plan may hold in place of larger saved copies, in planner, simulators, bound and plan files."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from poochplan.errors import InputFileError
from poochplan.formats.narrow import as_planned
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Kind, Profile
from poochplan.formats.sources import sources_of, with_sources
from poochplan.planner.arena.packing import live_peak
from poochplan.planner.arena.step_layout import blocks_of
from poochplan.planner.planning import plan
from poochplan.planner.simulator.evaluator import STYLE_OF
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import simulate, swap_all, try_style
from poochplan.planner.writing import with_decisions
from poochplan.report.differences import differences
from tests.depth import seeds
from tests.planner.cast_profiles import cast_profile
from tests.planner.checker import Violation, check
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import Recorder, link

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


def test_a_profile_without_sources_stays_itself_and_one_with_them_gets_no_more() -> None:
    assert with_sources(norm(written=True)) == norm(written=True)
    once = with_sources(norm())
    assert len(once.points) == len(norm().points) + 1
    assert with_sources(once) is once


def test_a_copy_can_be_replayed_from_its_source_where_nothing_else_makes_it() -> None:
    assert build_problem(norm(opaque=True)).replay.replays[0] is None
    graph = build_problem(with_sources(norm(opaque=True))).replay
    assert graph.replays[0] is None  # the source itself
    replay = graph.of(1)
    assert (replay.ops, replay.inputs) == ((1,), (0,))


def test_a_held_source_takes_its_own_bytes_in_place_of_the_copys() -> None:
    profile = with_sources(norm())
    problem = build_problem(profile)
    held = simulate(problem, try_style(problem, "", (KEEP, RECOMPUTE, KEEP), 1 << 40, STYLE_OF[0]).schedule)
    kept = simulate(problem, try_style(problem, "", (KEEP, KEEP, KEEP), 1 << 40, STYLE_OF[0]).schedule)
    gone = simulate(problem, try_style(problem, "", (RECOMPUTE, RECOMPUTE, KEEP), 1 << 40, STYLE_OF[0]).schedule)
    tick = int(problem.point_ticks[problem.use_points[0]])  # behind the last op of forward
    assert kept.memory_bytes[tick] - held.memory_bytes[tick] == 4096
    assert held.memory_bytes[tick] - gone.memory_bytes[tick] == 4096
    assert held.step_s == pytest.approx(kept.step_s + 0.1)
    assert gone.step_s == pytest.approx(kept.step_s + 1.1)


def test_an_idle_source_costs_nothing_whatever_is_decided_about_it() -> None:
    profile = with_sources(norm())
    problem = build_problem(profile)
    for style in STYLE_OF:
        kept = try_style(problem, "", (KEEP, SWAP, SWAP), 0, style)
        swapped = try_style(problem, "", (SWAP, SWAP, SWAP), 0, style)
        assert swapped.schedule == kept.schedule
        assert swap_all(problem)[0] is KEEP


@pytest.mark.parametrize("seed", seeds(6, 200))
def test_the_blocks_of_steps_with_sources_are_live_as_the_simulator_says(seed: int) -> None:
    profile = with_sources(cast_profile(seed, 2 + seed % 6))
    problem = build_problem(profile)
    schedule = try_style(problem, "", random_decisions(problem, seed), 0, STYLE_OF[seed % 4]).schedule
    blocks = blocks_of(profile, problem, schedule)
    assert live_peak(blocks.before + blocks.of_step) == simulate(problem, schedule).peak_bytes


def held(profile: Profile) -> Plan:
    """The residual is held and its copy recomputed."""
    made = plan(with_sources(profile), profile.in_core_peak_bytes)
    return with_decisions(profile, made, {made.values[1].name: RECOMPUTE})


def test_decisions_about_sources_can_be_changed_by_hand() -> None:
    profile = norm()
    made = held(profile)
    assert [(value.source, value.until) for value in made.values] == [(True, 1), (False, -1), (False, -1)]
    swapped = with_decisions(profile, made, {made.values[0].name: "swap"})
    assert check(profile, swapped).peak_bytes == swapped.prediction.peak_bytes
    assert made.sources()[KEEP] == [4096]
    assert made.decided()[RECOMPUTE] == [8192]
    assert any(value.source for value in made.values)
    assert as_planned(profile, made) == with_sources(profile)


def test_plans_of_one_step_compare_whether_they_hold_sources_or_not() -> None:
    profile, made = norm(), held(norm())
    kept = plan(profile, profile.in_core_peak_bytes)
    found = differences(kept, made).data
    assert found["same_step"]
    assert {value["name"]: (value["first"], value["second"]) for value in found["values"]} == {
        made.values[0].name: ("-", "keep"),
        made.values[1].name: ("keep", "recompute"),
    }
    swapped = with_decisions(profile, made, {made.values[0].name: "swap"})
    assert differences(made, swapped).data["same_step"]


def test_a_checked_plan_holds_only_what_is_a_source() -> None:
    profile, made = norm(), held(norm())
    check(profile, made)
    with pytest.raises(Violation, match="written after"):
        check(norm(written=True), made)
    values = (msgspec.structs.replace(made.values[0], until=-1), *made.values[1:])
    with pytest.raises(Violation, match="away"):
        check(profile, msgspec.structs.replace(made, values=values))


BROKEN: dict[str, dict[str, Any]] = {
    "values[0].until: expected a later save point": {"until": 0},
    "values[0].until: expected -1 for a value that is no source": {"source": False},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_plan_file_with_a_wrong_source_is_refused(fault: str, tmp_path: Any) -> None:
    made = held(norm())
    made.save(tmp_path / "right.json")
    assert Plan.load(tmp_path / "right.json") == made
    values = (msgspec.structs.replace(made.values[0], **BROKEN[fault]), *made.values[1:])
    msgspec.structs.replace(made, values=values).save(tmp_path / "plan.json")
    with pytest.raises(InputFileError) as error:
        Plan.load(tmp_path / "plan.json")
    assert fault in str(error.value)
