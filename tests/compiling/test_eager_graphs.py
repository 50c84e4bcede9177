"""Joint graphs of torch's own front end keep their bits without Inductor too, wherever saved tensors are moved to: they
run op by op, as backend ``aot_eager`` has it.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from poochplan.runtime.compiled.deferred_unpack import deferring, waiting
from poochplan.runtime.compiled.partitioner import Replays
from poochplan.runtime.compiled.rewriting import Split
from poochplan.tensors.modes import uncompiled_hooks
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.compiler_internals import boxed, stock_partition
from tests.runtime.compiled_nets import Make, Noting, same
from tests.runtime.nets import Attention, Net, Residual
from tests.runtime.served import needs_compiler

Lies = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""How a tensor lies: its dtype, shape and strides."""


def lies(tensor: torch.Tensor) -> Lies:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def with_loss(model: nn.Module) -> nn.Module:
    """The model with its loss in one graph, and nothing that chance decides."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return Net(lambda self, batch: self.model(batch).square().mean(), model=model)


def residual() -> tuple[nn.Module, torch.Tensor]:
    return with_loss(Residual()), torch.randn(4, 8, 12, 12)


def attention() -> tuple[nn.Module, torch.Tensor]:
    return with_loss(Attention()), torch.randint(50, (4, 12))


class Moved:
    """Hooks that keep a copy elsewhere. State: how all that was packed lies; the originals, until they are spoilt."""

    def __init__(self) -> None:
        self.lies: list[Lies] = []
        self._originals: list[torch.UntypedStorage] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.lies.append(lies(tensor))
        self._originals.append(tensor.untyped_storage())
        away = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return away.copy_(tensor.detach())

    def unpack(self, away: torch.Tensor) -> torch.Tensor:
        return away

    def may_wait(self, away: torch.Tensor) -> Geometry | None:
        return Geometry.of(away)

    def spoil(self, stays: list[torch.Tensor]) -> int:
        """Overwrites every original, but for the memory of what stays: by no number, or by -1. How many there were."""
        kept = {tensor.data_ptr() for tensor in stays}
        spoilt = {one.data_ptr(): one for one in self._originals if one.data_ptr() not in kept}
        for storage in spoilt.values():
            storage.fill_(0xFF)  # type: ignore[attr-defined]
        self._originals.clear()
        return len(spoilt)


class OneGraph(Noting):
    """Notes of the only graph: what it saves, replays written, before its points are put in; in that order."""

    def __init__(self, replays: Replays | None = None) -> None:
        super().__init__(replays)
        self.key, self.saved, self.static = "", dict[str, Lies](), frozenset[str]()

    def saw(self, key: str, split: Split) -> None:
        assert not self.key
        super().saw(key, split)
        self.key, self.static = key, split.static
        self.saved = {node.name: lies(node.meta["val"]) for node in split.saved()}


class Compiled(NamedTuple):
    """A model that its first call compiles so, and its batch."""

    model: nn.Module
    batch: torch.Tensor


def op_by_op(make: Make, partitioner: Callable[..., Any] = stock_partition) -> Compiled:
    """Split by ``partitioner``, by default as torch does by itself. Large ops are taken apart as for Inductor."""

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        return boxed(lambda args: torch.fx.Interpreter(graph).boxed_run(args))

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = make()
    backend = aot_autograd(fw_compiler=compiler, partition_fn=partitioner, decompositions=select_decomp_table())
    model.compile(backend=backend, dynamic=False, fullgraph=True)
    return Compiled(model, batch)


pytestmark = [needs_compiler, pytest.mark.cpu_device]
MAKES: dict[str, Make] = {"residual": residual, "attention": attention}
Hooks = Callable[[torch.nn.Module, Moved], contextlib.AbstractContextManager[object]]


def of_others(_: torch.nn.Module, moved: Moved) -> contextlib.AbstractContextManager[object]:
    return uncompiled_hooks(moved.pack, moved.unpack)


def our_own(model: torch.nn.Module, moved: Moved) -> contextlib.AbstractContextManager[object]:
    """As the runtime wraps its hooks: these are given each tensor at its save point, before the forward goes on."""
    return uncompiled_hooks(*deferring((moved.pack, moved.unpack), moved.may_wait, "cpu"))


def none(_: torch.nn.Module, __: Moved) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


STEPS: tuple[Hooks, ...] = (none, of_others, our_own)


class Trained(NamedTuple):
    steps: list[list[torch.Tensor]]
    """After each step: the loss, all gradients and buffers."""
    moved: list[Moved]


def train(compiled: Compiled, hooks: tuple[Hooks, ...]) -> Trained:
    """A step with each of the hooks; behind its forward, all memory that it has packed is spoilt."""
    model, batch = compiled
    found = Trained([], [])
    for step in hooks:
        moved, given = Moved(), batch.clone()
        model.zero_grad(set_to_none=True)
        with step(model, moved):
            loss = model(given)
        spoilt = moved.spoil([loss, *model.parameters(), *model.buffers()])
        assert bool(spoilt) == (step is not none)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.steps.append([one.detach().clone() for one in (loss, *gradients, *model.buffers())])
        found.moved.append(moved)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        del loss
    assert waiting() == 0
    return found


class Stock(NamedTuple):
    """Of torch's own split: what its steps give. Of ours without replays: its notes."""

    make: Make
    steps: list[list[torch.Tensor]]
    noted: OneGraph

    def replayable(self) -> list[str]:
        return self.noted.replayable()[self.noted.key]


@pytest.fixture(scope="module", params=MAKES)
def stock(request: pytest.FixtureRequest) -> Iterator[Stock]:
    make, noted = MAKES[request.param], OneGraph()
    steps = train(op_by_op(make), (none,) * len(STEPS)).steps
    assert_all_as(steps, noted, train(op_by_op(make, noted), STEPS))
    yield Stock(make, steps, noted)
    torch._dynamo.reset()


def assert_all_as(steps: list[list[torch.Tensor]], noted: OneGraph, found: Trained) -> None:
    """These steps, and hooks were given what the graph says that it saves, and nothing else."""
    assert len(found.steps) == len(steps)
    assert all(map(same, found.steps, steps))
    for hooks, moved in zip(STEPS, found.moved, strict=True):
        assert Counter(moved.lies) == (Counter() if hooks is none else Counter(noted.saved.values()))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_replayed_and_moved_away_gradients_keep_their_bits(stock: Stock, seed: int) -> None:
    chance = random.Random(seed)
    names = {one for one in stock.replayable() if seed == 0 or chance.random() < 0.5}
    assert names
    noted = OneGraph({stock.noted.key: names})
    assert_all_as(stock.steps, noted, train(op_by_op(stock.make, noted), STEPS))
    assert set(stock.noted.saved) - set(noted.saved) == names
    assert set(noted.saved) - set(stock.noted.saved) <= noted.static
