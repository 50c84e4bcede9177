"""What passes a guard, what a session does that stands aside, and the one thing that is lost: a value's only copy."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan import guard
from poochplan.errors import BudgetExceededError, DivergenceError, SpillError
from poochplan.formats.plan import Plan
from poochplan.runtime.replays import compiled_tape
from poochplan.torch_private.hooks import topmost_hooks
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.faults import CASE, plan, swaps
from tests.runtime.injecting import Place, Watch
from tests.runtime.nets import equal, in_core, our_warnings, snapshot

__all__ = ["plan", "swaps"]
pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread", "_as_users_run_it")]

PREADV = os.preadv


@pytest.fixture
def _as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What can be told is not raised."""
    monkeypatch.setattr(guard, "RAISES", False)
    yield
    assert topmost_hooks() is None
    assert mode_count() == 0


def one_step(model: nn.Module, step: object, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    loss = step()  # type: ignore[operator]
    loss.backward()
    seen = snapshot(model, loss)
    optimizer.step()
    optimizer.zero_grad()
    return seen


class UsersError(Exception):
    pass


def raises(error: BaseException) -> None:
    raise error


USERS = {
    "an error": UsersError("mine"),
    "out of memory": torch.OutOfMemoryError("CUDA out of memory"),
    "the CPU's allocator": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "an interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("kind", USERS)
def test_an_error_of_the_users_code_passes_unchanged_and_the_session_goes_on(plan: Plan, kind: str, place: str) -> None:
    model, step, optimizer = CASE.fresh()
    layer, error = model.blocks[1], USERS[kind]  # type: ignore[index]
    with our_warnings() as said, poochplan.apply(plan, model) as session:
        if place == "forward":
            hook = layer.register_forward_hook(lambda *_: raises(error))
        else:
            hook = layer.register_full_backward_hook(lambda *_: raises(error))
        with pytest.raises(type(error)) as caught:
            one_step(model, step, optimizer)
        assert caught.value is error
        hook.remove()
        del caught
        error.__traceback__ = error.__context__ = None
        optimizer.zero_grad()
        one_step(model, step, optimizer)
        assert session.report().last_step.fallbacks == 0
    assert not said


def test_an_error_of_a_users_backward_holds_nothing_of_its_step_once_it_is_handled(plan: Plan) -> None:
    model, step, _ = CASE.fresh()

    def breaks(*_: object) -> None:
        raise UsersError

    with poochplan.apply(plan, model) as session:
        model.blocks[1].register_full_backward_hook(breaks)  # type: ignore[index]
        gc.collect()
        gc.disable()
        try:
            step().backward()
        except UsersError:
            pass
        finally:
            gc.enable()
        assert not session._engine.cursor.holds_values


def test_an_error_of_an_op_passes_the_recorder_unchanged(plan: Plan) -> None:
    model, step, optimizer = CASE.fresh()
    with our_warnings() as said, poochplan.apply(plan, model) as session:
        with model.blocks[1].register_forward_hook(lambda *_: torch.ones(2) @ torch.ones(3)):  # type: ignore[index]
            with pytest.raises(RuntimeError, match="inconsistent tensor size"):
                one_step(model, step, optimizer)
        one_step(model, step, optimizer)
        assert session.report().last_step.fallbacks == 0
    assert not said


def test_a_write_to_a_saved_tensor_raises_what_autograd_raises(swaps: Plan) -> None:
    model, step, _ = CASE.fresh()
    with our_warnings() as said, poochplan.apply(swaps, model):
        with model.blocks[0][2].register_forward_hook(lambda _, __, out: (out.sigmoid(), out.mul_(2))[0]):  # type: ignore[index]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step().backward()
    assert not [line for line in said if "stands aside" in line]


def test_what_the_user_asked_to_be_an_error_is_one(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    with poochplan.apply(plan, model, on_divergence="error"), pytest.raises(DivergenceError):
        model.eval()
        step().backward()
    model, step, optimizer = CASE.fresh()
    small = msgspec.structs.replace(plan, budget_bytes=1)
    with pytest.raises(BudgetExceededError), poochplan.apply(small, model, on_over_budget="error"):
        one_step(model, step, optimizer)
        one_step(model, step, optimizer)


PLACES = {
    "a save": Place("runtime/engine/engine.py", "Engine._save", "step", 3),
    "a use": Place("runtime/engine/engine.py", "Engine._use_point", "step", 4),
    "a recorded op": Place("runtime/replays/tape.py", "Recorder._after", "step", 5),
    "a release": Place("runtime/engine/mechanism.py", "Mechanism.release", "step", 2),
    "a call of the model": Place("runtime/attachment.py", "Attachment._forward_begins", "step", 1),
    "a step of the optimizer": Place("runtime/attachment.py", "Attachment._optimizer_stepped", "step", 1),
}


@pytest.mark.parametrize("where", PLACES)
def test_after_a_fault_of_ours_steps_are_plain_and_nothing_is_left(
    plan: Plan, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_tape, "IS_WANTED", False)  # its recorder has no call of Python's in which to raise
    model, step, optimizer = CASE.fresh()
    watch = Watch(PLACES[where])
    torch.manual_seed(1)
    with our_warnings() as said, poochplan.apply(plan, model) as session, watch.watching():
        watch.phase = "step"
        seen = [one_step(model, step, optimizer)]
        watch.phase = ""
        assert watch.was_reached
        seen.append(one_step(model, step, optimizer))
        assert topmost_hooks() is None
        assert mode_count() == 0
        assert not model._forward_pre_hooks
        assert not model._forward_hooks
        seen.append(one_step(model, step, optimizer))
        session.step()
        with session.away():
            seen.append(one_step(model, step, optimizer))
        assert not session.wait_until_planned()
        assert session.report()
    assert equal(in_core(CASE, 4), seen)
    (line,) = said
    assert "the session stands aside, because something of ours has failed: FaultError: injected into" in line
    assert "please report" in line
    gc.collect()


class Failing:
    """``os.preadv``, whose ``times`` next calls fail."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, descriptor: int, buffers: list[memoryview], at: int) -> int:
        self.times -= 1
        if self.times >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(descriptor, buffers, at)


def test_a_value_whose_copy_back_fails_is_read_again(swaps: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, optimizer = CASE.fresh()
    torch.manual_seed(1)
    with our_warnings() as said, poochplan.apply(swaps, model):
        monkeypatch.setattr(os, "preadv", Failing(1))
        seen = [one_step(model, step, optimizer) for _ in range(3)]
    assert equal(in_core(CASE, 3), seen)
    assert [line for line in said if "not be read back" in line and "stands aside" in line] == said


def test_a_value_that_only_a_disk_has_which_fails_for_good_is_the_one_error(
    swaps: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, step, optimizer = CASE.fresh()
    with our_warnings() as said, poochplan.apply(swaps, model):
        monkeypatch.setattr(os, "preadv", Failing(1 << 40))
        with pytest.raises(SpillError, match="this step's gradients are lost, check the disk"):
            step().backward()
        optimizer.zero_grad()
        one_step(model, step, optimizer)  # plainly: the disk is not used any more
    assert len(said) == 1
