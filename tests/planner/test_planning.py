"""What plan() promises and refuses, and what becomes of decisions that are changed by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest

from poochplan.errors import InfeasibleError, ModelMismatchError, PoochError, UsageError
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Kind, PointKind, Profile, RuntimeCost
from poochplan.peak import simulate_plan
from poochplan.planner import writing
from poochplan.planner.planning import plan, share_that_holds, smallest_budget
from poochplan.planner.search.decide import solve_fluid
from poochplan.planner.search.fluid import Request
from poochplan.planner.search.solvers import SolverLimits, choose_solver
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable, swap_all, swap_all_on_demand
from poochplan.planner.writing import with_decisions
from poochplan.units import format_bytes, parse_budget
from tests.planner.checker import check
from tests.planner.oracle import floor_bytes
from tests.planner.plans import budget_at, problems_of
from tests.planner.random_profiles import (
    Recorder,
    link,
    random_profile,
    resnet_like,
    transformer_like,
    unet_like,
    with_facts,
)
from tests.processes import python


def decisions_of(found: Plan) -> set[Decision]:
    return {value.decision for value in found.values}


def test_a_budget_that_holds_the_in_core_peak_keeps_everything_and_says_so() -> None:
    profile = resnet_like(2)
    found = plan(profile, "100%")
    assert decisions_of(found) == {Decision.KEEP}
    assert found.schedule == ()
    assert found.prediction.overhead == 0
    assert "everything is kept" in found.notes[0]


LEAST = [resnet_like(3), unet_like(3), transformer_like(2), random_profile(0), random_profile(11)]


@pytest.mark.parametrize("profile", LEAST, ids=["resnet", "unet", "gpt", "random", "no arena as small as all in-core"])
@pytest.mark.parametrize("arena", ["off", "on"])
def test_the_smallest_budget_has_a_plan_and_one_byte_less_has_none(
    profile: Profile, arena: Literal["on", "off"]
) -> None:
    smallest = smallest_budget(profile, arena=arena)
    assert plan(profile, smallest, arena=arena, evaluations=20).prediction.peak_bytes <= smallest
    with pytest.raises(InfeasibleError) as caught:
        plan(profile, smallest - 1, arena=arena, evaluations=1)
    assert caught.value.smallest_budget_bytes == smallest


def test_the_infeasible_message_names_a_budget_that_works_when_it_is_typed() -> None:
    profile = unet_like(2)
    with pytest.raises(InfeasibleError) as caught:
        plan(profile, 1000)
    message = str(caught.value)
    share = message.split("pass a budget of ")[1].split()[0]
    assert str(smallest_budget(profile)) in message
    assert "\n" not in message
    plan(profile, share, evaluations=100)


@pytest.mark.parametrize("size_bytes", [1, 999, 123_457, 1_000_000])
def test_a_share_is_rounded_up(size_bytes: int) -> None:
    share = share_that_holds(size_bytes, 1_000_003)
    assert parse_budget(share, 1_000_003) >= size_bytes


def test_the_three_decisions_are_mixed_where_that_pays() -> None:
    profile = transformer_like(2, link_gb_per_s=0.5)
    found = plan(profile, "50%", evaluations=100)
    assert decisions_of(found) == set(Decision)


def test_a_fast_link_swaps_and_a_slow_link_recomputes() -> None:
    fast = plan(transformer_like(2, link_gb_per_s=10), "60%", evaluations=300)
    slow = plan(transformer_like(2, link_gb_per_s=0.001), "60%", evaluations=300)
    assert decisions_of(fast) == {Decision.KEEP, Decision.SWAP}
    assert decisions_of(slow) == {Decision.KEEP, Decision.RECOMPUTE}


def test_less_memory_never_predicts_a_faster_step() -> None:
    profile = resnet_like(2, link_gb_per_s=0.3)
    steps = [plan(profile, f"{share}%", evaluations=1000).prediction.step_s for share in (45, 60, 80, 100)]
    assert steps == sorted(steps, reverse=True)


def test_pinned_and_tiny_values_are_kept_and_say_why() -> None:
    found = plan(resnet_like(4), "60%", evaluations=100)
    pinned = found.values[0]
    assert pinned.why == "it was there before the step"
    reasons = {value.why for value in found.values if value.size_bytes <= 1024}
    assert "too small to matter" in reasons


def test_a_value_held_past_its_first_use_is_kept() -> None:
    r = Recorder()
    (x,) = r.op("f0", [r.before(512, Kind.INPUT)], [1 << 20])
    r.op("f1", [x], [1 << 20], saves=[x])
    r.hold_until_end(x)
    problem = Problem.of(r.finish(link()))
    assert "held" in problem.must_keep[0]


def test_swapped_values_have_places_of_their_own_on_the_host() -> None:
    found = plan(resnet_like(4, link_gb_per_s=10), "50%", evaluations=100)
    places = [(v.host_offset, v.size_bytes) for v in found.values if v.decision is Decision.SWAP]
    assert places
    assert all(offset % 4096 == 0 for offset, _ in places)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
    assert all(v.host_offset == -1 for v in found.values if v.decision is not Decision.SWAP)
    assert found.prediction.host_bytes >= places[-1][0] + places[-1][1]


@pytest.mark.parametrize("share", ["80%", "65%"])
def test_the_gap_is_that_of_the_simulated_step_to_the_proven_bound(share: str) -> None:
    found = plan(unet_like(2, link_gb_per_s=3.0), share, evaluations=300)
    assert found.solve.bound_s is not None
    assert found.prediction.in_core_step_s <= found.solve.bound_s <= found.prediction.step_s * (1 + 1e-9)
    assert found.solve.gap == pytest.approx(found.prediction.step_s / found.solve.bound_s - 1, abs=1e-9)


@pytest.mark.parametrize(("below", "is_noted"), [(1e-9, True), (0.0, False)])
def test_a_gap_above_the_wide_one_is_noted(below: float, is_noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = unet_like(2, link_gb_per_s=3.0)
    gap = plan(profile, "65%", evaluations=100).solve.gap
    assert gap is not None
    monkeypatch.setattr(writing, "WIDE_GAP", gap - below)
    notes = plan(profile, "65%", evaluations=100).notes
    line = f"its step is proven to be at most {gap:.1%} longer than that of the best plan there is"
    assert any(note.startswith(line) for note in notes) == is_noted


def test_the_other_solver_gives_a_plan_of_about_the_same_step() -> None:
    profile = unet_like(3)
    try:
        choose_solver("cbc")
    except UsageError as missing:
        pytest.skip(str(missing))
    highs, cbc = (plan(profile, "75%", solver=solver, time_limit_s=2) for solver in ("highs", "cbc"))
    assert cbc.solve.solver == "cbc"
    assert cbc.prediction.step_s == pytest.approx(highs.prediction.step_s, rel=0.02)


def test_the_fluid_model_finds_free_what_a_fast_link_hides() -> None:
    problem = Problem.of(resnet_like(4, link_gb_per_s=100))
    keep_all_peak = int(problem.base_bytes.max() + problem.rounded_bytes.sum())
    request = Request(keep_all_peak // 2, tuple(movable(problem)))
    decisions, objective_s = solve_fluid(problem, request, "highs", SolverLimits())
    assert decisions is not None
    assert objective_s == pytest.approx(0, abs=1e-3 * problem.step_s)


def test_no_plan_has_a_smaller_peak_than_swapping_everything_on_demand() -> None:
    for _, _, problem in problems_of(random_profile, 30):
        # A value that is packed only later than forward lets go of it would make the floor lower than reachable.
        assert swap_all_on_demand(problem).peak_bytes == floor_bytes(problem, swap_all(problem))


def test_the_host_budget_holds() -> None:
    profile = transformer_like(2, link_gb_per_s=4.0)
    free = plan(profile, "50%", evaluations=1000)
    assert free.prediction.out_bytes > 0
    most = free.prediction.out_bytes // 2
    limited = plan(profile, "50%", host_budget=most, evaluations=1000)
    assert limited.prediction.out_bytes <= most
    assert limited.prediction.peak_bytes <= limited.budget_bytes
    assert check(profile, limited).peak_bytes == limited.prediction.peak_bytes
    nothing = plan(profile, "80%", host_budget=0, evaluations=1000)
    assert nothing.prediction.out_bytes == 0
    assert decisions_of(nothing) == {Decision.KEEP, Decision.RECOMPUTE}
    assert check(profile, nothing).peak_bytes == nothing.prediction.peak_bytes
    with pytest.raises(InfeasibleError, match="swaps at most 1 B; pass a larger host budget"):
        plan(profile, smallest_budget(profile), host_budget=1, evaluations=1000)


def test_by_default_the_host_has_what_it_had_left_when_a_gpu_was_profiled() -> None:
    profile = transformer_like(2, link_gb_per_s=4.0)
    host_bytes = plan(profile, "50%", evaluations=1000).prediction.out_bytes
    for kind, limit_bytes in (("cuda", host_bytes), ("cuda", None), ("cpu", None)):
        device = msgspec.structs.replace(profile.device, kind=kind, host_bytes=limit_bytes)
        on = msgspec.structs.replace(profile, device=device)
        found = plan(on, "50%", ranks_per_host=2, evaluations=1000)
        assert promised(found) == promised(plan(on, "50%", host_budget=limit_bytes, ranks_per_host=2, evaluations=1000))
        assert (found.prediction.out_bytes <= host_bytes // 2) is (limit_bytes is not None)
    there = msgspec.structs.replace(profile.device, kind="cuda", host_bytes=host_bytes)
    elsewhere = msgspec.structs.replace(profile, device=there, assumed=("another link",))
    assert "host budget" not in "; ".join(plan(elsewhere, "50%", ranks_per_host=2, evaluations=1000).notes)


def promised(found: Plan) -> tuple[object, ...]:
    return found.instructions, found.prediction, found.solve.bound_s, found.budget_bytes


def test_a_rank_of_four_gets_a_quarter_of_the_link_and_of_the_host_budget() -> None:
    profile = transformer_like(2, link_gb_per_s=4.0)
    free = plan(profile, "50%", evaluations=1000)
    host_bytes = 2 * free.prediction.out_bytes  # a quarter of it is half of what would be swapped
    found = plan(profile, "50%", host_budget=host_bytes, ranks_per_host=4, evaluations=1000)
    quartered = msgspec.structs.replace(profile, link=link(gb_per_s=1.0))
    assert promised(found) == promised(plan(quartered, "50%", host_budget=host_bytes // 4, evaluations=1000))
    assert found.link.ranks == 4
    assert 0 < found.prediction.out_bytes <= host_bytes // 4
    assert check(profile, found).peak_bytes == found.prediction.peak_bytes <= found.budget_bytes
    assert simulate_plan(Problem.of(profile, found), found).step_s == found.prediction.step_s
    notes = "; ".join(found.notes)
    assert "each of 4 ranks of a host has its share of the link, test (1 GB/s each way), by division" in notes
    assert f"each of 4 ranks of a host swaps at most {format_bytes(host_bytes // 4)}" in notes


def test_a_link_that_was_measured_with_all_ranks_copying_is_not_divided_again() -> None:
    profile = transformer_like(2, link_gb_per_s=4.0)
    measured = msgspec.structs.replace(profile, link=msgspec.structs.replace(profile.link, ranks=4))
    for ranks in (1, 2, 4):
        found = plan(measured, "50%", ranks_per_host=ranks, evaluations=300)
        assert promised(found) == promised(plan(profile, "50%", evaluations=300))
    assert "each of 4 ranks of a host has the link as measured while 4 ranks copied at once" in "; ".join(found.notes)
    eight = plan(measured, "50%", ranks_per_host=8, evaluations=300)
    assert eight.link.outward.bandwidth_bytes_per_s == 2e9


@pytest.fixture(scope="module")
def profile() -> Profile:
    return resnet_like()


@pytest.fixture(scope="module")
def made(profile: Profile) -> Plan:
    return plan(profile, budget_at(profile, 0.5), evaluations=50)


def first(made: Plan, *decisions: Decision) -> str:
    return next(value.name for value in made.values if value.decision in decisions and not value.why)


def test_a_value_that_is_kept_after_all_takes_memory_and_no_copy(profile: Profile, made: Plan) -> None:
    away = [value.name for value in made.values if value.decision is not Decision.KEEP]
    changed = with_decisions(profile, made, dict.fromkeys(away, "keep"))
    assert {value.decision for value in changed.values} == {Decision.KEEP}
    assert changed.prediction.peak_bytes == profile.in_core_peak_bytes > changed.budget_bytes
    assert changed.prediction.out_bytes == 0
    assert (changed.solve.policy, changed.budget_bytes) == ("by hand", made.budget_bytes)


def test_what_the_changed_plan_predicts_is_what_the_simulator_says(profile: Profile, made: Plan) -> None:
    name = first(made, Decision.KEEP, Decision.RECOMPUTE)
    changed = with_decisions(profile, made, {name: Decision.SWAP})
    found = simulate_plan(Problem.of(profile, changed), changed)
    assert (changed.prediction.peak_bytes, changed.prediction.step_s) == (found.peak_bytes, found.step_s)
    before = {value.name: value.decision for value in made.values}
    for value in changed.values:
        assert value.name == name or value.decision in (before[value.name], Decision.KEEP)


def test_no_change_keeps_the_decisions_and_the_share_of_the_link(profile: Profile, made: Plan) -> None:
    one_of_four = plan(profile, budget_at(profile, 0.5), evaluations=50, ranks_per_host=4)
    for one in (made, one_of_four):
        same = with_decisions(profile, one, {})
        assert [value.decision for value in same.values] == [value.decision for value in one.values]
        assert same.link == one.link


def test_what_cannot_be_is_refused_and_why(profile: Profile, made: Plan) -> None:
    with pytest.raises(UsageError, match="expected names of the plan's values, found 'nobody'"):
        with_decisions(profile, made, {"nobody": "keep"})
    with pytest.raises(UsageError, match='expected "keep", "swap" or "recompute", found \'drop\''):
        with_decisions(profile, made, {made.values[0].name: "drop"})
    place = [value.name for value in profile.values].index(first(made, Decision.SWAP, Decision.RECOMPUTE))
    opaque = with_facts(profile, "values", place, unreplayable="it is random")
    pinned = with_facts(opaque, "values", place, pinned="it is a view")
    with pytest.raises(UsageError, match="cannot be decided 'swap': it is a view"):
        with_decisions(pinned, made, {profile.values[place].name: "swap"})
    with pytest.raises(UsageError, match="cannot be decided 'recompute': it is random"):
        with_decisions(opaque, made, {profile.values[place].name: "recompute"})
    other = resnet_like(blocks=3)
    with pytest.raises(ModelMismatchError, match="the plan was made from another profile"):
        with_decisions(other, made, {})


replace = msgspec.structs.replace
PROFILE = resnet_like(1)
LAST = next(i for i in reversed(range(len(PROFILE.ops))) if PROFILE.ops[i].outputs)
FIRST = next(i for i, op in enumerate(PROFILE.ops) if op.inputs and i < LAST)
CYCLE = (*PROFILE.ops[FIRST].inputs, PROFILE.ops[LAST].outputs[0])


def costing(**seconds: float) -> Profile:
    return replace(PROFILE, runtime=RuntimeCost(**{"handle_s": 0.0, "swap_s": 0.0, "record_s": 0.0, **seconds}))


BROKEN: dict[str, tuple[Profile, str]] = {
    **{
        f"a duration of {seconds}": (
            with_facts(PROFILE, "ops", 2, duration_s=seconds), r"ops\[2\] .*expected a duration of at least 0 s, found",
        )
        for seconds in (-1e-6, math.nan, math.inf)
    },
    "a cycle": (
        with_facts(PROFILE, "ops", FIRST, inputs=CYCLE),
        rf"ops\[{FIRST}\].*found one that ops\[\d+\] creates later \(a cycle\); profile again",
    ),
    "no backward": (
        replace(PROFILE, points=tuple(point for point in PROFILE.points if point.kind is PointKind.SAVE)),
        "the profile has no backward",
    ),
    "a link without bandwidth": (
        replace(
            PROFILE, link=replace(PROFILE.link, inward=replace(PROFILE.link.inward, bandwidth_bytes_per_s=0.0))
        ),
        r"link\.inward",
    ),
    "negative seconds": (costing(swap_s=-1.0), "swap_s"),
    "seconds that are no number": (costing(record_s=math.nan), "record_s"),
    "unpacks that take longer than handles": (costing(handle_s=1.0, unpack_s=2.0), "unpack_s"),
    "fetches that take longer than swaps": (costing(fetch_s=1.0), "fetch_s"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_profile_that_no_plan_can_be_made_from_is_refused_by_its_field(name: str) -> None:
    profile, fault = BROKEN[name]
    with pytest.raises(PoochError, match=fault) as caught:
        plan(profile, "80%")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"solver": "nonesuch"}, "solver 'nonesuch' is unknown"),
        ({"ranks_per_host": 0}, "ranks per host: expected a number of at least 1, found 0"),
    ],
)
def test_an_argument_that_means_nothing_is_refused_by_its_name(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        plan(PROFILE, "80%", **options)


def test_a_budget_under_the_static_bytes_says_what_they_are() -> None:
    profile = replace(PROFILE, static_bytes={"parameter": smallest_budget(PROFILE) // 2})
    with pytest.raises(InfeasibleError, match="else stays in memory for the whole step") as raised:
        plan(profile, sum(static_bytes(profile).values()) - 1)
    assert raised.value.smallest_budget_bytes == smallest_budget(profile)


SCRIPT = """
    import gc, weakref

    class Model:
        pass

    def trains():
        model = Model()
        import poochplan.planner.search.solvers  # loads the solvers
        return weakref.ref(model)

    seen = trains()
    gc.collect()
    print("gone" if seen() is None else gc.get_referrers(seen()))
"""


def test_what_a_function_holds_that_plans_first_dies_with_it() -> None:
    assert python(SCRIPT, is_fresh=True).strip() == "gone"
