"""FSDP2's gathered weights: what replays read of them is read while they have memory, and no plan says otherwise."""

from __future__ import annotations

import msgspec
import pytest

from poochplan.errors import UsageError
from poochplan.formats.occupancy import live_bytes
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Device, Kind, PointKind, Profile, Value
from poochplan.formats.queries import in_flight_bytes
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.simulator.construct import fit, may_replay_at
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Style
from poochplan.planner.writing import with_decisions
from tests.planner.checker import Violation, check
from tests.planner.plans import plan_with
from tests.planner.random_profiles import Recorder, link

WEIGHT_BYTES, UNITS, OPS_OF_UNIT = 1 << 20, 4, 4


def whole() -> Profile:
    """Units of norm, linear, activation and linear, whose weights have memory all step long."""
    r = Recorder()
    (x,) = r.op("stem", [r.before(4096, Kind.INPUT)], [2 << 20], saves_outputs=True)
    for _ in range(UNITS):
        up, down = r.before(WEIGHT_BYTES), r.before(WEIGHT_BYTES)
        (norm,) = r.op("norm", [x], [2 << 20], saves=[x], seconds=1e-4)
        (wide,) = r.op("up", [norm, up], [4 << 20], saves=[norm], seconds=2e-3)
        (active,) = r.op("gelu", [wide], [4 << 20], saves=[wide], seconds=1e-4)
        (x,) = r.op("down", [active, down], [2 << 20], saves=[active], seconds=2e-3)
    return r.finish(link(1.0), optimizer_s=1e-3)


def gathered(profile: Profile, of_unit: int = 2) -> Profile:
    """The same under FSDP2: a unit's weights, so many, have memory in its forward and in its backward."""
    weights = [number for number, value in enumerate(profile.values) if value.kind is Kind.PARAMETER]
    backward = [number for number, op in enumerate(profile.ops) if op.phase == "backward"]
    values, more = list(profile.values), list[Value]()
    for place, weight in enumerate(weights):
        unit = place // of_unit
        first = 1 + unit * OPS_OF_UNIT
        behind = backward[(UNITS - unit - 1) * OPS_OF_UNIT]
        values[weight] = stretch(profile, weight, first, first + OPS_OF_UNIT - 1)
        more.append(stretch(profile, weight, behind, behind + OPS_OF_UNIT - 1))
    return msgspec.structs.replace(profile, values=(*values, *more))


def stretch(profile: Profile, weight: int, first_op: int, last_op: int) -> Value:
    begin, end = profile.op_ticks[first_op - 1] + 1, profile.op_ticks[last_op]
    names = {"name": f"{profile.values[weight].name} at {begin}", "stretch_of": weight}
    lives = {"born": first_op - 1, "born_tick": begin, "forward_death": end, "freed": end}
    return msgspec.structs.replace(profile.values[weight], **names, **lives)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return gathered(whole())


def test_it_takes_memory_in_its_stretches_alone(profile: Profile) -> None:
    weights = [number for number, value in enumerate(profile.values) if value.stretch_of >= 0]
    live = live_bytes(profile, weights, workspace=False)
    assert set(live.tolist()) == {0, 2 * WEIGHT_BYTES}
    assert (live_bytes(profile) <= live_bytes(whole())).all()


def test_on_the_cpu_each_thread_of_gloo_may_hold_the_weights_of_a_unit_beside_them(profile: Profile) -> None:
    assert in_flight_bytes(profile) == 2 * 2 * WEIGHT_BYTES
    assert in_flight_bytes(whole()) == 0
    on_cuda = msgspec.structs.replace(profile, device=Device(kind="cuda", name="test", memory_bytes=2**40))
    assert in_flight_bytes(on_cuda) == 0


def test_so_may_both_buffers_of_a_collective_of_tensor_parallelism_for_each_thread_of_gloo() -> None:
    profile = whole()
    index = next(number for number, op in enumerate(profile.ops) if op.outputs and op.inputs)
    exchange = msgspec.structs.replace(profile.ops[index], name="_c10d_functional.all_gather_into_tensor.default")
    found = msgspec.structs.replace(profile, ops=(*profile.ops[:index], exchange, *profile.ops[index + 1 :]))
    read, made = (
        sum(profile.rounded_bytes(profile.values[one].size_bytes) for one in values)
        for values in (exchange.inputs, exchange.outputs)
    )
    assert in_flight_bytes(found) == 2 * (read + made)
    assert min(read, made) > 0


def test_a_value_is_recomputed_only_where_its_first_use_finds_the_weights(profile: Profile) -> None:
    replay = Problem.of(profile).replay
    names = [profile.values[value].name.split("/")[0] for value in replay.value_of]
    reasons = dict(zip(names, replay.reasons, strict=True))
    assert not any(reason for name, reason in reasons.items() if name.startswith(("norm", "up", "gelu")))
    ends = [reason for name, reason in reasons.items() if name.startswith("down")]
    assert len(ends) == 3
    assert all("is not gathered when it is used" in reason for reason in ends)


def test_a_value_that_another_replay_may_start_from_too_early_is_not_recomputed() -> None:
    r = Recorder()
    (x,) = r.op("stem", [r.before(4096, Kind.INPUT)], [1 << 20])
    for _ in range(UNITS):  # what the activation gives is the next unit's to save
        (wide,) = r.op("up", [x, r.before(WEIGHT_BYTES)], [1 << 20], saves=[x])
        r.op("pass", [wide], [512])
        r.op("pass", [wide], [512])
        (x,) = r.op("gelu", [wide], [1 << 20], saves=[wide])
    step = gathered(r.finish(link(1.0)), 1)
    replay = Problem.of(step).replay
    names = [step.values[value].name.split("/")[0] for value in replay.value_of]
    assert {reason for name, reason in zip(names, replay.reasons, strict=True) if name.startswith("gelu")} == {""}
    ups = [reason for name, reason in zip(names, replay.reasons, strict=True) if name.startswith("up")]
    assert ["may start from it" in reason for reason in ups] == [True] * 3 + [False]  # from the last one none starts


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_plans_are_carried_out_within_their_budget(profile: Profile, share: float) -> None:
    smallest = smallest_budget(profile)
    peak_bytes = int(live_bytes(profile).max())
    found = plan(profile, int(smallest + share * (peak_bytes - smallest)), evaluations=100)
    assert check(profile, found).peak_bytes == found.prediction.peak_bytes <= found.budget_bytes


def of_whole_weights() -> Plan:
    """A plan that replays what a unit gives, as it may be where weights are whole."""
    problem = Problem.of(whole())
    names = [problem.names[value].startswith("down") for value in range(problem.value_count)]
    decisions = [Decision.RECOMPUTE if one else Decision.KEEP for one in names]
    return plan_with(whole(), fit(problem, decisions, 2**40, Style()))


def test_the_checker_and_the_planner_refuse_a_replay_outside(profile: Profile) -> None:
    made = of_whole_weights()
    check(whole(), made)
    with pytest.raises(Violation, match="which is not gathered"):
        check(profile, made)
    name = next(value.name for value in made.values if value.decision is Decision.RECOMPUTE)
    with pytest.raises(UsageError, match="is not gathered when it is used"):
        with_decisions(profile, plan(profile, "90%", evaluations=20), {name: "recompute"})


def test_no_replay_is_moved_before_the_weights_are_there(profile: Profile) -> None:
    problem = Problem.of(profile)
    uses = [point for point, one in enumerate(profile.points) if one.kind is PointKind.USE]
    value = next(place for place, name in enumerate(problem.names) if name.startswith("up2"))
    legal = [point for point in uses if may_replay_at(problem, value, point)]
    begins = problem.replay.earliest_tick[value]
    assert legal
    assert all(begins <= problem.point_tick_list[point] <= problem.first_use[value] for point in legal)
    assert uses[0] not in legal
