"""Loops that are not the same step over and over, and sessions that are to have an arena or cannot."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan import sessions
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.planner.arena.packing import packed
from poochplan.runtime.arena import library
from poochplan.runtime.run_report import ArenaReport
from poochplan.runtime.session import Session
from tests.runtime.nets import CASES, Attention, Case, equal, in_core, snapshot, train
from tests.runtime.served import SETTLED, Loop, arenas_mapped, follow, needs_compiler, plan_of, served

pytestmark = pytest.mark.cpu_device


@needs_compiler
def test_what_an_optimizer_keeps_never_lies_in_the_arena() -> None:
    loop, reference = (Loop(CASES["attention"], torch.optim.SGD, lr=1e-2, momentum=0.9) for _ in range(2))
    with poochplan.apply(plan_of("attention"), loop.model, arena="on") as loop.session:
        loop.steps(7)
        assert loop.is_served_whole, loop.arena
    torch.manual_seed(1)
    reference.steps(7)
    assert equal(loop.seen, reference.seen)


@needs_compiler
def test_another_plan_gets_another_arena_and_the_first_ones_is_found_again() -> None:
    loop = Loop(CASES["attention"])
    first, second = plan_of("attention", "mixed"), plan_of("attention", "keep")
    with poochplan.apply(first, loop.model, arena="on") as session:
        loop.session = session
        sizes = []
        for plan in (first, second, first):
            follow(session, plan)
            loop.steps(SETTLED if len(sizes) < 2 else 2)
            assert loop.is_served_whole, loop.arena
            sizes.append(loop.arena.size_bytes)
    assert sizes[0] == sizes[2] != sizes[1]


@needs_compiler
def test_two_sessions_on_two_threads_are_served_each_from_its_own() -> None:
    plan, sizes = plan_of("attention"), []
    barrier = threading.Barrier(2)

    def train() -> None:
        loop = Loop(CASES["attention"])
        barrier.wait()
        with poochplan.apply(plan, loop.model, arena="on", meter="never") as loop.session:
            for _ in range(10):
                barrier.wait()
                loop.optimizer.zero_grad(set_to_none=True)
                loop.loss_of().backward()
                loop.optimizer.step()
            sizes.append((loop.arena.size_bytes, loop.arena.served, loop.is_served_whole))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with served("attention", plan) as alone:
        assert sizes == [(alone.arena.size_bytes, alone.arena.served, True)] * 2


@needs_compiler
def test_steps_of_smaller_inputs_under_the_same_plan_are_served_from_places_of_their_own() -> None:
    model = Attention()
    plans = PlanSet(plans=(plan_of("attention"),))
    with poochplan.apply(plans, model, arena="on", meter="never") as session:
        sizes = []
        for lengths in ((24, 24, 24), (12, 12, 12), (24, 12), (24,)):
            for length in lengths:
                _step_of(model, length)
            found = session.report().arena
            assert found is not None
            assert found.served > 20
            assert not found.unplanned + found.taken
            sizes.append(found.size_bytes)
        assert sizes[0] == sizes[3] > sizes[1] == sizes[2]
        assert session.report().total.fallbacks == 0


@needs_compiler
def test_a_shape_that_came_once_is_not_served_and_its_log_costs_nothing() -> None:
    model = Attention()
    with poochplan.apply(PlanSet(plans=(plan_of("attention"),)), model, arena="on", meter="never") as session:
        for length in (24, 24, 24, 12):
            _step_of(model, length)
        assert session.report().arena is None
        _step_of(model, 24)
        found = session.report().arena
        assert found is not None
        assert found.served > 20
        assert not found.unplanned + found.taken


@needs_compiler
def test_where_steps_go_on_to_differ_from_what_was_learned_the_arena_is_given_up() -> None:
    model = Attention()
    with poochplan.apply(plan_of("attention"), model, arena="on", meter="never") as session:
        for _ in range(SETTLED):
            _step_of(model, 24)
        assert session.report().arena is not None
        for _ in range(2):
            hook = model.register_forward_hook(lambda *_: [torch.empty(5000 + size) for size in range(300)] and None)
            _step_of(model, 24)
            hook.remove()
        assert session.report().total.fallbacks == 0
        assert session.report().arena is None


def _step_of(model: torch.nn.Module, length: int) -> None:
    tokens = torch.randint(0, 50, (3, length))
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    model.zero_grad(set_to_none=True)


# -- where there can be none -------------------------------------------------------------------------------------


def _without_layout() -> Plan:
    return msgspec.structs.replace(plan_of("attention"), layout=None)


@pytest.mark.parametrize("what", ["compiler", "layout"])
def test_an_arena_that_cannot_be_is_one_line_and_auto_goes_on_without(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, reason = plan_of("attention"), "a plan without a layout; plan again"
    if what == "layout":
        plan = _without_layout()
    else:
        reason = "no C++ compiler; install one"
        monkeypatch.setattr(library, "_library", None)
        monkeypatch.setattr(library, "_failure", reason)
    loop = Loop(CASES["attention"])
    with pytest.raises(UsageError) as told:
        poochplan.apply(plan, loop.model, arena="on")
    assert str(told.value) == f'arena: "on" is not possible: {reason}; take "auto" to train without an arena'
    with poochplan.apply(plan, loop.model) as session:
        loop.steps(SETTLED + 1)
        assert session.report().arena is None
        assert session.report().total.fallbacks == 0


def test_auto_does_not_use_an_arena_above_the_budget() -> None:
    plan = plan_of("attention")
    assert plan.prediction.arena_peak_bytes is not None
    plan = msgspec.structs.replace(plan, budget_bytes=plan.prediction.arena_peak_bytes - 1)
    loop = Loop(CASES["attention"])
    with poochplan.apply(plan, loop.model) as session:
        loop.steps(SETTLED + 1)
        assert session.report().arena is None


@needs_compiler
def test_one_that_is_learned_to_be_larger_than_there_is_room_for_is_not_used_and_told() -> None:
    plan = plan_of("attention")
    found = plan.prediction
    assert found.arena_bytes is not None
    assert found.arena_peak_bytes is not None
    tight = msgspec.structs.replace(found, arena_bytes=4096, arena_peak_bytes=1 << 20)
    plan = msgspec.structs.replace(plan, prediction=tight, budget_bytes=1 << 20)
    loop = Loop(CASES["attention"])
    with poochplan.apply(plan, loop.model) as loop.session:
        loop.steps(7)
        report = loop.session.report()
    assert report.arena is not None
    assert report.arena.larger_bytes > 0
    assert report.arena.served == 0
    assert "not used" in str(report)


@needs_compiler
@pytest.mark.parametrize("smaller", [(5,), (5, 6, 8), (1, 3, 5, 7, 9)])
def test_batches_of_another_size_in_between_have_the_bits_of_in_core_training(smaller: tuple[int, ...]) -> None:
    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.LayerNorm(64))
        batch = torch.randn(1024, 64)
        return model, lambda model: model(batch[: 700 if next(numbers) in smaller else 1024]).square().mean()

    numbers: Iterator[int] = itertools.repeat(-1)
    case = Case(make)
    plan = poochplan.plan(case.profile(), "90%", evaluations=50)
    numbers = itertools.count()
    reference = in_core(case, 11)
    numbers = itertools.count()
    assert equal(train(case, 11, plan, arena="on")[0], reference)


def _apart_where_there_is_room(blocks: Sequence[tuple[int, int, int]], room_bytes: int) -> tuple[Sequence[int], int]:
    """Every block in a place of its own, or packed where that is larger than the room."""
    ends = list(itertools.accumulate((-(-size_bytes // 512) * 512 for *_, size_bytes in blocks), initial=0))
    return (ends[:-1], ends[-1]) if ends[-1] <= room_bytes else packed(blocks, room_bytes)


@needs_compiler
@pytest.mark.parametrize("grown_bytes", [0, 1 << 17], ids=["as planned", "more beside it"])
def test_what_grows_beside_a_step_makes_its_arena_smaller(grown_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PLANNER", sessions.PLANNER._replace(pack=_apart_where_there_is_room))
    plan = plan_of("attention")
    with served("attention", plan) as loop:
        loop.step()
        assert loop.session is not None
        taken_bytes = loop.session.report().last_step.peak_bytes
        apart_bytes = loop.arena.size_bytes
    assert taken_bytes is not None
    plan = msgspec.structs.replace(plan, budget_bytes=taken_bytes + (1 << 16))
    beside = torch.zeros(grown_bytes, dtype=torch.uint8)
    loop = Loop(CASES["attention"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with poochplan.apply(plan, loop.model) as loop.session:
            loop.steps(2 * SETTLED)
            report = loop.session.report()
    said = [
        str(one.message) for one in told if "from a smaller arena from now on, within the budget" in str(one.message)
    ]
    assert beside.nbytes == grown_bytes  # it has lived until here
    assert report.last_step.peak_bytes is not None
    assert report.last_step.peak_bytes <= plan.budget_bytes
    assert loop.is_served_whole
    assert (loop.arena.size_bytes < apart_bytes) == bool(grown_bytes)
    assert len(said) == bool(grown_bytes)


class Accumulating:
    """A loop of steps of several micro-batches. State: what it saw, and what the arena did of each micro-batch."""

    def __init__(self, name: str, micro_batches: int) -> None:
        self.model, self.loss_of, _ = CASES[name].fresh()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen: list[list[torch.Tensor]] = []
        self.found: list[ArenaReport | None] = []
        self._micro_batches = micro_batches
        torch.manual_seed(1)

    def steps(self, count: int, session: Session | None = None) -> None:
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            self.found.clear()
            for number in range(self._micro_batches):
                loss = self.loss_of()
                loss.backward()
                if number == self._micro_batches - 1:
                    self.seen.append(snapshot(self.model, loss))
                    self.optimizer.step()
                if session is not None:
                    self.found.append(session.report().arena)

    @property
    def is_served_whole(self) -> bool:
        """Whether each micro-batch of the last step was."""
        return all(one is not None and one.served > 0 and not one.unplanned + one.taken for one in self.found)


@needs_compiler
@pytest.mark.parametrize("meter", ["first-steps", "always", "never"])
def test_micro_batches_are_served_whole_from_one_arena_as_large_as_the_largest_and_changes_cost_no_bit(
    meter: Any,
) -> None:
    """The last micro-batches of an epoch are fewer, so that the optimizer steps where it did not."""
    gc.collect()
    before = arenas_mapped()
    seen = []
    for is_served in (True, False):
        loop = Accumulating("attention", 3)
        session = poochplan.apply(plan_of("attention"), loop.model, arena="on" if is_served else "off", meter=meter)
        with session:
            for micro_batches in (3, 3, 3, 3, 3, 1, 3, 2, 3, 3, 3):
                loop._micro_batches = micro_batches
                loop.steps(1, session)
            if is_served:
                assert arenas_mapped() == before + 1
                assert session._step_arena is not None
                arena = session._step_arena._runs.arena
                assert arena is not None
                assert arena.size_bytes == max(one.size_bytes for one in loop.found if one is not None)
        assert loop.is_served_whole is is_served
        seen.append(loop.seen)
    assert equal(*seen)


@needs_compiler
def test_gradients_that_lie_in_the_arena_and_stay_there_cost_one_more_arena_and_no_place_for_good() -> None:
    with served("attention", meter="never") as loop:
        assert isinstance(loop, Loop)
        for _ in range(SETTLED + 1):
            loop.loss_of().backward()  # its gradients are there in the step behind it
            loop.optimizer.step()
        assert loop.is_served_whole
        loop.step()
        assert loop.is_served_whole


@needs_compiler
def test_a_block_that_is_kept_where_others_died_is_in_no_ones_way_once_its_step_is_laid_out_again() -> None:
    """As LBFGS keeps a direction: which of its closures was recorded tells whether the vector dies with the step."""
    model, loss_of, _ = CASES["attention"].fresh()
    kept, found = list[torch.Tensor](), list[ArenaReport]()
    with poochplan.apply(plan_of("attention"), model, arena="on") as session:
        for _ in range(2 * SETTLED):
            model.zero_grad(set_to_none=True)
            loss_of().backward()
            is_served = session.arena is not None and session.arena.served > 0
            behind = torch.zeros(20_000)
            if is_served and not kept:
                kept += [behind, torch.zeros(30_000)]  # the second one has no place, so the step is laid out again
            del behind
            if session.arena is not None:
                found.append(session.arena)
    assert [one.unplanned for one in found[:2]] == [1, 0]
    assert len(found) > SETTLED
    assert not any(one.taken for one in found)
