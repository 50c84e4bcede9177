"""Small networks that Inductor compiles, and their steps. Blocks are alike, so that they compile once. Graphs of graph
mode run node by node too, without code: that shows what the rewriting does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import Profile
from poochplan.runtime.compiled.partitioner import Partitioner, Replays, saved_nodes
from poochplan.runtime.compiled.rewriting import Split, why_never_replayed
from poochplan.runtime.run_report import Report
from poochplan.torch_private.compiler_internals import not_lowered
from tests.runtime.nets import LINK, equal, snapshot


class Block(nn.Module):
    """Products, a dropout, and something that several tensors are saved of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.drop(self.down(nn.functional.gelu(self.up(self.norm(batch)))))


class Blocks(nn.Module):
    """Two compiled blocks, the first of which is called twice, between plain layers.

    ``checkpointed``: how the second is checkpointed by the user; empty for not.
    """

    def __init__(self, width: int = 32, checkpointed: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.checkpointed = checkpointed
        for block in self.blocks:
            block.compile()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.blocks[0](self.first(batch).tanh())
        if self.checkpointed:
            batch = checkpoint(self.blocks[1], batch, use_reentrant=self.checkpointed == "reentrant")
        else:
            batch = self.blocks[1](batch)
        return self.last(self.blocks[0](batch).tanh())


class Chained(nn.Sequential):
    """With a forward of its own: the compiler leaves calls of torch's own containers alone."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self:
            batch = layer(batch)
        return batch


WAYS = ("wrapped", "in place")


def compiled(module: nn.Module, how: str, backend: Any) -> nn.Module:
    """By either way of asking for it."""
    if how == "wrapped":
        return torch.compile(module, backend=backend)  # type: ignore[return-value]
    module.compile(backend=backend)
    return module


def fresh(checkpointed: str = "") -> tuple[nn.Module, torch.Tensor]:
    """The same network and batch each time."""
    torch.manual_seed(0)
    return Blocks(checkpointed=checkpointed), torch.randn(128, 32)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def profiled(model: nn.Module, batch: torch.Tensor, **options: Any) -> Profile:
    return poochplan.profile(lambda: loss_of(model, batch), model=model, iterations=1, link=LINK, **options)


def train(
    model: nn.Module,
    batch: torch.Tensor,
    steps: int = 3,
    back: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    before: Callable[[], object] = int,
) -> list[list[torch.Tensor]]:
    """What :func:`snapshot` says after each step; ``back`` is how a loss goes backward, ``before`` runs before each."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad(set_to_none=True)
        before()
        loss = loss_of(model, batch)
        back(loss)
        seen.append(snapshot(model, loss))
        del loss
    return seen


def followed(plan: Plan | PlanSet, model: nn.Module, batch: torch.Tensor, wanted: list[list[torch.Tensor]]) -> Report:
    """As many steps under the plan: bitwise those, and to the end."""
    with poochplan.apply(plan, model) as session:
        assert equal(train(model, batch, len(wanted)), wanted)
    assert session.report().total.fallbacks == 0
    return session.report()


Make = Callable[[], tuple[nn.Module, torch.Tensor]]


class Noting(Partitioner):
    """Notes of each graph, by its key: why what it saves is never replayed, and its split with the replays in it."""

    def __init__(self, replays: Replays | None = None) -> None:
        super().__init__(replays or {})
        self.why: dict[str, dict[str, str]] = {}
        self.splits: dict[str, Split] = {}

    def saw(self, key: str, split: Split) -> None:
        self.why[key] = {node.name: why_never_replayed(split, node) for node in saved_nodes(split)}
        self.splits[key] = split

    def replayable(self) -> dict[str, list[str]]:
        return {key: [name for name, why in names.items() if not why] for key, names in self.why.items()}


def step(model: nn.Module, batch: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """The loss, each gradient and each buffer behind one step."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach().clone(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bitwise."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def node_by_node(make: Make, replays: Replays | None = None) -> tuple[list[torch.Tensor], Noting]:
    """One step of graphs that are split and run, and what was noted of them."""
    partitioner = Noting(replays)

    def lower(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            return torch.fx.Interpreter(graph).boxed_run(list(args))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = make()
    with not_lowered(lower, partitioner):
        model.compile(dynamic=False)
        return step(model, batch), partitioner


class Chain(nn.Module):
    """Several things that start from one another when they are replayed, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(64, 16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(batch))
        both = torch.cat([nn.functional.gelu(hidden), hidden.sin()], 1)
        return (batch + self.down(both)) * torch.tensor([0.5, 2.0] * 8)


class Convolutions(nn.Module):
    """Statistics that move once, and saved tensors that lie channels last."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(batch)).relu())  # type: ignore[no-any-return]


class MovingScale(nn.Module):
    """Reads a buffer, and writes it behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("scale", torch.rand(16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = (self.layer(batch) + self.scale).relu()
        self.scale.mul_(0.5)  # type: ignore[operator]
        return hidden


class WritesItsInput(nn.Module):
    """What it saves was made of an input that it then changes; autograd has a part in the change."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.ones(16)), nn.Linear(16, 16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        given = batch * self.shift
        torch._dynamo.graph_break()
        hidden = self.layer((given + 1).relu())
        given.add_(1)
        return hidden.sin() + given  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Parts that the user checkpoints: the backward draws their numbers again, from seeds that the forward saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + nn.functional.dropout(nn.functional.gelu(self.first(batch)), 0.2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.last(checkpoint(self.part, batch, use_reentrant=False)).tanh()
        return nn.functional.dropout(checkpoint(self.part, batch, use_reentrant=False), 0.1).sin()


def of(kind: type[nn.Module]) -> Make:
    return lambda: (kind(), torch.randn(64, 16))


def channels_last() -> tuple[nn.Module, torch.Tensor]:
    model = Convolutions().to(memory_format=torch.channels_last)
    return model, torch.randn(4, 4, 12, 12).to(memory_format=torch.channels_last)
