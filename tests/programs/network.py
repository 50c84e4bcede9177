"""A random program made real: its model, its batches and its step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .blocks import Tensor, bare_block, wrapped
from .drawing import Feature, Program

CLASSES = 5


class AskedTo(Exception):
    """What a program raises where it is to raise."""


class Net(nn.Module):
    """The blocks in ``order``, which one step may change, as it may have block ``fails_at`` raise."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.width
        self.first = nn.Linear(width, width)
        bare: list[nn.Module] = [nn.Identity() for _ in program.blocks]
        linear: list[nn.Linear] = []
        for index, block in sorted(enumerate(program.blocks), key=lambda item: item[1].kind == "tied"):
            bare[index] = bare_block(block.kind, width, linear)
            linear += [module for module in bare[index].children() if type(module) is nn.Linear and _square(module)]
        self.blocks = nn.ModuleList(
            wrapped(block.wrapper, inner) for block, inner in zip(program.blocks, bare, strict=True)
        )
        self.head = nn.Linear(width, CLASSES)
        self.order: Sequence[int] = range(len(self.blocks))
        self.fails_at: int | None = None
        self.gradient_fails_at: int | None = None

    def forward(self, batch: Tensor, other: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
        hidden = self.first(batch)
        if other is not None:
            hidden = hidden + other.tanh()
        for position, index in enumerate(self.order):
            if position == self.fails_at:
                raise AskedTo("in forward")
            hidden = self.blocks[index](hidden)
            if position == self.gradient_fails_at:
                hidden.register_hook(_raise)
        return hidden if scale is None else hidden * scale


def _square(linear: nn.Linear) -> bool:
    return linear.in_features == linear.out_features


def _raise(gradient: Tensor) -> Tensor:
    raise AskedTo("in a hook of backward")


class Running:
    """One run of a program: model, optimizer, data and what is kept from step to step. The same each time."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(program.seed)
        self.program = program
        self.model = Net(program).train()
        parameters = self.model.parameters()
        if program.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        else:
            momentum = 0.9 if program.optimizer == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=momentum)
        self.state = torch.zeros((program.rows, program.width) if program.keeps_whole else program.width)
        self.announce: Callable[[], None] = lambda: None
        """Called where a step begins."""
        self.holds_hidden = False
        self.hidden: Tensor | None = None
        """What the model gave last, in a step that asks for it."""
        self.losses: list[Tensor] = []
        self.loss: Tensor | None = None
        """Of the last step, unless it was abandoned."""
        self.autocast = Feature.AUTOCAST in program.features
        self.keeps_state = Feature.STATE in program.features
        self._batches = self._data(program.rows)
        self.next_batch()

    def _data(self, rows: int) -> list[list[Tensor]]:
        """For each step: the batch, another and a scale, in one data set or each by itself."""
        count, width = len(self.program.events) + 1, self.program.width
        chance = torch.Generator().manual_seed(self.program.seed)
        whole = torch.randn(count, 3, rows, width, generator=chance)
        return [[part if self.program.sliced else part.clone() for part in step.unbind(0)] for step in whole]

    def next_batch(self, rows: int | None = None) -> None:
        """The data of the next step; what the last one had goes."""
        self.batch = self._batches.pop(0)
        if rows is not None:
            self.batch = [part.repeat(3, 1)[:rows].clone() for part in self.batch]

    def step(self) -> Tensor:
        """Forward: the loss."""
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            self.losses = self._losses()
        return torch.stack(self.losses).sum() if len(self.losses) > 1 else self.losses[0]

    def _called(self, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        if not self.program.checkpoints_model:
            return self.model(*inputs, **keywords)
        found: Tensor = checkpoint(self.model, *inputs, use_reentrant=False, **keywords)
        return found

    def _losses(self) -> list[Tensor]:
        features, (batch, other, scale) = self.program.features, self.batch
        inputs = (batch, other) if Feature.SEVERAL_INPUTS in features else (batch,)
        keywords = {"scale": scale} if Feature.SEVERAL_INPUTS in features else {}
        hidden = self._called(*inputs, **keywords)
        if self.keeps_state:
            hidden = hidden + 0.1 * (self.state.mean(0) if self.program.keeps_whole else self.state)
            self.state = hidden.detach() if self.program.keeps_whole else hidden.detach().mean(0)
        labels = torch.arange(batch.shape[0]) % CLASSES
        self.hidden = hidden if self.holds_hidden else None
        losses = [F.cross_entropy(self.model.head(hidden).float(), labels)]
        if Feature.SEVERAL_FORWARDS in features:
            again = self._called(scale, **keywords)
            losses[0] = losses[0] + (hidden - again).float().square().mean()
        if Feature.SEVERAL_LOSSES in features:
            losses.append(hidden.float().abs().mean() + hidden.float().exp().mean() * 0.01)
        return losses
