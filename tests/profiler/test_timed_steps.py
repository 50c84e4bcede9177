"""What the step takes by PyTorch alone, from one arena, and without one; and which of them a plan is made of."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Memory, Profile
from poochplan.planner.arena.packing import packed
from poochplan.planner.arena.step_layout import kept_in_arena
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.whatif import for_machine
from poochplan.profiler.profiling import with_plain_again
from poochplan.report.timeline import draw_timeline, timeline_of
from poochplan.runtime.arena.library import library
from poochplan.runtime.arena.step_arena import RepeatedStep
from tests.processes import python
from tests.runtime.nets import LINK, Net, taken
from tests.runtime.served import needs_compiler

SLOWER = 1.5


def made() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A step of blocks that are large enough for an arena."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[part for _ in range(6) for part in (torch.nn.Linear(256, 256), torch.nn.GELU())])
    batch = torch.randn(512, 256)
    return model, lambda: model(batch).square().mean()


@pytest.fixture(scope="module")
def profile() -> Profile:
    model, step = made()
    return taken(step, model, iterations=3)


def with_times(profile: Profile, **times: float | None) -> Profile:
    return msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, **times))


def unserved(profile: Profile) -> Profile:
    """As if steps without an arena took half as long again."""
    return with_times(profile, unserved_step_s=SLOWER * profile.times.step_s)


@needs_compiler
def test_a_profile_has_the_step_by_pytorch_alone_and_without_an_arena(profile: Profile) -> None:
    assert profile.memory is Memory.ALLOCATED
    assert profile.times.plain_step_s is not None
    assert profile.times.unserved_step_s is not None
    assert sum(op.duration_s for op in profile.ops) == pytest.approx(profile.times.step_s, rel=0.01)


@needs_compiler
@pytest.mark.parametrize("has_arena", [True, False])
def test_in_a_loop_the_seconds_of_fresh_pages_are_not_those_of_ops(
    has_arena: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are timed in an arena. If none could be laid out, page faults are counted and subtracted."""
    if not has_arena:
        monkeypatch.setattr(RepeatedStep, "is_from_arena", False)

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            batch = (batch * net.weight).tanh()
        return batch.mean()

    model, batch = (
        Net(body, weight=torch.nn.Parameter(torch.ones(1))),
        torch.randn(40 << 18),
    )  # 40 MiB: the C library maps each such tensor afresh
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    times = poochplan.profile(step, model=model, optimizer=optimizer, backward="inside", link=LINK).times
    assert times.step_s < 0.99 * times.unserved_step_s
    assert has_arena or times.step_s >= times.unserved_step_s / 2


def test_overheads_are_beside_pytorch_alone_and_the_gap_beside_simulated_steps(profile: Profile) -> None:
    plan = poochplan.plan(profile, "70%", evaluations=50)
    assert plan.prediction.in_core_step_s == profile.times.plain_step_s
    assert plan.prediction.overhead == pytest.approx(plan.prediction.step_s / plan.prediction.in_core_step_s - 1)
    assert plan.prediction.kept_step_s <= plan.prediction.step_s * (1 + 1e-9)
    assert plan.solve.gap == pytest.approx(max(0.0, plan.prediction.step_s / plan.solve.bound_s - 1))


def test_a_plan_that_no_arena_serves_takes_as_much_longer_as_such_steps_do(profile: Profile) -> None:
    slower = unserved(profile)
    served, without = (poochplan.plan(slower, "80%", evaluations=50, arena=arena) for arena in ("on", "off"))
    assert served.holds_arena
    assert not without.holds_arena
    assert Problem.of(slower, served).profile is slower
    assert sum(op.duration_s for op in Problem.of(slower, without).profile.ops) == pytest.approx(
        SLOWER * slower.times.step_s, rel=0.01
    )
    assert without.prediction.step_s >= 0.99 * SLOWER * slower.times.step_s
    assert without.prediction.in_core_step_s == served.prediction.in_core_step_s


def test_a_plan_for_which_no_arena_was_found_has_the_bound_of_steps_from_one(profile: Profile) -> None:
    slower = unserved(profile)
    plan = poochplan.plan(slower, poochplan.smallest_budget(slower), evaluations=50)
    assert not plan.holds_arena
    assert plan.solve.bound_s < plan.prediction.kept_step_s <= plan.prediction.step_s * (1 + 1e-9)
    assert plan.solve.gap == pytest.approx(plan.prediction.step_s / plan.solve.bound_s - 1, abs=1e-9)


@needs_compiler
def test_a_budget_that_holds_the_peak_and_not_the_arena_of_everything_gives_up_a_little(profile: Profile) -> None:
    slower = unserved(profile)
    laid = kept_in_arena(slower)
    arena_bytes = laid.peak_bytes
    assert slower.in_core_peak_bytes < arena_bytes, "the claim is about what lies between"
    for budget_bytes in (slower.in_core_peak_bytes, arena_bytes - 1):
        plan = poochplan.plan(slower, budget_bytes, evaluations=50)
        assert plan.holds_arena
        assert {value.decision for value in plan.values} != {Decision.KEEP}
        assert plan.prediction.step_s < SLOWER * slower.times.step_s
        assert "everything without an arena" in plan.notes[0]
    kept = poochplan.plan(slower, arena_bytes, evaluations=50)
    assert {value.decision for value in kept.values} == {Decision.KEEP}
    assert kept.holds_arena


def test_where_giving_up_is_dearer_everything_is_kept_without_an_arena_and_the_bound_is_of_steps_from_one(
    profile: Profile,
) -> None:
    slower = for_machine(with_times(profile, unserved_step_s=1.0001 * profile.times.step_s), link="1MB/s")
    plan = poochplan.plan(slower, slower.in_core_peak_bytes, evaluations=50)
    assert {value.decision for value in plan.values} == {Decision.KEEP}
    assert not plan.holds_arena
    assert 0.00005 < plan.solve.gap < 0.00011  # of the ops alone: the runtime's own time is in both steps


def test_where_pytorch_alone_was_not_timed_the_ops_stand_in_and_every_table_says_so(profile: Profile) -> None:
    alone, without = profile, with_times(profile, plain_step_s=None)
    for one, said in ((alone, "PyTorch alone "), (without, ", PyTorch alone not timed")):
        plan = poochplan.plan(one, "80%", evaluations=50)
        assert plan.prediction.is_timed_alone is (one is alone)
        assert said in plan.rows()["predicted step"]
        assert any(said in text.get_text() for text in draw_timeline(timeline_of(one, plan)).texts)
    kept = poochplan.plan(without, "80%", evaluations=50).prediction
    assert kept.in_core_step_s == pytest.approx(sum(op.duration_s for op in without.ops))
    assert without.rows()["in-core step"].count("not timed by PyTorch alone") == 1
    assert "not timed" not in alone.rows()["in-core step"]


@needs_compiler
def test_a_step_that_swaps_is_timed_from_an_arena_and_not_by_pytorch_alone() -> None:
    model, step = made()
    profile = taken(step, model, iterations=3, mode="swap-all")
    assert profile.times.plain_step_s is None
    assert profile.times.unserved_step_s is not None  # so the pages of fresh memory are in the seconds of no op


def test_a_step_that_was_never_served_is_what_it_was_timed_as(profile: Profile) -> None:
    ordinary = with_times(profile, unserved_step_s=None)
    assert Problem.of(ordinary, has_arena=False).profile is ordinary


@pytest.mark.parametrize(("alone_s", "again_s", "found_s"), [(2.5, 1.0, 1.0), (2.5, 3.0, 2.5), (1.2, 0.1, 1.2)])
def test_a_step_by_pytorch_alone_that_took_much_longer_than_in_a_session_is_timed_again(
    profile: Profile, alone_s: float, again_s: float, found_s: float
) -> None:
    found = with_plain_again(with_times(profile, plain_step_s=alone_s, unserved_step_s=1.0), lambda: again_s)
    assert found.times.plain_step_s == found_s


def test_importing_poochplan_changes_nothing_of_the_environment() -> None:
    code = """
    import os
    for name in [name for name in os.environ if name.startswith("THP_")]:
        del os.environ[name]
    before = dict(os.environ)
    import poochplan, torch
    print(dict(os.environ) == before)
    """
    assert python(code, is_fresh=True).strip() == "True"


# -- a step that is repeated ----------------------------------------------------------------------------------------


@needs_compiler
def test_a_repeated_step_is_served_whole_from_its_second_run_on_and_keeps_its_bits() -> None:
    model, step = made()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        step().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected, arena = gradients(), RepeatedStep(packed)
    served = []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        with arena.run():
            found = gradients()
        served.append(arena.is_from_arena)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert served[0] is False
    assert served[-1] is True
    arena.close()


@needs_compiler
def test_a_closed_one_gives_its_memory_back_once_nothing_lies_in_it() -> None:
    before, arena = library().arenas_mapped(), RepeatedStep(packed)
    for number in range(3):
        with arena.run():
            kept = torch.ones(1 << 20)
            if number < 2:
                del kept
    assert library().arenas_mapped() == before + 1
    arena.close()
    assert bool(kept.eq(1).all())
    del kept
    assert library().arenas_mapped() == before


def test_a_step_that_takes_other_blocks_each_time_is_not_served_and_has_its_bits() -> None:
    arena = RepeatedStep(packed)
    for number in range(1, 8):
        with arena.run():
            made = torch.full((number * 10_000,), float(number))
            total = (made * 2).sum()
        assert total == 2.0 * number * number * 10_000
        assert not arena.is_from_arena
    arena.close()
