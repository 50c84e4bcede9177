"""Steps that raise amid the chunks, by the user's doing, by an interrupt or by a fault of ours; and forks."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poochplan.sessions import apply
from poochplan.tensors.optimizers import parameters_of
from tests.depth import tries
from tests.runtime.faults import _ctrl_c_is_heard
from tests.runtime.injecting import Loop, Place, Watch, places, run
from tests.runtime.optimizer_state.trainings import SIDE, Training, chunks, contents, either_way, planned

__all__ = ["_ctrl_c_is_heard"]
EVERY = chunks(12, 2, kept=())


def one_by_one(parameters: Any) -> torch.optim.Optimizer:
    """In a loop over parameters, so that a step that raises has stepped those before."""
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


@pytest.mark.parametrize("number", [0, 4, 10])
def test_state_of_a_wrong_shape(number: int) -> None:
    def use(training: Training) -> None:
        training.steps(2)
        state = training.moments(number)
        right, state["exp_avg_sq"] = state["exp_avg_sq"], torch.ones(SIDE + 1, SIDE + 1)
        training.optimizer.zero_grad()
        training.loss().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError):
            training.optimizer.step()
        training.see()
        state["exp_avg_sq"] = right
        training.steps(3)
        assert training.is_streamed()

    either_way(use, one_by_one, state=EVERY)


def _breaks_off(training: Training, handle: Any, error: type[BaseException]) -> None:
    """One step raises by the hook of the handle, with the user's words; later ones do not."""
    with pytest.raises(error, match="user"):
        training.step()
    handle.remove()
    training.see()
    training.steps(2)
    assert training.is_streamed()


def test_a_hook_of_a_gradient_raises() -> None:
    def use(training: Training) -> None:
        training.steps(2)

        def raises(_: torch.Tensor) -> None:
            raise ValueError("the user's")

        _breaks_off(training, parameters_of(training.optimizer)[4].register_hook(raises), ValueError)

    either_way(use)


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_hook_of_the_step_raises(when: str, error: type[BaseException]) -> None:
    def use(training: Training) -> None:
        training.steps(2)

        def raises(*_: Any) -> None:
            raise error("the user's")

        _breaks_off(training, getattr(training.optimizer, f"register_step_{when}_hook")(raises), error)

    either_way(use)


def test_a_closure_raises() -> None:
    def use(training: Training) -> None:
        training.steps(2)

        def closure() -> torch.Tensor:
            training.optimizer.zero_grad()
            training.loss().backward()  # type: ignore[no-untyped-call]
            raise ValueError("the user's")

        with pytest.raises(ValueError, match="user"):
            training.optimizer.step(closure)  # type: ignore[arg-type]
        training.see()
        training.steps(2)
        assert training.is_streamed()

    either_way(use)


class InterruptedAt(torch.optim.SGD):
    """A step of its own, which Ctrl-C ends amid the parameters."""

    at = -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, one in enumerate(parameters_of(self)):
            if one.grad is not None:
                if number == self.at:
                    raise KeyboardInterrupt
                moment = self.state[one].setdefault("moment", torch.zeros_like(one))
                moment.mul_(0.9).add_(one.grad)
                one.sub_(moment, alpha=0.01)


@pytest.mark.parametrize("number", [0, 5])
def test_ctrl_c_amid_a_whole_step(number: int) -> None:
    def use(training: Training) -> None:
        training.steps(2)
        InterruptedAt.at = number
        with pytest.raises(KeyboardInterrupt):
            training.step()
        InterruptedAt.at = -1
        training.see()
        training.steps(2)
        assert training.is_streamed()

    either_way(use, lambda parameters: InterruptedAt(parameters, lr=0.1), state=chunks(12, 12, kept=()))


# -- faults of ours --------------------------------------------------------------------------------------------------

OURS = "optimizer_state", "optimizers.py", "transfers.py", "host_tier.py"
"""Faults of copying threads are copies that fail, of which ``test_no_room.py`` is."""
WEEK = datetime.date.today().isocalendar().week


def looped(*, is_planned: bool) -> Loop:
    """The bits of a loop: state from before, a session of three steps that are watched, and one behind it."""

    def loop(watch: Watch) -> list[bytes]:
        plan = planned(state=EVERY) if is_planned else None
        training = Training()
        training.steps(1)
        session: Any = contextlib.nullcontext()
        if plan is not None:
            session = apply(plan, training.model, training.optimizer, quiet=True)
        with session:
            for _ in range(3):
                training.optimizer.zero_grad()
                watch.phase = "forward"
                loss = training.loss()
                watch.phase = ""
                loss.backward()  # type: ignore[no-untyped-call]
                watch.phase = "step"
                training.optimizer.step()
                watch.phase = ""
                training.see(loss)
            watch.phase = "leaving"
        watch.phase = ""
        training.steps(1)
        return training.seen

    return loop


@pytest.mark.cpu_device
def test_a_fault_of_ours_anywhere_in_it_changes_no_bit_and_one_line_tells() -> None:
    plain, _ = run(looped(is_planned=False))
    assert not plain.error
    run(looped(is_planned=True))  # what is done once in a process
    seen, watch = run(looped(is_planned=True))
    assert not seen.why_not(plain)
    every = [one for one in places(watch) if any(name in one.file for name in OURS)]
    assert len(every) > 200
    wrong, of = {}, tries(30, 1)
    for place in every[WEEK % of :: of]:
        found, _ = run(looped(is_planned=True), place)
        if why := found.why_not(plain):
            wrong[str(place)] = why
    assert not wrong


@pytest.mark.cpu_device
@pytest.mark.parametrize("name", ["fetch", "arrive", "send", "settle", "come_back", "finish"])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_ctrl_c_amid_ours_arrives_and_the_loop_goes_on_behind_it(name: str, call: int) -> None:
    """No bits are claimed: in a plain loop it comes elsewhere. State is whole, and of one step."""
    place = Place("runtime/optimizer_state/places.py", f"StatePlaces.{name}", "step", call)
    watch = Watch(place, KeyboardInterrupt)
    training = Training(one_by_one)
    training.steps(1)
    with warnings.catch_warnings(), apply(planned(state=EVERY), training.model, training.optimizer, quiet=True):
        warnings.simplefilter("ignore")
        training.steps(1)
        training.optimizer.zero_grad()
        training.loss().backward()  # type: ignore[no-untyped-call]
        before = [one.clone() for state in training.optimizer.state.values() for one in state.values()]
        weights = [one.clone() for one in training.model.parameters()]
        with watch.watching(), contextlib.suppress(KeyboardInterrupt):
            watch.phase = "step"
            training.optimizer.step()
        watch.phase = ""
        after = [one for state in training.optimizer.state.values() for one in state.values()]
        stepped = plainly_stepped(training, weights, before)
        assert all(
            torch.equal(now, old) or torch.equal(now, new) for now, old, new in zip(after, before, stepped, strict=True)
        )
        training.steps(2)
    assert all(bool(one.isfinite().all()) for one in training.model.parameters())


def plainly_stepped(training: Training, weights: list[torch.Tensor], before: list[torch.Tensor]) -> list[torch.Tensor]:
    """State behind a plain step from there."""
    own = [nn.Parameter(one.clone()) for one in weights]
    for one, parameter in zip(own, training.model.parameters(), strict=True):
        one.grad = parameter.grad
    optimizer = one_by_one(own)
    contents = iter(before)
    for one, state in zip(own, training.optimizer.state.values(), strict=True):
        optimizer.state[one] = {name: next(contents).clone() for name in state}
    optimizer.step()
    return [one for state in optimizer.state.values() for one in state.values()]


# -- forks -----------------------------------------------------------------------------------------------------------


def in_child(call: Callable[[], object]) -> None:
    """Calls it in a fork, whose end is waited for."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.cpu_device
def test_a_fork_that_steps_writes_nothing_into_its_parents_state() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        there = contents(training.optimizer)

        def steps() -> None:
            assert contents(training.optimizer) == there
            training.steps(3)
            assert not training.away()

        in_child(steps)
        training.see()
        training.steps(2)
        assert training.is_streamed()

    either_way(use, one_by_one)


@pytest.mark.cpu_device
def test_a_fork_that_leaves_the_session_writes_nothing_into_its_parents_state() -> None:
    def use(training: Training) -> None:
        training.steps(2)

        def leaves() -> None:
            if training.session is not None:
                training.session.close()
            training.steps(2)

        in_child(leaves)
        training.see()
        training.steps(2)
        assert training.is_streamed()

    either_way(use, one_by_one)
