"""Optimizer state, which a plan may stream between host and device while the optimizer steps."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poochplan.errors import InfeasibleError, InputFileError, ModelMismatchError
from poochplan.formats.plan import Decision, Plan, SolveStatus, StateChunk
from poochplan.formats.profile import Memory, Phase, Profile
from poochplan.formats.profile_parts import OptimizerState
from poochplan.peak import explain_peak
from poochplan.planner.arena.packing import live_peak
from poochplan.planner.arena.step_layout import blocks_of
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.search.bound import lower_bound
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.search.streaming import Streaming
from poochplan.planner.simulator.evaluator import STYLE_OF, Evaluator
from poochplan.planner.simulator.optimizer_state import (
    WINDOW,
    chunks_of,
    optimizer_seconds,
    streamed,
    streamed_bytes,
    window_bytes,
    with_state,
)
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import simulate, try_style
from poochplan.planner.whatif import for_machine
from poochplan.planner.writing import with_decisions
from poochplan.report.differences import differences
from poochplan.report.palette import write_picture
from poochplan.report.timeline import draw_timeline, predicted_trace, timeline_of
from poochplan.units import format_bytes
from tests.depth import seeds, tries
from tests.planner.checker import check
from tests.planner.oracle import best_schedule
from tests.planner.plans import plan_with, random_decisions
from tests.planner.random_profiles import link, transformer_like, with_facts, with_random_thread
from tests.planner.state_profiles import MIB, bare, random_step, scaled, with_adam
from tests.planner.time_checker import check_times
from tests.planner.tiny_profiles import tiny_profile

SAME = 1 + 1e-9
FAR = 2e-3
"""Share of the step by which a plan may be longer than the best."""


def step(*sizes_mib: int, gb_per_s: float = 1.0, **facts: Any) -> Profile:
    """A transformer, and Adam over parameters of which each moment has that many MiB."""
    made = with_adam(bare(transformer_like(2, mib=8)), [size * MIB for size in sizes_mib], **facts)
    return msgspec.structs.replace(made, link=link(gb_per_s))


def optimizer_tick(profile: Profile) -> int:
    """The tick of the optimizer's first op."""
    return profile.op_ticks[next(n for n, op in enumerate(profile.ops) if op.phase is Phase.OPTIMIZER)]


# -- chunks -----------------------------------------------------------------------------------------------------------


def test_chunks_are_consecutive_parameters_of_at_most_16_mib_or_one_larger_parameter() -> None:
    chunks = chunks_of(step(2, 3, 4, 1, 7, 40, 1))  # two moments each
    assert [(chunk.first, chunk.count, chunk.size_bytes // MIB) for chunk in chunks] == [
        (0, 2, 10),
        (2, 2, 10),
        (4, 1, 14),
        (5, 1, 80),
        (6, 1, 2),
    ]
    assert not any(chunk.streamed for chunk in chunks)


def test_a_large_state_has_about_64_chunks() -> None:
    assert 64 <= len(chunks_of(step(*[10] * 640))) <= 66


def test_an_optimizer_that_is_not_separable_is_one_chunk() -> None:
    (chunk,) = chunks_of(step(20, 20, 20, separable=False))
    assert (chunk.count, chunk.size_bytes) == (3, 120 * MIB)


def test_parameters_whose_state_must_stay_are_stepped_with_a_neighbour() -> None:
    chunks = chunks_of(step(20, 20, 20, small=[1]))
    assert [(chunk.first, chunk.count) for chunk in chunks] == [(0, 2), (2, 1)]
    assert chunks_of(step(20, small=[0])) == ()


def test_a_profile_without_optimizers_is_planned_as_ever() -> None:
    profile = transformer_like(2, mib=8)
    assert chunks_of(profile) == ()
    assert with_state(profile, ()) is profile
    made = plan(profile, 0.7, evaluations=300)
    assert made.state == ()
    assert made == msgspec.structs.replace(plan(profile, 0.7, evaluations=300, without=["state"]), solve=made.solve)


# -- bytes and seconds ------------------------------------------------------------------------------------------------


def test_streamed_state_takes_nothing_before_the_optimizer_and_three_chunks_in_it() -> None:
    profile = step(20, 20, 20, 20, 20)
    whole, part = (Problem.of(profile, state=streamed(chunks_of(profile), count)) for count in (0, 4))
    less, tick = whole.base_bytes - part.base_bytes, optimizer_tick(profile)
    assert set(less[:tick].tolist()) == {160 * MIB}
    root = tick + 1  # the op that makes a temporary for each of the five parameters: of one chunk at a time
    assert less[tick] == (160 - 120 - 20) * MIB
    assert less[root] == (160 - 120 - 20) * MIB + 100 * MIB


def test_a_chunk_that_is_there_alone_may_make_the_most() -> None:
    """Of a fused list each chunk makes its part: the first, which is kept, makes 60 MiB beside one copy in."""
    profile = step(60, 20, 20)
    part = Problem.of(profile, state=streamed(chunks_of(profile), 2))
    (window,) = (value for value in part.profile.values if value.name == WINDOW)
    assert window.size_bytes == max(60 + 40, 20 + 80) * MIB


def test_shares_and_overheads_are_those_of_the_step_that_keeps_all_state() -> None:
    profile = step(20, 20, 20)
    kept, moved = Problem.of(profile), Problem.of(profile, state=streamed(chunks_of(profile), 3))
    assert moved.plain_s == kept.plain_s == kept.step_s < moved.step_s
    assert moved.profile.in_core_peak_bytes == profile.in_core_peak_bytes
    timed = msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, plain_step_s=0.5))
    assert Problem.of(timed, state=moved.state).plain_s == 0.5


def test_the_first_copy_in_runs_beside_kept_chunks_and_the_last_copy_out_beside_nothing() -> None:
    def seconds(*streams: bool, step_s: float, duplex: float = 1.0) -> float:
        chunks = [
            StateChunk(optimizer=0, first=number, count=1, size_bytes=10**9, streamed=is_streamed)
            for number, is_streamed in enumerate(streams)
        ]
        return optimizer_seconds(link(1.0, duplex=duplex), chunks, step_s)

    assert seconds(False, False, step_s=4) == 4
    assert seconds(False, True, step_s=4) == 2 + 2 + 1
    assert seconds(True, False, step_s=4) == 1 + 2 + 2
    assert seconds(True, True, step_s=0) == 1 + 1 + 1
    assert seconds(True, True, step_s=0, duplex=0.5) == 2 + 2 + 2
    # The third is fetched once the first is stepped and the second begins; copies in and out then alternate with ops.
    assert seconds(True, True, True, True, step_s=0) == 1 + 1 + 1 + 1 + 1


def test_a_step_that_only_accumulates_has_neither_window_nor_copies() -> None:
    whole = step(20, 20, 20)
    micro = bare(transformer_like(2, mib=8))
    state = [value for value in whole.values if value.kind == "optimizer_state"]
    first, last = len(micro.values), micro.tick_count - 1
    held = tuple(msgspec.structs.replace(value, forward_death=last, freed=last) for value in state)
    parameters = tuple((first + 2 * place, first + 2 * place + 1) for place in range(3))
    adam = OptimizerState(name="Adam", separable=True, parameters=parameters)
    micro = msgspec.structs.replace(micro, values=(*micro.values, *held), optimizers=(adam,))
    moved = Problem.of(micro, state=streamed(chunks_of(micro), 3))
    assert moved.step_s == Problem.of(micro).step_s
    assert set((Problem.of(micro).base_bytes - moved.base_bytes).tolist()) == {120 * MIB}


@pytest.mark.parametrize("seed", seeds(25, 1500))
def test_both_simulators_and_the_checkers_agree(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_step(seed, 3 + seed % 15)
    profile = with_random_thread(profile, seed) if seed % 3 == 0 else profile
    chunks = chunks_of(profile)
    state = streamed(chunks, rng.randint(0, len(chunks)))
    problem = Problem.of(profile, state=state)
    style, wish = STYLE_OF[seed % len(STYLE_OF)], random_decisions(problem, seed)
    budget_bytes = int(profile.in_core_peak_bytes * rng.uniform(0.2, 1.0))
    found, compiled = (
        try_style(problem, "", wish, budget_bytes, style),
        Evaluator(problem).evaluate(wish, budget_bytes, style),
    )
    assert (compiled.step_s, compiled.peak_bytes) == (found.simulation.step_s, found.peak_bytes)
    made = msgspec.structs.replace(plan_with(profile, found.schedule), state=state)
    verdict = check_times(profile, made, found.simulation)
    assert verdict.peak_bytes == found.simulation.peak_bytes
    assert verdict.first_step_peak_bytes == found.simulation.first_step_peak_bytes
    assert list(made.faults()) == []


# -- plans ------------------------------------------------------------------------------------------------------------


def judged(profile: Profile, made: Plan) -> Plan:
    """The plan, once the independent checkers have seen what it promises."""
    verdict = check_times(profile, made, made.prediction)
    assert verdict.peak_bytes == made.prediction.peak_bytes <= made.budget_bytes
    assert verdict.first_step_peak_bytes == made.prediction.first_step_peak_bytes <= made.budget_bytes
    assert made.solve.bound_s is not None
    assert made.solve.bound_s <= made.prediction.step_s * SAME
    return made


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.0])
def test_any_budget_from_the_smallest_on_has_a_plan_that_does_what_it_promises(share: float) -> None:
    profile = step(*[10] * 16, gb_per_s=12)
    smallest = smallest_budget(profile)
    made = plan(profile, int(smallest + share * (profile.in_core_peak_bytes - smallest)), evaluations=500)
    assert any(chunk.streamed for chunk in judged(profile, made).state) == (share < 0.9)


def test_no_state_moves_if_the_budget_holds_all() -> None:
    profile = step(20, 20, 20)
    assert plan(profile, profile.in_core_peak_bytes).state == ()
    assert plan(profile, "100%").solve.policy == "keep-all"


def test_a_plan_is_no_longer_than_one_without_state_and_below_its_budgets_there_are_plans() -> None:
    profile = step(*[10] * 6, gb_per_s=2)
    least = smallest_budget(profile, without=["state"])
    assert smallest_budget(profile) < least
    for budget_bytes in (least, (least + profile.in_core_peak_bytes) // 2):
        made, kept = (plan(profile, budget_bytes, evaluations=2000, without=one) for one in ([], ["state"]))
        assert kept.state == ()
        assert judged(profile, made).prediction.step_s <= kept.prediction.step_s * SAME
    assert judged(profile, plan(profile, smallest_budget(profile), evaluations=200)).state


def test_a_refusal_names_the_smallest_budget_of_all_counts() -> None:
    profile = step(*[10] * 6)
    smallest = smallest_budget(profile)
    with pytest.raises(InfeasibleError, match=f"expected at least {smallest} bytes") as refused:
        plan(profile, smallest - 1, evaluations=10)
    assert refused.value.smallest_budget_bytes == smallest
    assert "whole step" not in str(refused.value)


def test_the_same_evaluations_give_the_same_plan() -> None:
    profile = step(*[10] * 8, gb_per_s=6)
    first, second = (plan(profile, 0.5, evaluations=400, seed=3) for _ in range(2))
    assert msgspec.structs.replace(first, solve=second.solve) == second


def test_the_host_holds_no_more_state_than_its_budget() -> None:
    profile = step(*[10] * 8, gb_per_s=6)
    assert streamed_bytes(plan(profile, 0.4, evaluations=300).state) > 60 * MIB
    least = Streaming(Problem.of(profile), 60 * MIB)
    assert streamed_bytes(least.state(least.most)) <= 60 * MIB < streamed_bytes(least.state(least.most + 1))
    with pytest.raises(InfeasibleError, match=f"expected at least {least.smallest(least.most).peak_bytes}"):
        plan(profile, 0.4, evaluations=300, host_budget=60 * MIB)


def test_what_a_watched_search_found_is_a_plan() -> None:
    profile = step(*[10] * 8, gb_per_s=6)
    told = []

    def enough(progress: Any) -> bool:
        told.append(progress)
        return True

    made = plan(profile, 0.5, time_limit_s=5, gap=0.0, watch=enough)
    judged(profile, made)
    assert all(one.bound_s <= one.step_s * SAME for one in told)


def test_an_interrupt_leaves_the_best_plan_so_far_if_that_is_wanted() -> None:
    profile = step(*[10] * 8, gb_per_s=1)

    def interrupt(progress: Any) -> None:
        raise KeyboardInterrupt

    made = plan(
        profile, smallest_budget(profile) + 20 * MIB, time_limit_s=20, gap=0.0, watch=interrupt, keep_interrupted=True
    )
    assert judged(profile, made).solve.status is SolveStatus.INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        plan(profile, smallest_budget(profile) + 20 * MIB, time_limit_s=20, gap=0.0, watch=interrupt)


def tiny_joint(seed: int) -> tuple[Profile, int]:
    """A step of a few values and at most four chunks of about as many bytes, and a budget that is below its peak."""
    rng = random.Random(f"joint {seed}")
    profile = scaled(tiny_profile(seed, 2, 3), 8192)
    sizes = [rng.randint(5, 12) * MIB for _ in range(rng.randint(1, 4))]
    profile = with_adam(profile, sizes, seconds=rng.choice([1e-3, 3e-2]), separable=rng.random() < 0.8)
    smallest = smallest_budget(profile)
    return profile, rng.randint(smallest, profile.in_core_peak_bytes - 1)


@pytest.mark.parametrize("seed", seeds(8, 300))
def test_of_a_tiny_step_the_best_plan_of_all_counts_is_found_and_the_bound_is_below_it(seed: int) -> None:
    profile, budget_bytes = tiny_joint(seed)
    steps = Streaming(Problem.of(profile))
    best = [best_schedule(steps.step(count), budget_bytes) for count in range(steps.most + 1)]
    best_s = min(found.step_s for found in best if found is not None)
    made = judged(profile, plan(profile, budget_bytes, time_limit_s=5, gap=0.0))
    assert best_s / SAME <= made.prediction.step_s <= best_s * (1 + FAR)
    assert made.solve.bound_s is not None
    assert made.solve.bound_s <= best_s * SAME


@pytest.mark.parametrize("seed", seeds(10, 500))
def test_what_is_proven_of_a_count_holds_for_smaller_ones_that_stream_less_the_seconds_of_the_copies(seed: int) -> None:
    profile, _ = tiny_joint(seed)
    steps = Streaming(Problem.of(profile))
    assert steps.is_behind
    for count in range(1, steps.most):
        fewer, more = steps.step(count), steps.step(count + 1)
        assert (more.base_bytes <= fewer.base_bytes).all()
        found = try_style(fewer, "", random_decisions(fewer, seed), 0, STYLE_OF[0])
        saved_s = steps.added_s(count + 1) - steps.added_s(count)
        assert simulate(more, found.schedule).step_s == pytest.approx(found.simulation.step_s + saved_s)
        bound_s = lower_bound(more, found.peak_bytes, "highs", SolverLimits(60))
        assert bound_s - saved_s <= found.simulation.step_s * SAME


def test_where_some_are_streamed_more_chunks_never_take_more_bytes() -> None:
    for seed in range(tries(20, 300)):
        steps = Streaming(Problem.of(random_step(seed, 8)))
        for count in range(1, steps.most):
            assert (steps.step(count + 1).base_bytes <= steps.step(count).base_bytes).all()


# -- arenas, reserved bytes, other machines ---------------------------------------------------------------------------


def test_the_arena_and_what_lies_outside_it_are_within_the_budget_too() -> None:
    profile = step(*[10] * 8, gb_per_s=6)
    least = smallest_budget(profile, arena="on")
    assert least < smallest_budget(profile, arena="on", without=["state"])
    made = plan(profile, (least + profile.in_core_peak_bytes) // 2, evaluations=300, arena="on")
    assert made.layout is not None
    assert made.holds_arena
    assert any(chunk.streamed for chunk in judged(profile, made).state)
    with pytest.raises(InfeasibleError, match=f"expected at least {least} bytes"):
        plan(profile, least - 1, evaluations=10, arena="on")


@pytest.mark.parametrize("seed", seeds(6, 200))
def test_the_blocks_of_such_steps_are_live_as_the_simulator_says(seed: int) -> None:
    profile = random_step(seed, 8)
    steps = Streaming(Problem.of(profile))
    problem = steps.step(steps.most)
    schedule = try_style(problem, "", random_decisions(problem, seed), 0, STYLE_OF[seed % 4]).schedule
    blocks = blocks_of(problem, schedule)
    assert live_peak(blocks.before + blocks.of_step) == simulate(problem, schedule).peak_bytes


def on_gpu(profile: Profile) -> Profile:
    """The step as if measured on a GPU."""
    device = msgspec.structs.replace(profile.device, kind="cuda")
    return msgspec.structs.replace(profile, device=device, memory=Memory.ALLOCATED)


@pytest.mark.parametrize("share", [0.85, 0.6])
def test_what_the_allocator_reserves_for_such_a_step_is_within_a_budget_on_it(share: float) -> None:
    profile = on_gpu(step(*[40] * 10, gb_per_s=12))
    made = plan(profile, f"{share:.0%}", evaluations=300)
    assert made.on == "reserved"
    assert made.covered_bytes <= made.budget_bytes
    assert any(chunk.streamed for chunk in made.state)
    in_core = made.prediction.in_core_reserved_bytes
    assert in_core is not None
    assert in_core > profile.in_core_peak_bytes * 0.95


def test_a_smaller_device_is_refused_only_where_streaming_does_not_help() -> None:
    profile = step(*[10] * 8)
    profile = msgspec.structs.replace(profile, static_bytes=profile.static_bytes | {"parameter": 20 * MIB})
    assert for_machine(profile, device_memory=120 * MIB).optimizers == profile.optimizers
    with pytest.raises(InfeasibleError, match=f"the smallest budget that has a plan is {smallest_budget(profile)}"):
        for_machine(profile, device_memory=20 * MIB)


# -- what a plan says -------------------------------------------------------------------------------------------------


def half_streamed() -> tuple[Profile, Plan]:
    profile = step(*[10] * 8, gb_per_s=6)
    return profile, plan(profile, 0.6, evaluations=300)


def test_a_row_says_how_much_is_streamed_and_another_what_it_costs() -> None:
    _, made = half_streamed()
    rows = made.rows()
    count, size = sum(chunk.streamed for chunk in made.state), made.prediction.state_bytes
    assert size == streamed_bytes(made.state)
    assert rows["optimizer state"] == f"{count} of 8 chunks streamed ({format_bytes(size)} of 160 MiB)"
    assert "optimizer state" in rows["of that"]


def test_at_the_optimizer_the_window_is_named_as_its_state() -> None:
    profile = with_adam(bare(transformer_like(1, mib=1)), [40 * MIB] * 6)
    made = plan(profile, smallest_budget(profile), evaluations=50)
    found = explain_peak(profile, made)
    assert found.phase == "optimizer"
    assert found.by_kind()["optimizer state"] == window_bytes(made.state) + 40 * MIB  # and what a chunk makes
    assert found.size_bytes == sum(holder.size_bytes for holder in found.holders)


def test_such_a_step_is_drawn_traced_and_compared(tmp_path: Path) -> None:
    profile, made = half_streamed()
    timeline = timeline_of(profile, made)
    assert timeline.memory.size_bytes.max() == made.prediction.peak_bytes
    assert timeline.static_bytes == sum(profile.static_bytes.values()) - streamed_bytes(made.state)
    write_picture(draw_timeline(timeline), tmp_path / "step.png")
    assert predicted_trace(profile, made).step_s == pytest.approx(made.prediction.step_s)
    kept = plan(profile, profile.in_core_peak_bytes)
    assert "optimizer state there" in str(differences(kept, made))


def test_its_problem_is_that_of_the_plan_and_decisions_can_be_changed_by_hand() -> None:
    profile, made = half_streamed()
    problem = Problem.of(profile, made)
    assert problem.state == made.state
    changed = with_decisions(profile, made, {made.values[0].name: Decision.KEEP})
    assert changed.state == made.state
    assert check(profile, changed).peak_bytes == changed.prediction.peak_bytes
    with pytest.raises(ModelMismatchError, match="bytes of optimizer state"):
        Problem.of(step(*[11] * 8), made)


@pytest.mark.parametrize(
    ("place", "changes", "fault"),
    [
        (1, {"first": 2}, "state[1].first: expected 1, where the chunk before ends, found 2"),
        (0, {"count": 0}, "state[0]: expected parameters with state, found 0"),
        (1, {"first": 1, "optimizer": 3}, "state[1].first: expected 0, where the chunk before ends, found 1"),
    ],
)
def test_a_plan_file_with_wrong_chunks_is_refused(
    place: int, changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    _, made = half_streamed()
    assert Plan.load(made.save(tmp_path / "right.json")) == made
    path = with_facts(made, "state", place, **changes).save(tmp_path / "plan.json")
    with pytest.raises(InputFileError, match=re.escape(fault)):
        Plan.load(path)


def test_chunks_none_of_which_is_streamed_are_refused(tmp_path: Path) -> None:
    _, made = half_streamed()
    idle = tuple(msgspec.structs.replace(chunk, streamed=False) for chunk in made.state)
    with pytest.raises(InputFileError, match="expected no chunks of optimizer 0"):
        Plan.load(msgspec.structs.replace(made, state=idle).save(tmp_path / "plan.json"))
