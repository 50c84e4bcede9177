"""Whoever reads, writes, copies or holds state sees what it would see without a session."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from poochplan.tensors.optimizers import parameters_of
from tests.runtime.nets import as_bytes
from tests.runtime.optimizer_state.trainings import SIDE, Training, adam, chunks, contents, either_way

EVERY = chunks(12, 2, kept=())


def notes(training: Training, *tensors: torch.Tensor) -> None:
    training.seen += map(as_bytes, tensors)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_it_is_read_between_steps() -> None:
    def use(training: Training) -> None:
        for _ in range(3):
            training.step()
            one = training.moments()["exp_avg"]
            notes(training, one.sum(), one.clone(), one * 2, one[3], one.t(), one.double())
            training.seen += [str(one[0, :3].tolist()).encode(), repr(one).encode(), one.numpy().tobytes()]
            training.seen.append(str((one.shape, one.stride(), one.dtype, one.device, one.is_leaf)).encode())
            assert training.is_streamed()

    either_way(use)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_of_the_optimizer_goes_its_own_way(way: str) -> None:
    def use(training: Training) -> None:
        training.steps(2)
        both = training.model, training.optimizer
        model, optimizer = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
        training.steps(2)
        optimizer.zero_grad()
        model(torch.ones(4, SIDE)).backward()
        optimizer.step()
        notes(training, *model.parameters())
        training.seen += contents(optimizer)
        training.step()
        assert training.is_streamed()

    either_way(use)


def saved(optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


def test_a_saved_file_holds_what_it_holds_and_is_no_larger() -> None:
    """torch saves the whole storage that a tensor is on."""

    def use(training: Training) -> None:
        training.steps(2)
        content = saved(training.optimizer)
        training.seen.append(str(len(content)).encode())
        training.steps(2)
        training.optimizer.load_state_dict(torch.load(io.BytesIO(content)))
        training.see()
        training.steps(3)
        assert training.is_streamed()

    either_way(use)


def test_a_state_dict_that_is_held_follows_the_training() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        held = training.optimizer.state_dict()
        for _ in range(3):
            training.step()
            notes(training, *(one for state in held["state"].values() for one in state.values()))
        training.optimizer.load_state_dict(held)
        training.steps(2)
        notes(training, *(one for state in held["state"].values() for one in state.values()))
        assert training.is_streamed()

    either_way(use)


def test_an_older_state_is_loaded_amid_the_loop() -> None:
    older: dict[str, Any] = {}

    def begin(training: Training) -> None:
        training.steps(2)
        older.update(copy.deepcopy(training.optimizer.state_dict()))

    def use(training: Training) -> None:
        training.steps(2)
        training.optimizer.load_state_dict(copy.deepcopy(older))
        training.see()
        training.steps(3)
        assert training.is_streamed()

    either_way(use, begin=begin)


# -- writing ---------------------------------------------------------------------------------------------------------


def test_what_is_written_between_steps_is_what_the_next_one_reads() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        for state in training.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].mul_(0.5)
        training.steps(2)
        training.moments()["exp_avg"][7].add_(1.0)
        training.moments(2)["exp_avg_sq"].data.add_(1.0)
        training.steps(2)
        assert training.is_streamed()

    either_way(use)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_what_a_hook_behind_the_step_writes_is_there(when: str) -> None:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"].data.mul_(2.0)

    _hooked(when, lambda training: training.optimizer.register_step_post_hook(hook))


def _hooked(when: str, begin: Callable[[Training], object]) -> None:
    """Trains with a hook that ``begin`` registers, before the session or within it."""

    def use(training: Training) -> None:
        if when == "inside":
            training.steps(2)
            begin(training)
        training.steps(3)
        assert training.is_streamed()

    either_way(use, begin=lambda training: begin(training) if when == "before" else None)


def test_what_a_hook_of_all_optimizers_writes_is_there() -> None:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    def use(training: Training) -> None:
        handles = [register_optimizer_step_post_hook(hook), register_optimizer_step_pre_hook(hook)]
        training.steps(3)
        for handle in handles:
            handle.remove()
        assert training.is_streamed()

    either_way(use, begin=lambda training: training.steps(1))


@pytest.mark.parametrize("when", ["before", "inside"])
def test_gradients_that_a_hook_before_the_step_clips_are_clipped(when: str) -> None:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 1e-3)
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    _hooked(when, lambda training: training.optimizer.register_step_pre_hook(hook))


def test_what_a_hook_changes_in_the_arguments_holds() -> None:
    calls = list[str]()

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        calls.append("before")
        return args, {**kwargs, "closure": lambda: torch.tensor(3.0)}

    def behind(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("behind")
        assert kwargs["closure"]() == 3

    def use(training: Training) -> None:
        training.optimizer.register_step_pre_hook(before)
        training.optimizer.register_step_post_hook(behind)
        calls.clear()
        training.steps(2)
        assert training.optimizer.step() == 3  # type: ignore[func-returns-value]
        assert calls == ["before", "behind"] * 3

    either_way(use)


# -- replacing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["same", "larger", "smaller", "another type", "other strides", "a part"])
def test_data_that_is_replaced(content: str) -> None:
    """The moments of one parameter by ones of another shape, as where a layer grows."""

    def others(one: torch.Tensor) -> torch.Tensor:
        if content == "another type":
            return torch.full_like(one, 0.25, dtype=torch.float64)
        if content == "other strides":
            return torch.full((SIDE, SIDE), 0.25).t().contiguous().t()
        if content == "a part":
            return torch.full((2, SIDE, SIDE), 0.25)[1]
        rows = {"same": SIDE, "larger": 3 * SIDE, "smaller": SIDE // 2}[content]
        return torch.full((rows, SIDE), 0.25)

    def use(training: Training) -> None:
        training.steps(2)
        parameter = parameters_of(training.optimizer)[4]
        training.moments(4)["sum"].data = others(training.moments(4)["sum"])
        if content in ("larger", "smaller"):
            parameter.data = torch.ones_like(training.moments(4)["sum"])
        for _ in range(3):
            training.optimizer.zero_grad()
            for number, one in enumerate(parameters_of(training.optimizer)):
                one.grad = torch.full_like(one, 0.1 * number)
                one.grad.view(-1)[0] = 1
            training.optimizer.step()
            training.see()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=1e-2, foreach=False)

    either_way(use, make, state=EVERY, begin=lambda training: training.steps(1), behind=lambda _: None)


def test_storage_that_is_set_to_another() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        other = torch.full((SIDE, SIDE), 0.5)
        training.moments()["exp_avg"].set_(other)  # type: ignore[call-overload]
        training.steps(2)
        notes(training, other)
        del other
        training.steps(2)

    either_way(use)


def test_state_that_is_deleted_or_put_in_place() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        every = parameters_of(training.optimizer)
        del training.optimizer.state[every[0]]
        training.optimizer.state[every[2]]["exp_avg"] = torch.ones(SIDE, SIDE)
        training.steps(2)
        training.optimizer.state.clear()
        training.steps(3)
        assert training.is_streamed()

    either_way(use)


def test_parameters_that_are_replaced() -> None:
    """A new tensor in the group, with the state of the one before."""

    def use(training: Training) -> None:
        training.steps(2)
        group = training.optimizer.param_groups[0]
        before = group["params"][2]
        now = torch.nn.Parameter(before.detach().clone())
        training.model.layers[1].weight = now  # type: ignore[index,union-attr]
        group["params"][2] = now
        training.optimizer.state[now] = training.optimizer.state.pop(before)
        training.steps(2)

    either_way(use)


# -- holding ---------------------------------------------------------------------------------------------------------


def aliases_of(one: torch.Tensor) -> list[torch.Tensor]:
    return [one.detach(), one.view(-1)[5:], one.data, one.t()]


@pytest.mark.parametrize("since", ["before", "inside", "first step"])
def test_a_view_that_is_held_is_never_stale(since: str) -> None:
    held = list[torch.Tensor]()

    def hold(training: Training) -> None:
        held[:] = [alias for one in training.moments().values() if one.ndim for alias in aliases_of(one)]

    def begin(training: Training) -> None:
        training.steps(1)
        if since == "before":
            hold(training)

    def use(training: Training) -> None:
        training.steps(0 if since == "first step" else 2)
        if since != "before":
            hold(training)
        for _ in range(2):
            training.step()
            notes(training, *held)
        held[0].zero_()
        held[-1].mul_(0.5)
        training.steps(2)
        notes(training, *held)

    def behind(training: Training) -> None:
        notes(training, *held)
        training.steps(2)
        notes(training, *held)
        held[0].zero_()
        training.steps(2)
        notes(training, *held)

    either_way(use, begin=begin, behind=behind)


@pytest.mark.parametrize("since", ["before", "inside"])
def test_an_array_of_numpy_that_is_held_is_never_stale(since: str) -> None:
    held = list[Any]()

    def begin(training: Training) -> None:
        training.steps(1)
        held[:] = [training.moments()["exp_avg"].numpy()]

    def use(training: Training) -> None:
        if since == "inside":
            training.steps(2)
            held[:] = [training.moments()["exp_avg"].numpy()]
        for _ in range(2):
            training.step()
            training.seen.append(held[0].tobytes())

    def behind(training: Training) -> None:
        for _ in range(2):
            training.step()
            training.seen.append(held[0].tobytes())

    either_way(use, begin=begin, behind=behind)


def test_a_view_of_state_that_is_gone_keeps_its_content() -> None:
    def use(training: Training) -> None:
        training.steps(2)
        held = [training.moments(number)["exp_avg"].detach() for number in (0, 4)]
        for number in (0, 4):
            del training.optimizer.state[parameters_of(training.optimizer)[number]]
        gc.collect()
        for _ in range(3):
            training.step()
            training.optimizer.state.clear()
            notes(training, *held)
        training.steps(2)
        notes(training, *held)

    either_way(use, state=EVERY)


def test_places_of_state_that_is_gone_are_used_again() -> None:
    """So a loop that loads its state again and again takes no more of the host tier."""
    held = list[int]()

    def use(training: Training) -> None:
        for _ in range(8):
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
            training.step()
            if training.session is not None:
                held.append(sum(behind - first for first, behind in training.session._engine.host.taken()))

    either_way(use, adam)
    assert held[-1] == held[1]
