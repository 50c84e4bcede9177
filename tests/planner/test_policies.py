"""What each baseline policy promises: legal schedules, exact bytes, and the rule it is named after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.errors import InfeasibleError, UsageError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Kind, Phase, Profile
from poochplan.planner.planning import plan
from poochplan.planner.policies import greedy, policy_names, pooch, run_policy
from poochplan.planner.simulator.evaluator import Evaluation, Evaluator
from poochplan.planner.simulator.schedule import points_of
from poochplan.planner.simulator.simulate import ON_DEMAND, Candidate, try_style
from tests.depth import tries
from tests.planner.checker import check
from tests.planner.plans import assert_judged, input_at
from tests.planner.random_profiles import (
    QUICK,
    Recorder,
    link,
    profiles_with_thread,
    resnet_like,
    transformer_like,
    unet_like,
)

ALWAYS_FITTING = ("swap-all", "swap-all-on-demand", "earliest-first", "latest-first", "greedy", "pooch", "seq2seq")
SHAPES = {"resnet": resnet_like(4), "unet": unet_like(3), "gpt": transformer_like(2)}


def as_matrices(profile: Profile) -> Profile:
    """The same profile with two-dimensional values, as TFLMS wants them."""
    values = [msgspec.structs.replace(value, shape=(1, *value.shape)) for value in profile.values]
    return msgspec.structs.replace(profile, values=tuple(values))


def values_with(candidate: Candidate, decision: Decision) -> list[int]:
    return [value for value, decided in enumerate(candidate.schedule.decisions) if decided is decision]


def chain(length: int) -> Profile:
    """Ops in a row, each of which saves its input."""
    r = Recorder()
    x = r.before(1 << 20, Kind.INPUT)
    for _ in range(length):
        (x,) = r.op("linear", [x, r.before(4096)], [1 << 20], saves=[x], seconds=1e-3)
    r.op("loss", [x], [1024], saves=[x])
    return r.finish(link())


# -- every policy --------------------------------------------------------------------------------------------------


@settings(QUICK, max_examples=tries(15, 500))
@given(profile=profiles_with_thread(24), share=st.floats(0.0, 1.0))
def test_the_checkers_carry_out_what_a_policy_plans_and_see_the_predicted_bytes_and_seconds(
    profile: Profile, share: float
) -> None:
    step = input_at(as_matrices(profile), share)
    for name in policy_names():
        found = run_policy(name, step)
        assert_judged(step.profile, found.schedule, found.simulation)
        if name in ALWAYS_FITTING:
            assert found.peak_bytes <= step.budget_bytes, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", policy_names())
def test_plan_runs_one_policy_alone_or_says_that_it_does_not_fit(name: str, shape: str) -> None:
    step = input_at(SHAPES[shape], 0.5)
    found = run_policy(name, step)
    if found.peak_bytes <= step.budget_bytes:
        made = plan(step.profile, step.budget_bytes, policy=name)
        assert (made.solve.policy, made.solve.solver, made.schedule) == (name, "none", found.schedule.actions)
        assert (made.solve.bound_s, made.solve.gap) == (None, None) or name == "keep-all"
        assert check(step.profile, made).peak_bytes == made.prediction.peak_bytes
        return
    assert name not in ALWAYS_FITTING
    with pytest.raises(InfeasibleError, match=f"policy '{name}'.*its peak is {found.peak_bytes} bytes") as caught:
        plan(step.profile, step.budget_bytes, policy=name)
    assert "\n" not in str(caught.value)
    assert plan(step.profile, caught.value.smallest_budget_bytes, policy="swap-all-on-demand")


def test_below_the_smallest_budget_the_message_is_that_no_plan_fits() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits"):
        plan(unet_like(2), 1000, policy="greedy")


def test_an_unknown_policy_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"policy 'vddn' is unknown: expected ilp or one of .*vdnn") as caught:
        plan(unet_like(2), "80%", policy="vddn")
    assert all(name in str(caught.value) for name in policy_names())


def test_the_documentation_lists_every_policy() -> None:
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    for name in policy_names():
        assert f"| {name} |" in text


@pytest.mark.parametrize("shape", SHAPES)
def test_swapping_policies_replay_nothing_and_checkpointing_ones_move_nothing(shape: str) -> None:
    step = input_at(as_matrices(SHAPES[shape]), 0.3)
    for name in ("keep-all", "swap-all", "swap-all-on-demand", "earliest-first", "latest-first", "vdnn", "tflms"):
        assert run_policy(name, step).simulation.replay_s == 0, name
    for name in ("keep-all", "recompute-all", "sqrt-n", "checkpoint-greedy"):
        assert run_policy(name, step).simulation.out_bytes == 0, name
    assert set(values_with(run_policy("recompute-all", step), Decision.RECOMPUTE)) == step.replayable


# -- swapping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["resnet", "unet"])
def test_vdnn_swaps_inputs_of_convolutions_awaited_at_the_end_of_their_layer_and_back_by_the_next(
    shape: str,
) -> None:
    step = input_at(SHAPES[shape], 0.5)
    found = run_policy("vdnn", step)
    swapped = values_with(found, Decision.SWAP)
    releases = points_of(step.problem, found.schedule, "release")
    assert swapped
    for value in swapped:
        record = step.problem.replay.value_of[value]
        ops = step.profile.ops
        read_by = [i for i, op in enumerate(ops) if op.name == "conv" and op.inputs[0] == record]
        after = [point for point, done in enumerate(step.problem.point_ops) if done > read_by[-1]]
        assert releases[value] == after[0]
    for value, point in points_of(step.problem, found.schedule, "prefetch").items():
        used = step.problem.first_use_point[value]
        between = range(step.problem.point_ops[point], step.problem.point_ops[used])
        assert sum(step.profile.ops[op].name == "conv_backward" for op in between) <= 1


def test_a_step_that_a_policy_has_nothing_to_do_with_stays_as_it_is() -> None:
    no_convolutions, vectors, matrices = SHAPES["gpt"], SHAPES["resnet"], as_matrices(SHAPES["resnet"])
    for name, profile, share in (("vdnn", no_convolutions, 0.5), ("tflms", matrices, 1.0), ("tflms", vectors, 0.3)):
        found = run_policy(name, input_at(profile, share))
        assert found.schedule.actions == ()
        assert set(found.schedule.decisions) == {Decision.KEEP}


def test_tflms_swaps_what_is_used_the_most_levels_later() -> None:
    nearest = []
    for share in (0.2, 0.5, 0.8):
        step = input_at(as_matrices(resnet_like(8)), share)
        levels, ops = step.levels, step.problem.point_ops
        found = run_policy("tflms", step)
        assert found.peak_bytes <= step.budget_bytes
        distances = [
            levels[ops[step.problem.first_use_point[value]]] - levels[step.producers[value]]
            for value in values_with(found, Decision.SWAP)
        ]
        nearest.append(min(distances))
    assert nearest == sorted(nearest)
    assert nearest[0] < nearest[-1]


def test_tflms_brings_values_back_before_their_level() -> None:
    step = input_at(as_matrices(resnet_like(8)), 0.6)
    back = points_of(step.problem, run_policy("tflms", step).schedule, "prefetch")
    assert max(step.problem.first_use_point[value] - point for value, point in back.items()) > 0


@pytest.mark.parametrize(("name", "way"), [("earliest-first", 1), ("latest-first", -1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_from_one_end_swaps_as_few_as_fit(shape: str, name: str, way: int) -> None:
    step = input_at(SHAPES[shape], 0.4)
    found = run_policy(name, step)
    order = sorted(step.movable, key=lambda value: (step.problem.born[value], value))[::way]
    wished = [value for value in order if found.wish[value] is Decision.SWAP]
    assert wished == order[: len(wished)]
    fewer = try_style(step.problem, "", step.wish(swap=wished[:-1]), 0, ON_DEMAND)
    assert found.peak_bytes <= step.budget_bytes < fewer.peak_bytes


# -- checkpointing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "every"), [(17, 4), (26, 5), (10, 3)])
def test_sqrt_n_keeps_every_kth_value_of_a_chain_and_recomputes_all_others(length: int, every: int) -> None:
    found = run_policy("sqrt-n", input_at(chain(length), 0.5))
    replayable = range(1, length + 1)  # value 0 is the input of the step; value i is the result of op i - 1
    inner = range(2, length + 1)  # the results of ops with an op before and an op after them
    checkpoints = set(list(inner)[every - 1 :: every])
    assert set(values_with(found, Decision.RECOMPUTE)) == set(replayable) - checkpoints


def test_checkpoints_are_taken_only_where_no_skip_goes_around() -> None:
    step = input_at(resnet_like(16), 0.5)
    found = run_policy("sqrt-n", step)
    kept = {value for value in values_with(found, Decision.KEEP) if value in step.replayable}
    producers = {step.profile.ops[step.producers[value]].name for value in kept}
    assert producers
    assert producers <= {"add", "down"}


def test_greedy_checkpoints_replay_less_where_memory_allows_and_still_fit_where_it_does_not() -> None:
    roomy, tight = input_at(chain(40), 0.8), input_at(chain(40), 0.35)
    assert run_policy("sqrt-n", roomy).simulation.replay_s > run_policy("checkpoint-greedy", roomy).simulation.replay_s
    assert run_policy("checkpoint-greedy", tight).peak_bytes <= tight.budget_bytes


def test_superneurons_recomputes_the_cheap_and_never_a_convolution_a_join_or_a_fork() -> None:
    step = input_at(resnet_like(8), 0.3)
    found = run_policy("superneurons", step)
    recomputed = values_with(found, Decision.RECOMPUTE)
    assert {step.profile.ops[step.producers[value]].name for value in recomputed} <= {"bn", "relu_"}
    readers = {value: sum(op.phase is Phase.FORWARD and step.problem.replay.value_of[value] in op.inputs
                          for op in step.profile.ops) for value in recomputed}  # fmt: skip
    assert recomputed
    swapped = {step.profile.ops[step.producers[value]].name for value in values_with(found, Decision.SWAP)}
    assert "conv" in swapped
    assert max(readers.values()) <= 2  # relu_ itself, and one reader after it


# -- both ----------------------------------------------------------------------------------------------------------


def test_greedy_swaps_where_copies_hide_and_recomputes_where_they_do_not() -> None:
    fast = run_policy("greedy", input_at(transformer_like(2, link_gb_per_s=100), 0.5))
    slow = run_policy("greedy", input_at(transformer_like(2, link_gb_per_s=0.001), 0.5))
    assert set(fast.schedule.decisions) == {Decision.KEEP, Decision.SWAP}
    assert set(slow.schedule.decisions) == {Decision.KEEP, Decision.RECOMPUTE}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["greedy", "pooch"])
def test_hybrids_are_faster_than_swapping_alone_on_a_slow_link(name: str, shape: str) -> None:
    make = {"resnet": resnet_like, "unet": unet_like, "gpt": transformer_like}[shape]
    step = input_at(make(3, link_gb_per_s=0.1), 0.5)
    found, swapping = run_policy(name, step), run_policy("swap-all", step)
    assert found.peak_bytes <= step.budget_bytes
    assert found.simulation.step_s < swapping.simulation.step_s


def test_pooch_keeps_what_would_stall_when_there_is_room_for_it() -> None:
    profile = transformer_like(3, link_gb_per_s=0.05)
    only_swaps = msgspec.structs.replace(
        profile, values=tuple(msgspec.structs.replace(value, unreplayable="test") for value in profile.values)
    )
    step = input_at(only_swaps, 0.5)
    found = run_policy("pooch", step)
    room_bytes = step.budget_bytes - found.peak_bytes
    assert values_with(found, Decision.RECOMPUTE) == []
    assert room_bytes < max(step.problem.rounded_bytes)
    assert found.simulation.step_s <= run_policy("swap-all", step).simulation.step_s


@pytest.mark.parametrize("name", ["greedy", "pooch"])
def test_the_searches_simulate_no_more_than_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    evaluate = Evaluator.evaluate

    def counted(*arguments: Any) -> Evaluation:
        nonlocal calls
        calls += 1
        return evaluate(*arguments)

    monkeypatch.setattr(Evaluator, "evaluate", counted)
    monkeypatch.setattr(greedy, "EVALUATIONS", 30)
    monkeypatch.setattr(pooch, "KEEP_SETS", 10)
    monkeypatch.setattr(pooch, "FLIP_EVALUATIONS", 20)
    step = input_at(resnet_like(12), 0.3)
    found = run_policy(name, step)
    assert found.peak_bytes <= step.budget_bytes
    assert calls <= (1 + 10 + 20 if name == "pooch" else 2 * (1 + 30 + 2 + 3 * len(step.movable)))
