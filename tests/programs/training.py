"""A random program made real: its model, its batches and its step; its loop of plain steps and all others, and what is
compared after each.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from poochplan.errors import SpillError
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.metering.census import leave_out

from .blocks import Tensor, bare_block, wrapped
from .drawing import LAYERS_DRAWN, PLAIN, Feature, Program
from .late_writes import Late

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
        if not program.learns:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.0)
        elif program.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)
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
        self.log: Tensor | None = None
        self.chance = random.Random(program.seed)
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
        if self.program.logs:
            self.log = hidden.float().exp().mean()
        if Feature.SEVERAL_FORWARDS in features:
            again = self._called(scale, **keywords)
            losses[0] = losses[0] + (hidden - again).float().square().mean()
        if Feature.SEVERAL_LOSSES in features:
            losses.append(hidden.float().abs().mean() + hidden.float().exp().mean() * 0.01)
        return losses


WRITES, WRITTEN = "a saved tensor written", "modified by an inplace operation"
REPLAYED = "it is to be recomputed"
MOST_LOST = 4
Snapshot = dict[str, torch.Tensor | None]
AfterStep = Callable[[int, str], None]


def train(running: Running, after_step: AfterStep = lambda index, event: None) -> list[Snapshot]:
    """What :func:`snapshot` says after each step."""
    torch.manual_seed(running.program.seed + 1)
    seen = []
    late_from = running.program.late_from
    for index, event in enumerate(running.program.events):
        for block in running.model.blocks:
            if isinstance(block, Late):
                block.writes = late_from is not None and index >= late_from
        _one_step(running, event)
        seen.append(snapshot(running))
        after_step(index, event)
        running.next_batch()
    return seen


def _one_step(running: Running, event: str) -> None:
    running.optimizer.zero_grad(set_to_none=True)
    usual = running.autocast, running.keeps_state, running.model.order
    try:
        _forward_and_backward(running, event)
        running.optimizer.step()
    except (AskedTo, RuntimeError) as error:
        if not isinstance(error, AskedTo) and not (event == WRITES and WRITTEN in str(error)):
            raise
        if REPLAYED in str(error):  # noticed by a replay, at another node than in-core: what is done by then differs
            raise
        running.loss = None
    finally:
        running.autocast, running.keeps_state, running.model.order = usual
        running.model.fails_at = running.model.gradient_fails_at = None
        running.losses, running.hidden, running.holds_hidden = [], None, False
        if event != PLAIN:
            gc.collect()  # what an exception has left in a cycle is no part of the next step


def _forward_and_backward(running: Running, event: str) -> None:
    running.announce()
    _make_ready(running, event)
    hooks = []
    if event == "forward hook raises":
        hooks.append(running.model.blocks[-1].register_forward_hook(_raise))
    try:
        loss = running.loss = running.step()  # that of the step before goes now, as in most loops
    finally:
        for hook in hooks:
            hook.remove()
    if event == WRITES and running.hidden is not None:
        with torch.no_grad():
            running.hidden.mul_(2)
    elif event == "two steps at once":
        running.announce()
        running.step().backward()  # type: ignore[no-untyped-call]
    if event == "two backwards":
        first = running.losses[0] if len(running.losses) > 1 else loss
        first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        running.losses[-1].backward()  # type: ignore[no-untyped-call]
    elif event == "backward inside autocast":
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()  # type: ignore[no-untyped-call]
    elif event != "no backward":
        loss.backward()  # type: ignore[no-untyped-call]
    running.loss = loss.detach()


def _make_ready(running: Running, event: str) -> None:
    """What is other than in a plain step, before its forward."""
    model, rows = running.model, running.program.rows
    middle = len(model.blocks) // 2
    if event == "forward raises":
        model.fails_at = middle
    elif event == "backward hook raises":
        model.gradient_fails_at = middle
    elif event == WRITES:
        running.holds_hidden = not running.autocast  # under it a copy is saved
    elif event in ("smaller batch", "larger batch"):
        running.keeps_state = False
        running.batch = [
            part.repeat(2, 1)[: rows - 2 if event == "smaller batch" else rows + 5] for part in running.batch
        ]
    elif event == "a block left out":
        model.order = [index for index in model.order if index != middle]
    elif event == LAYERS_DRAWN:
        model.order = [index for index in model.order if running.chance.random() < 0.7]
    elif event == "a block twice":
        model.order = [*range(middle + 1), *range(middle, len(model.blocks))]
    elif event == "a forward thrown away":
        model(running.batch[0])
    elif event == "an evaluation between":
        with torch.no_grad():
            model.eval()(running.batch[0])
        model.train()
    elif event == "autocast switched":
        running.autocast = not running.autocast


def _raise(*_: object) -> None:
    raise AskedTo("in a hook of forward")


def first_step(running: Running) -> list[Snapshot]:
    """The first step, its backward again where a value was lost: without checkpoints that gives the same."""
    torch.manual_seed(running.program.seed + 1)
    loss = running.loss = running.step()
    for _ in range(MOST_LOST):
        running.optimizer.zero_grad(set_to_none=True)
        try:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            break
        except SpillError:
            continue
    running.optimizer.step()
    return [snapshot(running)]


def snapshot(running: Running) -> Snapshot:
    """Copies of the loss, every gradient, parameter, buffer, kept state and generator. No meter sees them."""
    with _disable_current_modes(), aside():
        model = running.model
        found: Snapshot = {"loss": running.loss, "state": running.state, "generator": torch.get_rng_state()}
        found |= {f"parameter {name}": parameter.data for name, parameter in model.named_parameters()}
        found |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
        found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        for name, module in model.named_modules():
            if isinstance(getattr(module, "generator", None), torch.Generator):
                found[f"generator {name}"] = module.generator.get_state()
        copies = {name: None if tensor is None else tensor.detach().clone() for name, tensor in found.items()}
        leave_out(copy for copy in copies.values() if copy is not None)
        return copies


def differences(wanted: list[Snapshot], found: list[Snapshot]) -> list[str]:
    """What differs bitwise in the first step in which anything does: the first tensor of each kind."""
    for step, (left, right) in enumerate(zip(wanted, found, strict=True)):
        names = [name for name in left if not _same(left[name], right[name])]
        first = {name.split()[0]: name for name in reversed(names)}
        if first:
            return [f"{name} is not as in-core from step {step} on" for name in first.values()]
    return []


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
