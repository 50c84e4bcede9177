"""DTensors, as tensor parallelism saves them: moved and replayed by local tensors, and given back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import poochplan
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.tensors.storages import Shell, saved_part
from tests.online.sharded import Block
from tests.runtime.nets import taken
from tests.runtime.random_plans import random_plan

Step = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A block in which this process is the only rank of a group. The tests of rules call tests without the fixture."""
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def parallel() -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Block(), Block(), nn.Linear(64, 10)), torch.randn(32, 64)
    for block in model[:-1]:
        parallelize_module(block, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, lambda: model(batch).square().mean()


def gradients(model: nn.Module, step: Step) -> list[torch.Tensor]:
    step().backward()  # type: ignore[no-untyped-call]
    return [getattr(one.grad, "_local_tensor", one.grad) for one in model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("decision", ["swap", "recompute"])
def test_what_is_saved_as_a_dtensor_is_moved_or_replayed(decision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"swap": (0, 1, 0), "recompute": (0, 0, 1)}[decision]
    with one_rank():
        expected = gradients(*parallel())
        model, step = parallel()
        plan = random_plan(taken(step, model), 0, weights)
        found = list[str]()
        unpack = Engine._unpack

        def watched(engine: Engine, handle: SavedHandle) -> torch.Tensor:
            tensor = unpack(engine, handle)
            assert (handle.shell is not None) == (isinstance(tensor, DTensor) and handle.value is not None)
            if handle.shell is not None and handle.value is not None:
                found.append(handle.value.decision)
            return tensor

        monkeypatch.setattr(Engine, "_unpack", watched)
        with poochplan.apply(plan, model) as session:
            assert all(map(torch.equal, gradients(model, step), expected))
        monkeypatch.undo()
        report = session.report()
    assert (report.steps_followed, report.total.fallbacks) == (1, 0)
    assert found.count(decision) == 4, "the inputs of the parallel layers of two blocks"


def test_a_dtensor_comes_back_as_it_was() -> None:
    local = torch.randn(6, 8)[1:, ::2]
    whole = DTensor.from_local(local, mesh(), [Shard(0)])
    back: Any = Shell.of(whole).around(saved_part(whole).clone(memory_format=torch.preserve_format))
    assert type(back) is DTensor
    assert (back.placements, back.device_mesh, back.shape, back.stride()) == (
        *(whole.placements, whole.device_mesh, whole.shape, whole.stride()),
    )
    assert torch.equal(back.to_local(), local)
    assert not back.requires_grad


def test_a_shell_holds_no_memory() -> None:
    whole = DTensor.from_local(torch.randn(6, 8), mesh(), [Replicate()])
    assert Shell.of(whole).probe.to_local().untyped_storage().nbytes() == 0  # type: ignore[attr-defined]
    assert whole.to_local().untyped_storage().nbytes() == 6 * 8 * 4


def test_a_saved_dtensor_that_is_written_in_place_raises_what_autograd_raises() -> None:
    with one_rank():
        model, step = parallel()
        plan = random_plan(taken(step, model), 0, (0, 1, 0))
        with poochplan.apply(plan, model):
            step()  # the policy of later saves of this step is the plan's, from which they diverge
            whole = DTensor.from_local(torch.randn(4, 4), mesh(), [Replicate()])
            scale = torch.ones(4, 4, requires_grad=True)
            with pytest.warns(RuntimeWarning, match="diverged"):
                product = whole * DTensor.from_local(scale, mesh(), [Replicate()])
            whole.add_(1)
            assert saved_part(whole) is whole, "its local tensor does not show the write"
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.to_local().sum().backward()
