"""On a GPU too gradients are bitwise those of in-core training, whatever a plan decides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.sources import sources_of
from tests.depth import seeds, tries
from tests.gpu.cases import BY_DAY, CASES, WHERE, case_of, each, reference
from tests.runtime.nets import Use, either_way, equal, followed, metered_peaks, train
from tests.runtime.random_plans import held, planned, problem_of, random_plan
from tests.runtime.source_nets import casts_on

pytestmark = pytest.mark.gpu
WEIGHTS = {"mixed": (1, 2, 2), "swap": (0, 1, 0), "replay": (0, 0, 1)}
SOURCES = casts_on(WHERE)


@pytest.mark.parametrize("name", each(CASES, BY_DAY))
def test_any_decisions_give_the_gradients_of_in_core_training(name: str) -> None:
    case = case_of(name)
    profile = case.profile()
    assert profile.device.kind == WHERE.type
    steps = tries(2, 3)
    wanted = reference(case, steps)
    for kind, weights in WEIGHTS.items():
        for seed in seeds(1, 2):
            planned, report = train(case, steps, random_plan(profile, seed, weights))
            assert equal(wanted, planned), (kind, seed)
            assert report is not None
            assert report.total.fallbacks == 0, report.total.fallback_reasons
            if kind == "swap":
                assert report.last_step.out_bytes == report.last_step.in_bytes > 0


def test_a_forward_with_dropout_in_a_kernel_is_replayed_with_its_generator_state() -> None:
    case = case_of("sdpa_flash")
    profile = case.profile()
    attention = [op for op in profile.ops if "flash_attention.default" in op.name]
    assert attention
    assert all(op.random for op in attention)
    plan = random_plan(profile, 0, WEIGHTS["replay"])
    (in_core, *_), (planned, *_) = train(case, 1)[0], train(case, 1, plan)[0]
    assert torch.equal(in_core[0], planned[0])


@pytest.mark.parametrize("decision", Decision)
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_held_swapped_or_replayed_in_place_of_its_copy(name: str, decision: Decision) -> None:
    case = SOURCES[name]
    assert len(sources_of(case.profile())) >= 4
    plan, found = planned(case, held(problem_of(case), decision))
    followed(case, plan, 3, wanted=train(case, 3)[0])
    assert metered_peaks(case, plan)[1] <= found.simulation.peak_bytes


@pytest.mark.parametrize("name", each(("residual", "recurrent", "sdpa_math"), ("residual",)))
def test_the_metered_peak_is_within_the_plans_and_the_allocators_is_reported(name: str) -> None:
    case = case_of(name)
    profile = case.profile()
    smallest = smallest_budget(profile)
    for share in (0.1, 0.5)[: tries(1, 2)]:
        budget = int(smallest + share * (profile.in_core_peak_bytes - smallest))
        plan = poochplan.plan(profile, budget, time_limit_s=5, evaluations=tries(200, 20_000), on="allocated")
        assert plan.prediction.peak_bytes <= budget
        assert max(metered_peaks(case, plan)) <= plan.prediction.peak_bytes
        _, report = train(case, 3, plan)
        assert report is not None
        assert (report.memory is None) == (WHERE.type != "cuda")
        if report.memory is not None:
            assert report.total.peak_bytes is not None
            assert report.memory.reserved_bytes >= report.memory.allocated_bytes >= report.total.peak_bytes


def _backward_twice(_: object, step: Callable[[], torch.Tensor], __: object) -> None:
    loss = step()
    loss.backward(retain_graph=True)
    loss.backward()


def _an_exception_between_forward_and_backward(_: object, step: Callable[[], torch.Tensor], __: object) -> None:
    with contextlib.suppress(KeyError):
        loss = step()
        raise KeyError
    del loss
    step().backward()


@pytest.mark.parametrize("use", [_backward_twice, _an_exception_between_forward_and_backward])
@pytest.mark.parametrize("name", ["residual", "two_streams"])
def test_other_ways_through_a_step_give_the_gradients_of_in_core_training(name: str, use: Use) -> None:
    case = case_of(name)
    either_way(case, random_plan(case.profile(), 1, WEIGHTS["mixed"]), use, is_followed=False)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return CASES["residual"].profile()


def test_ops_take_time_and_add_up_to_the_step(profile: Profile) -> None:
    assert all(op.duration_s >= 0 for op in profile.ops)
    assert sum(op.duration_s for op in profile.ops) == pytest.approx(profile.times.step_s)


def test_a_profile_leaves_model_and_generators_as_they_were() -> None:
    model, step, optimizer = CASES["residual"].fresh()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    state = torch.cuda.get_rng_state(WHERE) if WHERE.type == "cuda" else torch.get_rng_state()
    poochplan.profile(step, model=model, optimizer=optimizer, iterations=1)
    after = torch.cuda.get_rng_state(WHERE) if WHERE.type == "cuda" else torch.get_rng_state()
    assert torch.equal(state, after)
    assert equal([before], [[*model.parameters(), *model.buffers()]])
    assert not optimizer.state
