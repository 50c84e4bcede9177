"""Time steps in a profile, and the policy that goes by them: what is found, what goes first, what leaves when."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Kind, Phase, Profile
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.policies.seq2seq import Group, TimeLoop, groups_of, loops_of
from poochplan.planner.simulator.simulate import Candidate
from poochplan.planner.whatif import for_machine
from poochplan.workload import load_workload
from tests.planner.plans import assert_judged, input_at
from tests.planner.random_profiles import Recorder, link, resnet_like, transformer_like, unet_like
from tests.workloads.small import SMALL

CONFIGS = Path(__file__).parents[2] / "configs"
LENGTH = int(SMALL["seq2seq_steps"]["sequence_length"])


@functools.cache
def profile_of(name: str, **overrides: str) -> Profile:
    """A step of a ready workload, small, taken without memory."""
    workload = load_workload(str(CONFIGS / f"{name}.toml"), {**SMALL[name], **overrides}).workload
    return poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, mode="fake", roofline="v100"
    )


def attending(steps: int = 5, *, link_gb_per_s: float = 1.0) -> Profile:
    """An encoder that is one op, and a decoder that attends to all of its positions at each step."""
    r = Recorder()
    state, positions, seconds = 64 << 10, 8, 1e-3
    weights = [r.before(4096) for _ in range(3)]
    (memory,) = r.op("lstm", [r.before(state, Kind.INPUT), r.before(4096)], [positions * state])
    hidden = r.before(state, Kind.INPUT)
    for _ in range(steps):
        (cell,) = r.op("cell", [hidden, weights[0]], [state], saves=[hidden], saves_outputs=True, seconds=seconds)
        (scores,) = r.op("add", [memory, cell], [positions * state], seconds=seconds / 10)
        (scores,) = r.op("tanh", [scores], [positions * state], saves_outputs=True, seconds=seconds / 10)
        (context,) = r.op("mean", [scores, memory], [state], saves=[scores, memory], seconds=seconds)
        (hidden,) = r.op("join", [cell, context, weights[1]], [state], saves=[context], seconds=seconds)
    r.op("loss", [hidden, weights[2]], [512], saves=[hidden], seconds=seconds)
    return r.finish(link(link_gb_per_s))


def names_of(given: PolicyInput, groups: list[Group]) -> set[str]:
    """The operators that make the groups' values."""
    return {given.op_kinds[given.producers[value]] for group in groups for value in group.values}


def wished(candidate: Candidate, decision: Decision) -> set[int]:
    return {value for value, decided in enumerate(candidate.wish) if decided is decision}


def parameters_read(profile: Profile, loop: TimeLoop, step: int) -> list[tuple[str, tuple[int, ...]]]:
    ops = [profile.ops[index] for index in loop.ops_of(step)]
    is_parameter = [value.kind is Kind.PARAMETER for value in profile.values]
    return [(op.name, tuple(value for value in op.inputs if is_parameter[value])) for op in ops]


# -- what is found -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["bahdanau", "luong"])
def test_the_unrolled_network_has_a_loop_of_the_encoder_and_one_of_the_decoder(attention: str) -> None:
    profile = profile_of("seq2seq_steps", attention=attention)
    encoder, decoder = loops_of(profile)
    assert len(encoder.starts) == len(decoder.starts) == LENGTH
    assert encoder.end <= decoder.starts[0]
    for loop in (encoder, decoder):
        steps = [parameters_read(profile, loop, step) for step in range(LENGTH)]
        assert steps == [steps[0]] * LENGTH
        assert {profile.ops[index].phase for step in range(LENGTH) for index in loop.ops_of(step)} == {Phase.FORWARD}
    ops = tuple(msgspec.structs.replace(op, layer="") for op in profile.ops)  # no name is looked at
    values = tuple(msgspec.structs.replace(one, layer="", name=f"v{at}") for at, one in enumerate(profile.values))
    assert loops_of(msgspec.structs.replace(profile, ops=ops, values=values)) == loops_of(profile)


def test_the_unrolled_char_rnn_has_a_time_step_for_each_character() -> None:
    profile = profile_of("char_rnn", unrolled="true")
    (loop,) = loops_of(profile)
    assert len(loop.starts) == int(SMALL["char_rnn"]["sequence_length"])
    groups = groups_of(input_at(profile, 0.5))
    assert not any(group.is_attention for group in groups)
    assert [group.begin for group in groups if group.begin in loop.starts] == list(loop.starts)


def test_all_decoder_steps_share_the_encoders_states_their_keys_and_the_embedded_target() -> None:
    profile = profile_of("seq2seq_steps", attention="bahdanau")
    _, decoder = loops_of(profile)
    assert {profile.ops[profile.values[value].born].name.split(".")[1] for value in decoder.shared} == {
        "stack", "mm", "mul",
    }  # fmt: skip


SHAPES = {"resnet": resnet_like(4), "unet": unet_like(3), "gpt": transformer_like(2)}


@pytest.mark.parametrize("name", ["seq2seq", "char_rnn", *SHAPES])
def test_fused_recurrent_layers_and_layers_of_their_own_weights_have_no_time_steps(name: str) -> None:
    assert loops_of(SHAPES[name] if name in SHAPES else profile_of(name)) == ()


def shared_weights(pattern: str, times: int) -> Profile:
    """A chain of linear ops: each letter of the pattern is a weight, and the pattern comes so often."""
    r = Recorder()
    weights = {letter: r.before(4096) for letter in sorted(set(pattern))}
    x = r.before(1 << 20, Kind.INPUT)
    for _ in range(times):
        for letter in pattern:
            (x,) = r.op("linear", [x, weights[letter]], [1 << 20], saves=[x])
    r.op("loss", [x], [1024], saves=[x])
    return r.finish(link())


@pytest.mark.parametrize(
    ("pattern", "times", "starts"),
    [("a", 2, []), ("ab", 2, []), ("a", 3, [0, 1, 2]), ("ab", 4, [0, 2, 4, 6]), ("aaab", 3, [0, 4, 8])],
)
def test_a_loop_is_three_repetitions_or_more_of_the_longest_pattern(
    pattern: str, times: int, starts: list[int]
) -> None:
    assert [list(loop.starts) for loop in loops_of(shared_weights(pattern, times))] == ([starts] if starts else [])


# -- what goes first -----------------------------------------------------------------------------------------------


with_attention = pytest.mark.parametrize(
    ("make", "steps"),
    [(attending, 5), (functools.partial(profile_of, "seq2seq_steps", attention="bahdanau"), LENGTH)],
    ids=["by hand", "network"],
)


@with_attention
def test_attention_is_what_holds_something_for_each_position_of_what_all_steps_read(
    make: Callable[[], Profile], steps: int
) -> None:
    given = input_at(make(), 0.5)
    groups = groups_of(given)
    attention = [group for group in groups if group.is_attention]
    assert len(attention) == steps
    assert names_of(given, attention) == {"tanh"}
    assert sorted(value for group in groups for value in group.values) == list(given.movable)


@with_attention
def test_groups_go_attention_first_then_steps_then_the_rest_and_what_all_steps_read_last(
    make: Callable[[], Profile], steps: int
) -> None:
    given = input_at(make(), 0.5)
    groups = groups_of(given)
    loops = loops_of(given.profile)
    firsts = [given.producers[group.values[0]] for group in groups]
    in_steps = [any(loop.step_of(op) >= 0 for loop in loops) for op in firsts]
    kinds = [0 if group.is_attention else 1 if inside else 2 for group, inside in zip(groups, in_steps, strict=True)]
    assert kinds == sorted(kinds)
    assert kinds.count(0) == steps
    for kind in (0, 1):
        ops = [op for op, found in zip(firsts, kinds, strict=True) if found == kind]
        assert ops == sorted(ops)
    shared = {value for loop in loops for value in loop.shared}
    last = [given.problem.replay.value_of[group.values[0]] in shared for group in groups]
    assert True in last
    assert last == sorted(last)


def test_attention_is_recomputed_earliest_step_first_and_nothing_else_while_that_is_enough() -> None:
    given = input_at(attending(steps=12, link_gb_per_s=0.05), 0.6)
    found = run_policy("seq2seq", given)
    recomputed = wished(found, Decision.RECOMPUTE)
    attention = [group.values[0] for group in groups_of(given) if group.is_attention]
    assert found.peak_bytes <= given.budget_bytes
    assert 0 < len(recomputed) < len(attention)
    assert recomputed == set(attention[: len(recomputed)])
    assert wished(found, Decision.SWAP) == set()


def test_steps_are_swapped_whole_once_all_attention_is_dropped() -> None:
    given = input_at(for_machine(profile_of("seq2seq_steps", attention="bahdanau"), link="1MB/s"), 0.2)
    found = run_policy("seq2seq", given)
    groups = groups_of(given)
    assert wished(found, Decision.RECOMPUTE) == {v for group in groups if group.is_attention for v in group.values}
    swapped = wished(found, Decision.SWAP)
    touched = [swapped.issuperset(group.values) for group in groups if not group.is_attention]
    assert True in touched
    assert touched == sorted(touched, reverse=True)
    assert swapped == {v for group in groups if not group.is_attention for v in group.values if v in swapped}


# -- what the plan does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "share"), [("bahdanau", 0.8), ("bahdanau", 0.2), ("luong", 0.5), ("luong", 0.0)])
def test_the_plan_fits_and_the_checker_can_carry_it_out(attention: str, share: float) -> None:
    given = input_at(profile_of("seq2seq_steps", attention=attention), share)
    found = run_policy("seq2seq", given)
    assert assert_judged(given.profile, found.schedule, found.simulation).peak_bytes <= given.budget_bytes


@pytest.mark.parametrize("share", [0.2, 0.0])
def test_steps_leave_in_the_order_of_time_and_come_back_in_the_other(share: float) -> None:
    given = input_at(profile_of("seq2seq_steps", attention="luong"), share)
    found = run_policy("seq2seq", given)
    _, decoder = loops_of(given.profile)
    out = [value for action in found.schedule.actions for value in action.swap_out]
    back = [value for action in found.schedule.actions for value in action.prefetch]
    steps = {value: decoder.step_of(given.producers[value]) for value in out}
    left, returned = ([steps[value] for value in queue if steps[value] >= 0] for queue in (out, back))
    assert len(set(left)) > 2
    assert left == sorted(left)
    done = {step: place for place, step in enumerate(returned)}  # a step hands values on, which come before its others
    assert sorted(done, key=done.__getitem__) == sorted(done, reverse=True)


@pytest.mark.parametrize("profile", SHAPES.values(), ids=SHAPES)
def test_without_time_steps_values_are_swapped_in_the_order_of_production(profile: Profile) -> None:
    given = input_at(profile, 0.4)
    found, plain = run_policy("seq2seq", given), run_policy("earliest-first", given)
    assert found.peak_bytes <= given.budget_bytes
    assert found.wish == plain.wish


def test_where_a_replay_takes_more_than_there_is_attention_is_swapped() -> None:
    given = input_at(attending(steps=5, link_gb_per_s=0.05), 0.0)
    found = run_policy("seq2seq", given)
    assert found.peak_bytes <= given.budget_bytes
    assert wished(found, Decision.RECOMPUTE) == set()


def test_attention_is_recomputed_where_the_link_is_slow_and_swapped_where_copies_are_free() -> None:
    slow, fast = (input_at(attending(12, link_gb_per_s=rate), 0.5) for rate in (0.05, 1000.0))
    dropped, swapped = run_policy("seq2seq", slow), run_policy("seq2seq", fast)
    assert wished(dropped, Decision.SWAP) == wished(swapped, Decision.RECOMPUTE) == set()
    assert dropped.simulation.step_s < run_policy("swap-all", slow).simulation.step_s
    assert swapped.simulation.step_s <= run_policy("swap-all", fast).simulation.step_s
