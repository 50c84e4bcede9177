"""Trainings of networks whose steps are not the same ops each time, or of kinds that the others are not. And backwards
of many kinds, whose gradients depend on how they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.runtime.nets import Net

from .trainings import (
    CLASSES,
    ROWS,
    WIDTH,
    Checkpointed,
    Losses,
    Training,
    Turn,
    adam,
    batch,
    blocks,
    checkpointing_inside,
    loss_of,
    plain,
    stepping,
)

Parts = tuple[torch.Tensor, torch.Tensor]


def noisy_or(hidden: int = 0, width: int = 64, rows: int = 256) -> Training:
    """Torch computes the gradient of ``prod(dim=)`` by another formula under a dispatch mode."""
    layers = [layer for _ in range(hidden) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), *layers, nn.Linear(width, 16), nn.Sigmoid())
    numbers = torch.Generator().manual_seed(1)

    def forward(_: int) -> torch.Tensor:
        return (1 - model(torch.randn(rows, WIDTH, generator=numbers))).prod(dim=1).mean()

    return stepping(model, forward, torch.optim.SGD(model.parameters(), lr=0.1))


class Gate(nn.Module):
    """Of its own class: dynamo gives up on code that many networks share, as that of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows).sigmoid()


def branching() -> nn.Module:
    """Gradients of three branches are added up, one of them strided."""

    def forward(its: Any, rows: torch.Tensor) -> torch.Tensor:
        for first, second in zip(its.first, its.second, strict=True):
            flipped = second(rows.t().contiguous().t())
            rows = rows + first(rows).tanh() + flipped * rows
        return its.head(rows)

    first, second = (nn.ModuleList(make() for _ in range(4)) for make in (lambda: nn.Linear(WIDTH, WIDTH), Gate))
    return Net(forward, first=first, second=second, head=nn.Linear(WIDTH, CLASSES))


def branches() -> Training:
    return plain(branching())


class Halves(torch.autograd.Function):
    """Two outputs, of which one is not used: its gradient is none."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, scale: float) -> Parts:
        ctx.save_for_backward(rows)
        ctx.set_materialize_grads(False)
        return rows * scale, rows.tanh()

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        assert first is None
        kept = 1 - rows.tanh().square()
        return second * kept, None


def custom_function() -> Training:
    first, second = blocks(3), nn.Sequential(nn.Linear(CLASSES, WIDTH), blocks(3))
    return plain(Net(lambda its, rows: second(Halves.apply(first(rows), 0.5)[1]), first=first, second=second))


class Stumbling(torch.autograd.Function):
    """Its backward raises where ``is_next``."""

    is_next = False

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Stumbling.is_next:
            raise ValueError("in the middle of backward")
        return gradient


def raising_in_backward() -> Training:
    """In turns in which ops are captured, timed and planned for."""

    def turn(inner: Turn, number: int) -> Losses:
        if number in (1, 6, 9):
            Stumbling.is_next = True
            try:
                inner(number)
            except ValueError:
                return []
            finally:
                Stumbling.is_next = False
        return inner(number)

    stone = Net(lambda _, rows: Stumbling.apply(rows))
    return plain(nn.Sequential(blocks(3), stone, nn.Linear(CLASSES, WIDTH), blocks(3))).each(turn)


def gradients_taken() -> Training:
    """By ``autograd.grad``, of which no node accumulates."""
    model = blocks()
    optimizer, data, parameters = adam(model), batch(), list(model.parameters())

    def turn(_: int) -> Losses:
        loss = loss_of(model, data)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return [loss.item()]

    return Training(model, [optimizer], turn)


def two_losses_of_one_graph() -> Training:
    model = blocks()
    optimizer, data = adam(model), batch()

    def turn(_: int) -> Losses:
        optimizer.zero_grad()
        scores = model(data[0])
        first, second = nn.functional.cross_entropy(scores, data[1]), scores.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return [first.item(), second.item()]

    return Training(model, [optimizer], turn)


def hooked() -> Training:
    """Gradients are changed by hooks of tensors and of nodes."""
    model = blocks()
    training, numbers = plain(model), [0]

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        numbers[0] += 1
        return gradient * 0.5

    def on_output(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(scaled)
        output.grad_fn.register_hook(lambda gradients, _: tuple(one if one is None else one * 2 for one in gradients))

    for block in list(model)[1:4]:
        block.register_forward_hook(on_output)
    for parameter in model.parameters():
        parameter.register_hook(scaled)
    return training


def optimizer_in_backward() -> Training:
    """Each parameter is stepped where its gradient is there."""
    model, data = blocks(), batch()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    return stepping(model, lambda _: loss_of(model, data), *optimizers.values(), update=lambda: None)


def compiled_beside_branches() -> Training:
    model: Any = branching()
    for one in model.second:
        one.compile(backend="aot_eager")
    return plain(model)


def compiled_in_checkpoint() -> Training:
    model = Checkpointed()
    model.inner = nn.Sequential(*(Gate() for _ in range(3)), nn.Linear(WIDTH, CLASSES))
    for one in list(model.inner)[:2]:
        one.compile(backend="aot_eager")
    return plain(model)


BACKWARDS: dict[str, Callable[[], Training]] = {
    "noisy_or": noisy_or,
    "noisy_or_with_a_plan": lambda: noisy_or(hidden=7, width=256, rows=1024),
    "branches": branches,
    "checkpoint": checkpointing_inside,
    "reentrant_checkpoint": lambda: plain(Checkpointed(reentrant=True)),
    "custom_function": custom_function,
    "raising_in_backward": raising_in_backward,
    "gradients_taken": gradients_taken,
    "two_losses_of_one_graph": two_losses_of_one_graph,
    "hooked": hooked,
    "optimizer_in_backward": optimizer_in_backward,
    "compiled_beside_branches": compiled_beside_branches,
    "compiled_in_checkpoint": compiled_in_checkpoint,
}


class Experts(nn.Module):
    """A mixture of experts: each row goes to one of them, so that shapes differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), blocks(4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.before(rows).tanh()
        chances = self.gate(rows).softmax(-1)
        chosen = chances.argmax(-1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(-1)
            mixed = mixed.index_add(0, own, expert(rows[own]) * chances[own, number : number + 1])
        return self.after(mixed)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        series = rows.view(32, ROWS // 32, WIDTH)
        lengths = torch.linspace(ROWS // 64, ROWS // 32, 32).long()
        packed = pack_padded_sequence(series, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[0].data)


def packed_recurrent() -> Training:
    model, rows = Packed(), torch.randn(ROWS, WIDTH)
    return stepping(model, lambda _: model(rows).square().mean())


class AttentionUNet(nn.Module):
    """As diffusion models have it: convolutions down and up with skips, attention at the bottom, a time embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Linear(1, width)
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._block(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.ModuleList(self._block(2 * width, width) for _ in range(2))
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def _block(width: int, to: int | None = None) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, to or width, 3, padding=1))

    def forward(self, images: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden, skips = self.into(images) + self.time(time)[:, :, None, None], []
        for block in self.down:
            hidden = hidden + block(hidden)
            skips.append(hidden)
            hidden = nn.functional.avg_pool2d(hidden, 2)
        rows = hidden.flatten(2).transpose(1, 2)
        hidden = hidden + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).view_as(hidden)
        for block in self.up:
            hidden = block(torch.cat([nn.functional.interpolate(hidden, scale_factor=2.0), skips.pop()], 1))
        return self.out(hidden)


def diffusion() -> Training:
    model, images = AttentionUNet(), torch.randn(4, 3, 32, 32)

    def forward(_: int) -> torch.Tensor:
        noise, time = torch.randn_like(images), torch.rand(4, 1)
        return nn.functional.mse_loss(model(images + time[:, :, None, None] * noise, time), noise)

    return stepping(model, forward)


def segmentation() -> Training:
    """MONAI's U-Net on patches of a volume that lives beside the step."""
    from monai.networks.nets import UNet  # takes seconds

    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,), num_res_units=1)
    volume = torch.randn(1, 1, 48, 48, 48)

    def forward(number: int) -> torch.Tensor:
        at = 4 * (number % 4)
        patch = volume[..., at : at + 32, at : at + 32, at : at + 32]
        return nn.functional.cross_entropy(model(patch), (patch[:, 0] > 0).long())

    return stepping(model, forward)


NETWORKS: dict[str, Callable[[], Training]] = {
    "mixture_of_experts": lambda: plain(Experts()),
    "packed_recurrent": packed_recurrent,
    "diffusion": diffusion,
    "segmentation": segmentation,
}
