"""Joint graphs of torch's own front end, without Inductor: they run op by op, as backend ``aot_eager`` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from poochplan.runtime.compiled.partitioner import Replays
from poochplan.runtime.compiled.rewriting import Split
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.compiler_internals import boxed, stock_partition
from tests.runtime.graph_nets import Make, Noting
from tests.runtime.nets import Attention, Net, Residual

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
