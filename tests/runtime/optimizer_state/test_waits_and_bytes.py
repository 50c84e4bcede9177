"""What is on the device, and when; and no wait of it can go: without any single one of them something here differs."""

from __future__ import annotations

import ctypes
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import poochplan
from poochplan import guard
from poochplan.runtime.arena.library import why_unavailable
from poochplan.runtime.metering.allocated import joined_count
from poochplan.runtime.optimizer_state import places, steps
from poochplan.runtime.optimizer_state.steps import Visits
from tests.runtime.adversarial import POISON, AdversarialDevice, LazyJob, OpClock
from tests.runtime.mutants import Mutant, mutants_of, rewritten
from tests.runtime.optimizer_state.trainings import SIDE, Training, chunks, contents, planned

pytestmark = [
    pytest.mark.cpu_device,
    pytest.mark.skipif(bool(why_unavailable()), reason="nothing counts torch's bytes here"),
]
MOMENT_BYTES = 4 * SIDE * SIDE
CHUNK_BYTES = 2 * MOMENT_BYTES
"""Both moments of a layer's weight; those of its bias stay."""
STATE = chunks(12, 2, kept=(5,))
"""One layer a chunk; that of the norm has no large state."""
MUTANTS = mutants_of(places, steps, calls=("wait", "settle", "arrive", "finish", "synchronize"))
SMALL_BYTES = 16 << 10


class Lagging(AdversarialDevice):
    """As on a GPU, the thread sees what was copied to the host only once it has waited for all queued work."""

    def __init__(self, clock: OpClock, **faults: int) -> None:
        super().__init__(clock, **faults)
        self._unseen: list[tuple[int, bytes]] = []

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> LazyJob:
        job, size_bytes = super().copy_out(storage, host_offset), storage.nbytes()
        run = job.run

        def runs() -> None:
            run()
            for host, _ in [] if job.error else self.host_parts(host_offset, size_bytes):
                self._unseen.append((host_offset, bytes(host)))
                ctypes.memset(host, POISON, size_bytes)

        job.run = runs  # type: ignore[method-assign]
        return job

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> LazyJob:
        job = super().copy_in(storage, host_offset)
        run = job.run

        def runs() -> None:
            self._seen()
            run()

        job.run = runs  # type: ignore[method-assign]
        return job

    def synchronize(self) -> None:
        super().synchronize()
        self._seen()

    def _seen(self) -> None:
        for offset, content in self._unseen:
            for host, count in self.host_parts(offset, len(content)):
                ctypes.memmove(host, content, count)
        self._unseen.clear()


class LiveBytes(TorchDispatchMode):
    """Notes the live bytes before each op."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(live_bytes())
        return func(*args, **(kwargs or {}))


def live_bytes() -> int:
    count = joined_count()
    assert count is not None
    return int(count.live_bytes)


def one_by_one(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


class Metered:
    """A training that notes the live bytes between steps, and before each op of the optimizer."""

    def __init__(self) -> None:
        self.training = Training(one_by_one)
        self.training.steps(1)
        self.training.optimizer.zero_grad()
        self.between: list[int] = []
        self.within: list[list[int]] = []
        self.bits: list[list[bytes]] = []
        self._began_bytes = live_bytes()

    def step(self, *, raises: bool = False) -> None:
        training = self.training
        loss = training.loss()
        self.bits.append(contents(training.optimizer))
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        state = training.moments(6)
        right = state["exp_avg_sq"]
        if raises:
            state["exp_avg_sq"] = torch.ones(SIDE + 1, SIDE + 1)
        with LiveBytes() as mode:
            try:
                training.optimizer.step()
            except RuntimeError:
                assert raises
            state["exp_avg_sq"] = right
            del right
        self.within.append([one - self._began_bytes for one in mode.found])
        training.optimizer.zero_grad()
        self.between.append(live_bytes() - self._began_bytes)
        self.bits.append(contents(training.optimizer))

    @property
    def bytes(self) -> list[Any]:
        return [self.between, self.within]


def test_between_steps_the_streamed_state_takes_nothing_and_within_them_three_chunks() -> None:
    found = {}
    for plan in (None, planned(state=STATE)):
        metered = Metered()
        if plan is None:
            for _ in range(3):
                metered.step()
        else:
            with poochplan.apply(plan, metered.training.model, metered.training.optimizer, quiet=True, meter="never"):
                for _ in range(3):
                    metered.step()
        found[plan is not None] = metered
    plain, streamed = found[False], found[True]
    assert plain.bits == streamed.bits
    for before, now in zip(plain.between, streamed.between, strict=True):
        assert abs(before - 5 * CHUNK_BYTES - now) < SMALL_BYTES
    gradient_bytes = 5 * MOMENT_BYTES
    for between, within in zip(streamed.between, streamed.within, strict=True):
        window_bytes = max(within) - between - gradient_bytes
        assert 3 * CHUNK_BYTES <= window_bytes < 3 * CHUNK_BYTES + 2 * MOMENT_BYTES + SMALL_BYTES


# -- mutants ---------------------------------------------------------------------------------------------------------


def _trains(metered: Metered) -> None:
    for _ in range(3):
        metered.step()


def _raises(metered: Metered) -> None:
    metered.step()
    metered.step(raises=True)
    metered.step()


def _fails(metered: Metered) -> None:
    """Something of ours fails amid the step, so that all state comes back."""
    metered.step()
    calls = list[int]()

    def leave(self: Visits, part: Any, own: Any = Visits.leave) -> None:
        own(self, part)
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("of ours")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "RAISES", False)
        patch.setattr(Visits, "leave", leave)
        metered.step()
    metered.step()


def _full(metered: Metered) -> None:
    """The first copies out fail."""
    _trains(metered)


def _lost(metered: Metered) -> None:
    """The first copies in fail."""
    _trains(metered)


SCENARIOS: tuple[Callable[[Metered], None], ...] = (_trains, _raises, _fails, _full, _lost)
FAULTS = {_full: {"failing_writes": 3}, _lost: {"failing_reads": 3}}


class Judge:
    """Runs steps on a device that copies as late as it may; tells what was wrong."""

    def __init__(self) -> None:
        self.plan = planned(state=STATE)
        self.bits: dict[str, Any] = {}
        self.curves: dict[str, Any] = {}
        for scenario in SCENARIOS[:2]:
            metered = Metered()
            scenario(metered)
            self.bits[scenario.__name__] = metered.bits
        self.bits |= dict.fromkeys(("_fails", "_full", "_lost"), self.bits["_trains"])
        assert self.complaints() == []
        assert self.complaints() == []

    def complaints(self) -> list[str]:
        return [complaint for scenario in SCENARIOS for complaint in self._of(scenario)]

    def _of(self, scenario: Callable[[Metered], None]) -> list[str]:
        gc.collect()  # what an earlier one has left, and no more until this one ends
        gc.disable()
        try:
            return self._without_collections(scenario)
        finally:
            gc.enable()

    def _without_collections(self, scenario: Callable[[Metered], None]) -> list[str]:
        name, clock = scenario.__name__, OpClock()
        device = Lagging(clock, **FAULTS.get(scenario, {}))
        metered = Metered()
        training = metered.training
        try:
            with clock, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with poochplan.apply(
                    self.plan, training.model, training.optimizer, device=lambda: device, quiet=True, meter="never"
                ):
                    scenario(metered)
                metered.between.append(live_bytes() - metered._began_bytes)
                left = contents(training.optimizer)
        except Exception as error:
            return [repr(error)]
        found = list(device.violations)
        if metered.bits != self.bits[name] or left != metered.bits[-1]:
            found.append(f"{name}: other bits")
        if scenario is _fails:  # whose error holds frames for a while
            return found
        if metered.bytes != self.curves.setdefault(name, metered.bytes):
            found.append(f"{name}: other bytes are live")
        return found


@functools.cache
def judge() -> Judge:
    return Judge()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_without_it_something_differs(mutant: Mutant) -> None:
    whole = judge()
    with mutant.in_place():
        assert whole.complaints() != []


RULES = {
    "the window is three chunks": (Visits, "enter", "self._fetch(number + 1)", "self._fetch(number + 2)"),
    "a chunk leaves two behind": (Visits, "enter", "number - 2", "number - 1"),
}


@pytest.mark.parametrize("rule", RULES)
def test_with_another_rule_something_differs(rule: str) -> None:
    whole = judge()
    with rewritten(*RULES[rule]).in_place():
        assert whole.complaints() != []


def test_the_original_is_back_afterwards() -> None:
    assert judge().complaints() == []
