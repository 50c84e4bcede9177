"""Steps of one plan that take other blocks each, by turns: micro-batches, and steps that are looked at."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import poochplan
from poochplan.runtime.run_report import ArenaReport
from poochplan.runtime.session import Session
from tests.runtime.nets import CASES, equal, snapshot
from tests.runtime.served import SETTLED, Loop, arenas_mapped, needs_compiler, plain, plan_of, served

pytestmark = [pytest.mark.cpu_device, needs_compiler]


@pytest.mark.parametrize("name", ["attention", "residual"])
def test_where_every_step_is_observed_steps_are_served_as_observed_ones_are(name: str) -> None:
    with served(name, meter="always") as loop:
        for _ in range(4):
            loop.step()
            assert loop.is_served_whole, loop.arena
        assert loop.session is not None
        assert loop.session.report().last_step.peak_bytes is not None
        assert loop.session.report().total.served_bytes >= 5 * loop.arena.served_bytes
    assert equal(loop.seen, plain(name, len(loop.seen)).seen)


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


@contextmanager
def _accumulating(name: str, micro_batches: int, meter: str) -> Iterator[tuple[Accumulating, Session]]:
    loop = Accumulating(name, micro_batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that gradients are live through forward
        with poochplan.apply(plan_of(name), loop.model, arena="on", meter=meter) as session:  # type: ignore[arg-type]
            yield loop, session


@pytest.mark.parametrize("meter", ["first-steps", "always"])
@pytest.mark.parametrize("micro_batches", [2, 4, 5])
@pytest.mark.parametrize("name", ["attention", "residual"])
def test_every_micro_batch_is_served_whole_from_one_arena(name: str, micro_batches: int, meter: str) -> None:
    gc.collect()
    before = arenas_mapped()
    with _accumulating(name, micro_batches, meter) as (loop, session):
        loop.steps(6, session)
        for _ in range(4):
            loop.steps(1, session)
            assert loop.is_served_whole, loop.found
            assert arenas_mapped() == before + 1
    reference = Accumulating(name, micro_batches)
    reference.steps(10)
    assert equal(loop.seen, reference.seen)


def test_an_arena_of_several_kinds_is_no_larger_than_the_largest_of_them() -> None:
    with _accumulating("attention", 2, "never") as (loop, session):
        loop.steps(6, session)
        assert session._serving is not None
        sizes = [one.size_bytes for one in loop.found if one is not None]
        assert len(sizes) == 2
        arena = session._serving._runs.laid.arena
        assert arena is not None
        assert arena.size_bytes == max(sizes)


def test_one_step_more_or_less_in_between_changes_no_bit_and_is_served_again() -> None:
    """The last micro-batches of an epoch are fewer, so that the optimizer steps where it did not."""
    seen = []
    for is_served in (True, False):
        loop = Accumulating("attention", 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            session = poochplan.apply(plan_of("attention"), loop.model, arena="on" if is_served else "off")
            with session:
                for micro_batches in (3, 3, 3, 3, 3, 1, 3, 2, 3, 3, 3):
                    loop._micro_batches = micro_batches
                    loop.steps(1, session)
        assert loop.is_served_whole is is_served
        seen.append(loop.seen)
    assert equal(*seen)


def test_gradients_that_lie_in_the_arena_and_stay_there_cost_one_more_arena_and_no_place_for_good() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with served("attention", meter="never") as loop:
            assert isinstance(loop, Loop)
            for _ in range(SETTLED + 1):
                loop.loss_of().backward()  # its gradients are there in the step behind it
                loop.optimizer.step()
            assert loop.is_served_whole
            loop.step()
            assert loop.is_served_whole
