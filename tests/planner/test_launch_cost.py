"""The launching thread in the simulated step: what it takes is paid for where the semantics say, and decided by."""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec
import pytest

from poochplan.formats.occupancy import ints
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Phase, Profile, RuntimeCost
from poochplan.planner.planning import plan
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, Style, keep_all, recording_for, recording_of
from poochplan.planner.simulator.simulate import least_step_s, simulate, swap_all
from poochplan.planner.whatif import for_machine
from tests.depth import tries
from tests.planner.plans import problems_of, random_decisions, random_tuning
from tests.planner.random_profiles import (
    Recorder,
    link,
    random_profile,
    resnet_like,
    transformer_like,
    with_random_thread,
)
from tests.planner.tiny_profiles import tiny_budget, tiny_profile

NOTHING = RuntimeCost(handle_s=0.0, swap_s=0.0, record_s=0.0)
SWAP, RECOMPUTE = Decision.SWAP, Decision.RECOMPUTE
Kind = Literal["cpu", "cuda"]


def costed(profile: Profile, kind: Kind, **costs: Any) -> Profile:
    device = msgspec.structs.replace(profile.device, kind=kind)
    return msgspec.structs.replace(profile, device=device, runtime=msgspec.structs.replace(NOTHING, **costs))


def step_s(profile: Profile, schedule: Schedule | None = None) -> float:
    problem = Problem.of(profile)
    return simulate(problem, schedule or keep_all(problem)).step_s


def chain(*seconds: float) -> Profile:
    """Ops of the given seconds, each of which saves its input; backward takes as long again."""
    r = Recorder()
    x = r.before(512)
    for each in seconds:
        (x,) = r.op("op", [x], [4096], saves=[x], seconds=each, backward_s=each)
    return r.finish(link(1.0))


# -- ahead of a device: an op starts when it is launched and the device is free ---------------------


def test_an_op_waits_for_its_launch() -> None:
    """Ten ops of 1 s, a handle each: with 3 s a pack the thread is behind from the second op of forward on."""
    profile = chain(*[1.0] * 10)
    pinned = Problem.of(profile)
    assert step_s(costed(profile, "cuda", handle_s=0.9, launch_s=0.0)) == pytest.approx(20 + 0.9)  # the first pack
    found = simulate(Problem.of(costed(profile, "cuda", handle_s=3.0)), keep_all(pinned))
    assert found.step_s == pytest.approx(10 * 3.0 + 11)  # all packs one after another, then what is left to compute
    assert found.runtime_s == pytest.approx(found.step_s - 20)
    assert step_s(costed(profile, "cuda", handle_s=3.0, launch_s=0.5)) == pytest.approx(10 * 3.5 - 0.5 + 11)


def test_in_core_the_thread_reaches_no_op_after_it_has_begun() -> None:
    """So long ops give it a lead, which launches of the short ones behind them use up."""
    found = Problem.of(costed(chain(0.1, 0.1, 4.0), "cuda", launch_s=0.5)).launch_cost
    assert found.launch_s.tolist() == pytest.approx([0.1, 0.1, 0.5, 0.5, 0.5, 0.5])
    of_phases = costed(chain(0.1, 0.1, 4.0), "cuda", launch_s=0.5, phase_launch_s={Phase.BACKWARD: 1.0})
    assert Problem.of(of_phases).launch_cost.launch_s.tolist() == pytest.approx([0.1, 0.1, 0.5, 1.0, 1.0, 1.0])
    of_phases = costed(chain(0.1, 0.1, 4.0), "cuda", phase_launch_s={Phase.FORWARD: 1.0, Phase.BACKWARD: 9.0})
    assert Problem.of(of_phases).launch_cost.launch_s.tolist() == pytest.approx([0.1, 0.1, 1.0, 7.0, 0.1, 0.1])


COSTS = ("launch_s", "handle_s", "swap_s", "record_s", "drop_s", "replay_s")


@pytest.mark.parametrize("what", COSTS)
def test_each_cost_of_the_thread_is_in_the_predicted_step(what: str) -> None:
    profile = transformer_like()
    typical_s = sum(op.duration_s for op in profile.ops) / len(profile.ops)
    costs: dict[str, Any] = dict.fromkeys(COSTS, typical_s / 2) | {"unpack_s": typical_s / 4, "fetch_s": typical_s / 4}
    problem = Problem.of(costed(profile, "cuda", **costs))
    schedule = fit(problem, random_decisions(problem, 0), 0, Style(release="early"))
    assert {SWAP, RECOMPUTE} <= {*schedule.decisions}
    before_s = simulate(problem, schedule).step_s
    more = {what: costs[what] * 20}
    assert step_s(costed(profile, "cuda", **costs | more), schedule) > before_s
    if what == "launch_s":
        of_backward = costed(profile, "cuda", **costs, phase_launch_s={Phase.BACKWARD: more[what]})
        assert step_s(of_backward, schedule) > before_s


@pytest.mark.parametrize(("handle_s", "says"), [(0.01, False), (3.0, True)])
def test_a_plan_says_when_its_step_is_bound_by_launching(handle_s: float, says: bool) -> None:
    profile = costed(chain(*[1.0] * 10), "cuda", handle_s=handle_s)
    found = plan(profile, profile.in_core_peak_bytes, evaluations=50)
    assert any(note.startswith("its step is bound by launching: in ") for note in found.notes) == says


def test_the_in_core_step_is_the_measured_one_however_slow_launches_are() -> None:
    for seed, profile, _ in problems_of(lambda seed: random_profile(seed, 20), tries(20, 200)):
        problem = Problem.of(costed(profile, "cuda", launch_s=10 ** random.Random(seed).uniform(-6, 0)))
        assert simulate(problem, keep_all(problem)).step_s == pytest.approx(problem.in_core_s, rel=1e-12)


def test_waits_for_copies_do_not_hold_the_thread() -> None:
    """With copies of 100 s the device waits; the thread's seconds are over long before, and cost nothing."""
    profile = msgspec.structs.replace(chain(1, 1, 1, 1), link=link(4096 / 100 / 1e9))
    problem = Problem.of(costed(profile, "cuda", swap_s=1.0, fetch_s=0.5))
    schedule = fit(problem, swap_all(problem), 0, Style(release="early"))
    assert simulate(problem, schedule).step_s == pytest.approx(step_s(profile, schedule))
    assert step_s(costed(profile, "cpu", swap_s=1.0, fetch_s=0.5), schedule) > step_s(profile, schedule) + 0.5


# -- in any schedule -------------------------------------------------------------------------------


def test_no_step_is_shorter_than_the_one_that_keeps_all_or_than_its_replays() -> None:
    waited = 0
    for seed in range(tries(200, 2000)):
        profile = with_random_thread(tiny_profile(seed), seed)
        problem, budget = Problem.of(profile), tiny_budget(profile, seed)
        schedule = fit(problem, random_decisions(problem, seed), budget, tuning=random_tuning(problem, seed))
        found = simulate(problem, schedule).step_s
        assert simulate(problem, keep_all(problem)).step_s == pytest.approx(problem.keep_all_s, rel=1e-12)
        assert least_step_s(problem, schedule.decisions) <= found * (1 + 1e-12)
        waited += problem.keep_all_s > problem.in_core_s
    assert waited > 50


def test_recording_windows_are_those_of_all_that_is_needed_together() -> None:
    for seed, _, problem in problems_of(lambda seed: random_profile(seed, 40), tries(60, 600)):
        wish = random_decisions(problem, seed)
        replays = [problem.replay.replays[value] for value, one in enumerate(wish) if one is RECOMPUTE]
        ops = {op for replay in replays if replay is not None for op in replay.ops}
        save_ops = [problem.point_ops[point] for point in problem.save_points]
        assert recording_of(problem, wish) == recording_for(ints(sorted(problem.replay.to_record(ops))), ints(save_ops))


# -- decisions and bound ---------------------------------------------------------------------------


def test_what_costs_the_thread_more_than_it_saves_is_decided_otherwise() -> None:
    """Two values of which either must leave: one is swapped, unless that takes longer than to recompute it."""
    r = Recorder()
    (x,) = r.op("make", [r.before(512)], [10**6], seconds=1, backward_s=1)
    (y,) = r.op("use", [x], [512], saves=[x], seconds=1, backward_s=1)
    r.op("big", [y], [512], saves=[y], seconds=1, backward_s=1, workspace_bytes=5 * 10**6)
    profile, budget = r.finish(link(1.0)), int(5.5e6)
    for kind, swap_s, wanted in (("cpu", 0.5, SWAP), ("cpu", 2.0, RECOMPUTE)):
        made = plan(costed(profile, kind, swap_s=swap_s), budget, evaluations=200)  # type: ignore[arg-type]
        assert made.values[0].decision is wanted
        assert made.prediction.runtime_s == pytest.approx(0.5 if wanted is SWAP else 0)
        assert made.prediction.overhead == pytest.approx(made.prediction.step_s / step_s(profile) - 1)


def test_without_a_thread_nothing_is_otherwise() -> None:
    profile = transformer_like()
    for kind in ("cpu", "cuda"):
        same = [plan(one, "60%", evaluations=200) for one in (profile, costed(profile, kind))]  # type: ignore[arg-type]
        assert same[0].values == same[1].values
        assert same[0].schedule == same[1].schedule
        assert same[0].prediction.step_s == pytest.approx(same[1].prediction.step_s, rel=1e-12)


# -- profiles --------------------------------------------------------------------------------------


def test_of_a_device_that_was_not_measured_it_is_not_known() -> None:
    assert for_machine(costed(resnet_like(), "cpu", handle_s=1.0), compute_scale=0.5).runtime is None
