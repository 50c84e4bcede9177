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
from tests.runtime.graph_nets import Noting

Make = Callable[[], tuple[nn.Module, torch.Tensor]]
Lies = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""How a tensor lies: its dtype, shape and strides."""


def lies(tensor: torch.Tensor) -> Lies:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


class Residual(nn.Module):
    """Convolutions, batch statistics and an addition around them; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.middle, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(batch)).relu()
        hidden = (hidden + self.last(self.middle(hidden))).relu()
        return self.head(hidden.mean((2, 3))).logsumexp(1).square().mean()  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal attention of two heads, and a product behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.all_three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.all_three(self.before(hidden)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return hidden + self.drop(self.down(nn.functional.gelu(self.up(self.behind(hidden)))))


class Toy(nn.Module):
    """A language model whose head is its embedding; gives the loss."""

    def __init__(self, words: int = 31, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.words(batch) + self.places(torch.arange(batch.shape[1]))
        logits = self.head(self.norm(self.blocks(hidden)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def residual() -> tuple[nn.Module, torch.Tensor]:
    return Residual(), torch.randn(4, 3, 12, 12)


def toy() -> tuple[nn.Module, torch.Tensor]:
    return Toy(), torch.randint(31, (4, 12))


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
