"""The independent checkers carry any plan out, and see the bytes and the seconds that were predicted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poochplan.formats.plan import Decision, Plan, Prediction
from poochplan.formats.profile import Profile
from poochplan.planner.planning import plan
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import AS_STYLED, Style
from poochplan.planner.simulator.simulate import simulate
from tests.depth import seeds, tries
from tests.planner.checker import Violation, check
from tests.planner.plans import assert_judged, budget_at, plan_with, problems_of, random_decisions, random_tuning
from tests.planner.random_profiles import (
    QUICK,
    profiles,
    profiles_with_thread,
    random_profile,
    transformer_like,
    with_random_thread,
)
from tests.planner.test_gathered import gathered, whole
from tests.planner.time_checker import WrongTime, check_times

TIMES = ("step_s", "stall_s", "replay_s", "interference_s", "runtime_s")


def random_step(seed: int) -> Profile:
    """A random step that has something to plan; the copies of every third are held to a rate, and of every second it is
    known what the launching thread takes.
    """
    profile = next(problems_of(lambda number: random_profile(seed + 1_000_003 * number, 20), 1))[1]
    throttle = 0.5 * profile.link.outward.bandwidth_bytes_per_s if seed % 3 == 0 else None
    profile = msgspec.structs.replace(
        profile, link=msgspec.structs.replace(profile.link, throttle_bytes_per_s=throttle)
    )
    return with_random_thread(profile, seed) if seed % 2 else profile


def any_schedule(profile: Profile, seed: int) -> tuple[Plan, Prediction]:
    """A plan that nobody would make, with what the simulator says of it."""
    problem = Problem.of(profile)
    tuning = random_tuning(problem, seed)
    schedule = fit(problem, random_decisions(problem, seed), budget_at(profile, 0.5), tuning=tuning)
    made = plan_with(profile, schedule)
    found, traced = (simulate(problem, schedule, trace=trace) for trace in (False, True))
    times = {name: getattr(found, name) for name in TIMES}
    assert found.step_s == pytest.approx(problem.in_core_s + sum(times[part] for part in TIMES[1:]), rel=1e-9)
    assert max(span.end_s for span in traced.trace) == pytest.approx(found.step_s, rel=1e-9)
    assert sum(wait.seconds for wait in found.waits) == pytest.approx(found.stall_s)
    assert traced.step_s == pytest.approx(found.step_s, rel=1e-9)
    return made, msgspec.structs.replace(made.prediction, **times)


def test_the_prediction_of_any_schedule_is_the_time_it_takes() -> None:
    lost = dict.fromkeys(TIMES, 0)
    for seed in range(tries(day=150, deep=3000)):
        profile = random_step(seed)
        made, prediction = any_schedule(profile, seed)
        check_times(profile, made, prediction)
        for name in TIMES:
            lost[name] += getattr(prediction, name) > 0
    assert min(lost.values()) > 20  # the cases stall, replay and are slowed


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("factor", [1 + 1e-6, 1 - 1e-6])
def test_a_prediction_that_is_off_by_a_millionth_is_found(name: str, factor: float) -> None:
    off = 0
    for seed in seeds(day=20, deep=200):
        profile = random_step(seed)
        made, prediction = any_schedule(profile, seed)
        if getattr(prediction, name) > 0.01 * prediction.step_s:
            wrong = msgspec.structs.replace(prediction, **{name: factor * getattr(prediction, name)})
            with pytest.raises(WrongTime, match=name):
                check_times(profile, made, wrong)
            off += 1
    assert off > 0


FORGOTTEN = {
    "latency": lambda link: msgspec.structs.replace(link, outward=msgspec.structs.replace(link.outward, latency_s=0.0)),
    "bandwidth inward": lambda link: msgspec.structs.replace(
        link, inward=msgspec.structs.replace(link.inward, bandwidth_bytes_per_s=1e15)
    ),
    "duplex": lambda link: msgspec.structs.replace(link, duplex=1.0),
    "interference out": lambda link: msgspec.structs.replace(link, interference_out=0.0),
    "interference in": lambda link: msgspec.structs.replace(link, interference_in=0.0),
    "throttle": lambda link: msgspec.structs.replace(link, throttle_bytes_per_s=None),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_simulator_that_forgot_a_property_of_the_link_is_found(what: str) -> None:
    steps = ((seed, random_step(seed)) for seed in range(300))
    assert any(takes_another_time(one, seed, link=FORGOTTEN[what](one.link)) for seed, one in steps)


def takes_another_time(profile: Profile, seed: int, **forgotten: Any) -> bool:
    """Whether a schedule takes another time than is predicted for the profile with these fields."""
    try:
        check_times(profile, *any_schedule(msgspec.structs.replace(profile, **forgotten), seed))
    except WrongTime:
        return True
    return False


TAKEN = ("handle_s", "swap_s", "record_s", "drop_s", "replay_s", "unpack_s", "fetch_s")
TAKEN_ON = [*((what, kind) for what in TAKEN for kind in ("cpu", "cuda")), ("launch_s", "cuda")]
"""On the CPU an op's duration holds its launch."""


@pytest.mark.parametrize(("what", "kind"), TAKEN_ON)
def test_a_simulator_that_forgot_what_the_thread_takes_is_found(what: str, kind: str) -> None:
    without = {what: 0.0} | {"handle_s": {"unpack_s": 0.0}, "swap_s": {"fetch_s": 0.0}}.get(what, {})
    steps = ((seed, random_step(seed)) for seed in range(1, 600, 2))
    assert any(
        takes_another_time(one, seed, runtime=msgspec.structs.replace(one.runtime, **without))
        for seed, one in steps
        if one.device.kind == kind and one.runtime is not None and getattr(one.runtime, what)
    )


STYLES = [Style(), Style(in_order=False), Style(release="early"), Style(release="early", prefetch="on_demand")]


@settings(QUICK, max_examples=tries(20, 500))
@given(profile=profiles_with_thread(), share=st.floats(0.0, 1.0))
def test_a_plan_for_any_feasible_budget_fits_it_and_finds_every_input(profile: Profile, share: float) -> None:
    budget = budget_at(profile, share)
    found = plan(profile, budget, evaluations=100)
    verdict = check_times(profile, found, found.prediction)
    assert max(verdict.peak_bytes, verdict.first_step_peak_bytes) <= budget
    assert verdict.peak_bytes == found.prediction.peak_bytes
    assert verdict.first_step_peak_bytes == found.prediction.first_step_peak_bytes
    assert (verdict.out_bytes, verdict.in_bytes) == (found.prediction.out_bytes, found.prediction.in_bytes)
    assert verdict.host_slab_bytes <= found.prediction.host_bytes


@settings(QUICK, max_examples=tries(100, 2000))
@given(
    profile=st.one_of(profiles(30), profiles_with_thread(30), st.just(gathered(whole()))),
    seed=st.integers(0, 2**32),
    style=st.sampled_from(STYLES),
    is_tuned=st.booleans(),
    share=st.floats(0.4, 1.0),
)
def test_any_decisions_can_be_scheduled_and_their_simulated_bytes_are_exact(
    profile: Profile, seed: int, style: Style, is_tuned: bool, share: float
) -> None:
    """In any style, and as any tuning has them carried out; replays find the weights that FSDP2 gathers."""
    problem = Problem.of(profile)
    tuning = random_tuning(problem, seed) if is_tuned else AS_STYLED
    schedule = fit(problem, random_decisions(problem, seed), int(share * profile.in_core_peak_bytes), style, tuning)
    simulation = simulate(problem, schedule, trace=True)
    assert_judged(profile, schedule, simulation)
    assert simulation.step_s >= problem.step_s


def test_the_checker_sees_a_missing_replay_input_a_missing_record_and_an_early_release() -> None:
    profile = transformer_like(2, link_gb_per_s=0.5)
    found = plan(profile, "50%", evaluations=100)
    decisions = [value.decision for value in found.values]
    assert Decision.RECOMPUTE in decisions
    assert Decision.SWAP in decisions
    for without in ({"replay": ()}, {"record": ""}, {"prefetch": ()}, {"swap_out": ()}):
        broken = tuple(msgspec.structs.replace(action, **without) for action in found.schedule)  # type: ignore[arg-type]
        with pytest.raises(Violation):
            check(profile, msgspec.structs.replace(found, schedule=broken, record_from_start=False))
