"""Loops of all kinds have the bits of plain ones where an optimizer's state is away between its steps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.runtime.optimizer_state.steps import TAKES_CLOSURE
from poochplan.tensors.optimizers import parameters_of
from tests.runtime.nets import as_bytes, our_warnings
from tests.runtime.optimizer_state.trainings import (
    SIDE,
    Layers,
    Training,
    adam,
    away,
    chunks,
    contents,
    either_way,
    grouped,
    planned,
    streaming,
)


def test_gradients_that_are_zeroed_in_place() -> None:
    def use(training: Training) -> None:
        for _ in range(3):
            training.optimizer.zero_grad(set_to_none=False)
            loss = training.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
            training.see(loss)
            assert training.is_streamed()

    either_way(use)


def test_gradients_of_several_forwards_that_are_clipped() -> None:
    def use(training: Training) -> None:
        for _ in range(3):
            training.optimizer.zero_grad()
            for _ in range(3):
                loss = training.loss() / 3
                loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            training.optimizer.step()
            training.see(loss, norm)
            assert training.is_streamed()

    either_way(use)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_steps(fused: bool) -> None:
    def use(training: Training) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for number in range(5):
            training.optimizer.zero_grad()
            loss = training.loss()
            scaler.scale(loss).backward()
            if number in (0, 3):
                next(training.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(training.optimizer)
            scaler.update()
            training.see(loss, torch.tensor(scaler.get_scale()))
            assert number == 0 or training.is_streamed()

    either_way(use, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused))


Scheduled = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Scheduled] = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "momentum too": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
    "one behind another": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("made", ["before", "inside"])
def test_rates_that_a_scheduler_changes(schedule: str, made: str) -> None:
    found: list[torch.optim.lr_scheduler.LRScheduler] = []

    def begin(training: Training) -> None:
        found.append(SCHEDULES[schedule](training.optimizer))

    def use(training: Training) -> None:
        if made == "inside":
            begin(training)
        for _ in range(4):
            training.step()
            found[-1].step()
            assert training.is_streamed()
        training.see(torch.tensor(found[-1].get_last_lr()))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a scheduler that has seen no step says so
        either_way(use, begin=begin if made == "before" else lambda _: None)


def test_a_group_that_is_added_amid_the_loop() -> None:
    class Grows(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(SIDE, SIDE)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(self.late(rows))

    def make(parameters: Any) -> torch.optim.Optimizer:
        return adam(list(parameters)[:-2])

    def use(training: Training) -> None:
        training.steps(2)
        training.optimizer.add_param_group({"params": list(training.model.parameters())[-2:], "lr": 3e-3})
        training.steps(3)
        assert training.is_streamed()

    either_way(use, make, Grows, chunks(12))


def test_parameters_that_move_to_other_chunks() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        for group in training.optimizer.param_groups:
            group["params"].reverse()
        training.steps(2)
        for group in training.optimizer.param_groups:
            group["params"][:4] = []
        training.steps(2)
        assert training.is_streamed()

    trained = either_way(use, state=chunks(12, kept=(0, 2, 3)))
    assert len(parameters_of(trained.optimizer)) == 8


def test_frozen_unused_and_tied_parameters() -> None:
    class Odd(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].requires_grad_(False)
            self.layers[3].weight = self.layers[4].weight
            self.unused = nn.Linear(SIDE, SIDE)

    def use(training: Training) -> None:
        training.steps(2)
        training.model.layers[0].requires_grad_(True)  # type: ignore[index,union-attr]
        training.model.layers[1].requires_grad_(False)  # type: ignore[index,union-attr]
        training.steps(2)
        assert training.is_streamed()

    either_way(use, model=Odd)


def test_several_optimizers_of_one_model() -> None:
    def use(training: Training) -> None:
        every = list(training.model.parameters())
        training.optimizer = adam(every[:4])
        others = [torch.optim.SGD(every[4:8], 0.1, momentum=0.9), torch.optim.Adagrad(every[8:], 0.01)]
        for number in range(4):
            training.step()
            for other in others[: 1 + number % 2]:
                other.step()
                other.zero_grad()
                training.seen += contents(other)
        assert training.session is None or all(away(training.session, one) for one in (training.optimizer, *others))

    state = (*chunks(4, kept=()), *chunks(4, kept=(), optimizer=1), *chunks(4, kept=(), optimizer=2))
    either_way(use, state=state)


def test_an_optimizer_for_each_parameter_which_steps_within_backward() -> None:
    def use(training: Training) -> None:
        every = list(training.model.parameters())
        each = {one: torch.optim.Adam([one], lr=1e-2, foreach=False) for one in every}

        def steps(parameter: torch.Tensor) -> None:
            each[parameter].step()  # type: ignore[index]
            parameter.grad = None

        handles = [one.register_post_accumulate_grad_hook(steps) for one in every]
        for _ in range(3):
            loss = training.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            training.see(loss)
            training.seen += [part for one in each.values() for part in contents(one)]
        assert training.session is None or any(away(training.session, one) for one in each.values())
        for handle in handles:
            handle.remove()

    state = tuple(one for number in range(12) for one in chunks(1, kept=(), optimizer=number))
    either_way(use, state=state)


def test_two_models_that_are_trained_in_turn() -> None:
    found = []
    plans = {name: planned() for name in "gd"}
    for is_planned in (False, True):
        both = {name: Training() for name in "gd"}
        models = {name: one.model for name, one in both.items()}
        optimizers = [one.optimizer for one in both.values()]
        torch.manual_seed(1)
        session = poochplan.apply(plans, models, optimizers, quiet=True) if is_planned else contextlib.nullcontext()
        with session as opened:
            for _ in range(3):
                for name, training in both.items():
                    if opened is not None:
                        opened.step(name)
                    training.step()
                    assert opened is None or away(opened, training.optimizer)
        found.append([one.seen for one in both.values()])
    assert found[0] == found[1]


class Closure:
    """What some optimizers, and Lightning, give to ``step``."""

    def __init__(self, training: Training) -> None:
        self.training, self.calls = training, 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        assert torch.is_grad_enabled()
        self.training.optimizer.zero_grad()
        loss = self.training.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def test_a_plan_that_is_first_followed_amid_a_step() -> None:
    """Where the loop's forward is in a closure: such state leaves behind that step."""

    def use(training: Training) -> None:
        for _ in range(3):
            step: Any = training.optimizer.step
            training.see(step(Closure(training)).detach())
            assert training.is_streamed()

    either_way(use, begin=lambda training: training.steps(2))


@pytest.mark.parametrize("how", ["positional", "named"])
@pytest.mark.parametrize("name", ["Adam", "Adamax", "Rprop"])
def test_a_closure_is_called_once_and_its_loss_returned(how: str, name: str) -> None:
    def use(training: Training) -> None:
        for number in range(3):
            closure = Closure(training)
            step: Any = training.optimizer.step
            loss = step(closure) if how == "positional" else step(closure=closure)
            assert closure.calls == 1
            training.see(loss.detach())
            assert number == 0 or training.is_streamed()

    either_way(use, lambda parameters: getattr(torch.optim, name)(parameters, lr=1e-2))


def test_lbfgs_keeps_its_state_on_the_device_and_one_line_says_so() -> None:
    def use(training: Training) -> None:
        for _ in range(3):
            loss: Any = training.optimizer.step(Closure(training))  # type: ignore[call-overload]
            training.see(loss.detach())
        assert not training.away()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, max_iter=3)

    with our_warnings() as said:
        either_way(use, make, state=chunks(12, each=12, kept=()), behind=use)
    assert [line for line in said if TAKES_CLOSURE.partition(":")[0][2:] in line] == said
    assert len(said) == 1


class Doubled(torch.optim.Adam):
    """A step of its own, so that torch's alone is not known to be separable."""

    def step(self, closure: Any = None) -> Any:
        total = sum(float(one.grad.sum()) for one in parameters_of(self) if one.grad is not None)
        for group in self.param_groups:
            group["weight_decay"] = 0.01 * abs(total) / (1 + abs(total))
        return super().step(closure)


@pytest.mark.parametrize("each", [12, 2])
def test_a_subclass_with_a_step_of_its_own_is_stepped_whole(each: int) -> None:
    """Also where the plan was made with one of torch's, in several chunks."""

    def use(training: Training) -> None:
        training.steps(4)
        assert training.is_streamed()

    either_way(use, lambda parameters: Doubled(parameters, lr=1e-2), state=chunks(12, each, kept=()))


def test_a_step_that_is_replaced_amid_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(training: Training) -> None:
        training.steps(2)
        own = torch.optim.Adam.step

        def replaced(self: torch.optim.Adam, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] *= 0.5
            return own(self, closure)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.Adam, "step", replaced)
            training.steps(2)
        training.steps(1)

    either_way(use)


class History(torch.optim.Optimizer):
    """State in lists, which refers to itself, and grows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in parameters_of(self):
            if one.grad is not None:
                past = self.state[one].setdefault("past", [])
                past.append(one.grad.clone())
                del past[:-3]
                one.sub_(torch.stack(list(past)).mean(0), alpha=1e-2)
                past[0].mul_(0.5)


def test_state_in_lists() -> None:
    def use(training: Training) -> None:
        for _ in range(5):
            training.step()
            training.seen += [as_bytes(one) for kept in training.optimizer.state.values() for one in kept["past"]]
        assert training.is_streamed()

    either_way(use, History, state=chunks(12, 12, kept=()))


def test_steps_on_another_thread() -> None:
    import threading

    def use(training: Training) -> None:
        training.steps(2)
        thread = threading.Thread(target=training.optimizer.step)
        thread.start()
        thread.join()
        training.see()
        training.steps(2)
        assert training.is_streamed()

    either_way(use)


def test_steps_while_the_session_is_away() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        with contextlib.nullcontext() if training.session is None else training.session.away():
            training.steps(2)
            assert not training.away()
        training.steps(2)
        assert training.is_streamed()

    either_way(use)


def test_state_from_before_the_session_leaves_with_its_first_step() -> None:
    def use(training: Training) -> None:
        training.optimizer.zero_grad()
        training.loss().backward()  # type: ignore[no-untyped-call]
        assert training.is_streamed()
        training.see()
        training.steps()

    either_way(use, begin=lambda training: training.steps(2))


def test_a_session_that_is_left_without_an_end() -> None:
    found = []
    for plan in (None, planned()):
        training = Training(lambda parameters: adam(grouped(parameters, lr=3e-3)))
        if plan is not None:
            opened = streaming(training, plan)
            opened.__enter__()
            training.steps(3)
            assert training.away()
            training.session = None
            del opened
        else:
            training.steps(3)
        training.steps(3)
        found.append(training.seen)
    assert found[0] == found[1]


def test_steps_of_an_optimizer_that_the_plan_does_not_know_are_judged_by_its_budget() -> None:
    """Its state stays, so they are above a budget that the plan keeps by streaming."""
    training = Training(lambda parameters: adam(list(parameters)[:6]))
    tight = msgspec.structs.replace(planned(), budget_bytes=1 << 19)
    with our_warnings() as said, poochplan.apply(tight, training.model, arena="off") as session:
        training.steps(1)
        assert not session._chunked.is_waiting
        training.steps(2)
    assert any("more than its budget" in line for line in said), said
