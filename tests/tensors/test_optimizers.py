"""Which optimizers step parameters independently, and which tensors of their state may leave the device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from poochplan.tensors.optimizers import LEAST_STATE_BYTES, is_separable, movable_state, parameters_of

SIDE = 128
"""A square of this many float32 numbers has exactly ``LEAST_STATE_BYTES``."""
OWN = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]


def parameter(*shape: int) -> torch.Tensor:
    one = torch.nn.Parameter(torch.ones(shape or (SIDE, SIDE)))
    one.grad = torch.ones_like(one)
    return one


def stepped(*parameters: torch.Tensor) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(parameters or [parameter()])
    optimizer.step()
    return optimizer


def same(found: list[torch.Tensor], *expected: torch.Tensor) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*OWN, "Adafactor"])
def test_torchs_own_are_separable_before_their_first_step_and_behind_it(name: str) -> None:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([parameter()], lr=0.1)
    assert is_separable(optimizer)
    optimizer.step()
    assert is_separable(optimizer)


@pytest.mark.parametrize("name", [*OWN, "Adafactor"])
def test_a_step_in_parts_has_the_bits_of_one_step(name: str) -> None:
    def after_steps(*, in_parts: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (2, 2, 3))]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
        (group,) = optimizer.param_groups
        for _ in range(3):
            for one in parameters:
                one.grad = torch.randn(one.shape)
            for first in range(len(parameters)) if in_parts else [0]:
                group["params"] = parameters[first : first + 1] if in_parts else parameters
                optimizer.step()
        return parameters

    whole, parts = after_steps(in_parts=False), after_steps(in_parts=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_lbfgs_looks_at_all_parameters_together() -> None:
    assert not is_separable(torch.optim.LBFGS([parameter()]))


def test_a_sparse_adam_and_a_subclass_are_not_separable() -> None:
    class Clipped(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            torch.nn.utils.clip_grad_norm_(parameters_of(self), 1.0)
            return super().step(closure)

    assert not is_separable(torch.optim.SparseAdam([parameter()]))
    assert not is_separable(Clipped([parameter()]))


def test_a_class_whose_step_was_replaced_is_not_separable(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, own = stepped(), torch.optim.Adam.step

    @functools.wraps(own)
    def step(self: torch.optim.Adam, closure: Any = None) -> Any:
        return own(self, closure)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    assert not is_separable(optimizer)
    monkeypatch.undo()
    assert is_separable(optimizer)


def test_a_scheduler_and_hooks_change_nothing() -> None:
    optimizer = stepped()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert is_separable(optimizer)


def test_parameters_come_in_the_order_of_the_groups() -> None:
    first, second, third = parameter(1), parameter(2), parameter(3)
    groups: list[dict[str, Any]] = [{"params": [second]}, {"params": [third, first], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert same(parameters_of(optimizer), second, third, first)


def test_both_moments_of_a_large_parameter_may_leave_and_its_counter_stays() -> None:
    one, small = parameter(), parameter(SIDE, SIDE - 1)
    optimizer = stepped(one, small)
    state = optimizer.state[one]
    assert state["exp_avg"].nbytes == LEAST_STATE_BYTES
    assert same(movable_state(optimizer, one), state["exp_avg"], state["exp_avg_sq"])
    assert movable_state(optimizer, small) == []
    assert state["exp_avg"].nbytes == LEAST_STATE_BYTES  # the object of the storage that this looked at is gone
    assert len(movable_state(optimizer, one)) == 2


@pytest.mark.parametrize(("name", "count"), [("SGD", 1), ("RMSprop", 1), ("Adagrad", 1), ("Adadelta", 2), ("ASGD", 1)])
def test_what_the_first_step_makes_is_held_by_nothing_else(name: str, count: int) -> None:
    one = parameter()
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([one], lr=0.1, **momentum)
    optimizer.step()
    assert len(movable_state(optimizer, one)) == count


def test_a_parameter_without_state_has_none() -> None:
    one = parameter()
    optimizer = torch.optim.Adam([one])
    assert movable_state(optimizer, one) == []
    assert one not in optimizer.state  # looking made none


def test_what_another_tensor_shares_may_not_leave() -> None:
    optimizer = stepped()
    (one,) = parameters_of(optimizer)
    state = optimizer.state[one]
    view = state["exp_avg"].view(-1)
    assert same(movable_state(optimizer, one), state["exp_avg_sq"])
    del view
    assert len(movable_state(optimizer, one)) == 2


def test_a_part_of_a_storage_may_not_leave_and_whole_storages_may_in_any_layout() -> None:
    optimizer = stepped()
    (one,) = parameters_of(optimizer)
    state = optimizer.state[one]
    state["exp_avg"] = torch.zeros(2, SIDE, SIDE)[1]
    state["exp_avg_sq"] = torch.empty_strided((SIDE, SIDE), (1, SIDE))
    assert same(movable_state(optimizer, one), state["exp_avg_sq"])


def test_what_is_named_twice_is_listed_once() -> None:
    optimizer = stepped()
    (one,) = parameters_of(optimizer)
    state = optimizer.state[one]
    state["exp_avg_sq"] = state["exp_avg"]
    assert same(movable_state(optimizer, one), state["exp_avg"])


def test_neither_gradients_nor_trained_tensors_nor_other_classes_nor_other_devices_may_leave() -> None:
    class Named(torch.Tensor):
        pass

    optimizer = stepped()
    (one,) = parameters_of(optimizer)
    optimizer.state[one] = {
        "gradient": one.grad,
        "trained": parameter(),
        "named": torch.ones(SIDE, SIDE).as_subclass(Named),
        "sparse": torch.ones(SIDE, SIDE).to_sparse(),
        "elsewhere": torch.ones(SIDE, SIDE, device="meta"),
    }
    assert movable_state(optimizer, one) == []


def test_tensors_in_containers_may_leave() -> None:
    optimizer = stepped()
    (one,) = parameters_of(optimizer)
    optimizer.state[one] = {"history": [torch.ones(SIDE, SIDE), torch.zeros(SIDE, SIDE)]}
    assert same(movable_state(optimizer, one), *optimizer.state[one]["history"])


def test_the_state_of_sharded_parameters_stays() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(SIDE, SIDE))
        model(torch.ones(2, SIDE)).sum().backward()
        optimizer = stepped(*model.parameters())
        assert is_separable(optimizer)
        assert [movable_state(optimizer, one) for one in parameters_of(optimizer)] == [[], []]
    finally:
        torch.distributed.destroy_process_group()
