"""Training loops as people write them, without poochplan: what is made before the loop, and one turn of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.runtime.nets import Net

WIDTH, ROWS, CLASSES = 32, 1024, 10
Models = nn.Module | Mapping[str, nn.Module]
Losses = Sequence[float]
Turn = Callable[[int], Losses]
Around = Callable[[int], contextlib.AbstractContextManager[Any]]


@dataclass
class Training:
    """``turn(number)`` is one turn of the loop, and gives its losses. ``also``: other tensors that it trains."""

    models: Models
    optimizers: Sequence[torch.optim.Optimizer]
    turn: Turn
    also: Callable[[], Sequence[torch.Tensor]] = field(default=lambda: ())

    @property
    def model(self) -> nn.Module:
        """The only one."""
        assert isinstance(self.models, nn.Module)
        return self.models

    def each(self, turn: Callable[[Turn, int], Losses]) -> Training:
        """With other turns, which are given the turn that each is instead of."""
        inner = self.turn
        self.turn = lambda number: turn(inner, number)
        return self

    def state(self) -> list[torch.Tensor]:
        """Copies of all that training changes: parameters, gradients, buffers, optimizers' states, generator."""
        models = self.models.values() if isinstance(self.models, Mapping) else [self.models]
        found: list[torch.Tensor] = []
        for model in models:
            found += [*model.parameters(), *model.buffers()]
            found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for optimizer in self.optimizers:
            found += [one for one in tree_leaves(optimizer.state_dict()["state"]) if isinstance(one, torch.Tensor)]
        return [*(tensor.detach().clone() for tensor in (*found, *self.also())), torch.get_rng_state()]


def blocks(count: int = 6, *between: Callable[[], nn.Module]) -> nn.Sequential:
    """An MLP whose saved values are much larger than its parameters."""
    parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), *(make() for make in between), nn.GELU()) for _ in range(count))
    return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES))


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def stepping(
    model: nn.Module,
    forward: Callable[[int], torch.Tensor | Iterable[torch.Tensor]],
    *optimizers: torch.optim.Optimizer,
    zeroes_last: bool = False,
    update: Callable[[], object] | None = None,
) -> Training:
    """Zero, forward, backward, step. ``forward`` gives the loss, by the turn, or several that come one by one.
    ``update`` is there in place of the optimizers' steps.
    """
    own = optimizers if optimizers or update is not None else (adam(model),)

    def turn(number: int) -> Losses:
        losses = []
        for optimizer in own if not zeroes_last else ():
            optimizer.zero_grad()
        given = forward(number)
        for loss in [given] if isinstance(given, torch.Tensor) else given:
            loss.backward()
            losses.append(loss.item())
        if update is not None:
            update()
        for optimizer in own:
            if update is None:
                optimizer.step()
            if zeroes_last:
                optimizer.zero_grad()
        return losses

    return Training(model, own, turn)


def plain(model: nn.Module, around: Around = lambda _: contextlib.nullcontext()) -> Training:
    """The same batch in each turn. ``around`` gives what is around forward, by the turn."""
    data = batch()

    def forward(number: int) -> torch.Tensor:
        with around(number):
            return loss_of(model, data)

    return stepping(model, forward)


def dropout_and_batch_norm() -> Training:
    return plain(blocks(6, lambda: nn.BatchNorm1d(WIDTH), lambda: nn.Dropout(0.1)))


class WithHidden(nn.Module):
    """Returns, as language models do, hidden states beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = blocks(5), nn.Sequential(nn.Linear(CLASSES, WIDTH), blocks(3))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.head[0](self.body(rows))
        return self.head[1](hidden), hidden


def outputs_held(*, until: Literal["turn", "next"] = "turn") -> Training:
    """The outputs are held until the turn is over, or until the next forward is."""
    model, held = WithHidden(), list[object]()
    optimizer, (rows, classes) = adam(model), batch()

    def turn(_: int) -> Losses:
        optimizer.zero_grad()
        outputs = model(rows)
        held[:] = [outputs] if until == "next" else []
        loss = nn.functional.cross_entropy(outputs[0], classes)
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Training(model, [optimizer], turn)


def autocast() -> Training:
    return plain(blocks(), lambda _: torch.autocast("cpu", torch.bfloat16))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before, self.inner, self.rest = nn.Linear(WIDTH, WIDTH), blocks(3), nn.Sequential(blocks(4))
        self.after = nn.Linear(CLASSES, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = checkpoint(self.inner, self.before(rows), use_reentrant=self.reentrant)
        return self.rest(self.after(rows))


def checkpointing_inside() -> Training:
    return plain(Checkpointed())


def compiled_blocks() -> Training:
    model = blocks(6)
    for block in list(model)[1:4]:
        block.compile(backend="aot_eager")
    return plain(model)


def accumulation() -> Training:
    """Four micro-batches, the last one smaller."""
    model, data = blocks(), [batch(), batch(), batch(), batch(ROWS // 2)]
    return stepping(model, lambda _: (loss_of(model, part) / len(data) for part in data), zeroes_last=True)


def clipping_and_scheduler() -> Training:
    model = blocks()
    optimizer, data = adam(model), batch()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()

    return stepping(model, lambda _: loss_of(model, data), optimizer, update=update)


def skipping_scaler() -> Training:
    """A GradScaler that leaves out the optimizer's step wherever a gradient is infinite."""
    model = blocks()
    optimizer, data = adam(model), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def forward(number: int) -> torch.Tensor:
        return scaler.scale(loss_of(model, data) * (float("inf") if number % 5 in (0, 3) else 1.0))

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    return stepping(model, forward, optimizer, update=update)


def two_passes() -> Training:
    """As sharpness-aware minimisation: gradients, weights moved, gradients there, weights moved back, step."""
    model = blocks()
    optimizer, data = adam(model), batch()

    def moved(sign: float, by: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, much in zip(model.parameters(), by, strict=True):
                parameter.add_(much, alpha=sign)

    def turn(_: int) -> Losses:
        first = loss_of(model, data)
        first.backward()
        by = [parameter.grad * 0.05 for parameter in model.parameters() if parameter.grad is not None]
        moved(1, by)
        optimizer.zero_grad()
        second = loss_of(model, data)
        second.backward()
        moved(-1, by)
        optimizer.step()
        optimizer.zero_grad()
        return [first.item(), second.item()]

    return Training(model, [optimizer], turn)


def two_optimizers() -> Training:
    model, data = blocks(), batch()
    body = torch.optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9)
    return stepping(model, lambda _: loss_of(model, data), body, adam(model[3:]), zeroes_last=True)


def gan() -> Training:
    """As DCGAN: what the generator has saved lives across the discriminator's step."""
    wide = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)) for _ in range(4)))
    generator = nn.Sequential(wide, nn.Linear(WIDTH, WIDTH))
    judge = nn.Sequential(blocks(4), nn.Linear(CLASSES, 1))
    for_generator, for_judge = adam(generator), adam(judge)
    real = batch()[0]
    ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    judged = nn.functional.binary_cross_entropy_with_logits

    def turn(_: int) -> Losses:
        for_judge.zero_grad()
        on_real = judged(judge(real), ones)
        on_real.backward()
        fake = generator(torch.randn(ROWS, WIDTH))
        on_fake = judged(judge(fake.detach()), zeros)
        on_fake.backward()
        for_judge.step()
        for_generator.zero_grad()
        fooled = judged(judge(fake), ones)
        fooled.backward()
        for_generator.step()
        return [on_real.item(), on_fake.item(), fooled.item()]

    return Training({"generator": generator, "judge": judge}, [for_generator, for_judge], turn)


def with_lbfgs(data: tuple[torch.Tensor, torch.Tensor], *, max_iter: int, history_size: int) -> Training:
    model = blocks(4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=max_iter, history_size=history_size)

    def turn(_: int) -> Losses:
        losses = []

        def evaluated() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(evaluated)
        return losses

    return Training(model, [optimizer], turn)


def averaged_copy() -> Training:
    model = blocks()
    copy = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def turn(inner: Turn, number: int) -> Losses:
        losses = inner(number)
        copy.update_parameters(model)
        return losses

    training = plain(model).each(turn)
    training.also = lambda: list(copy.parameters())
    return training


def evaluated_between() -> Training:
    """Evaluation without gradients between steps, and a forward with gradients that nobody uses."""
    model = blocks(6, lambda: nn.Dropout(0.1))
    training, held_out = plain(model), batch()

    def turn(inner: Turn, number: int) -> Losses:
        losses = list(inner(number))
        if number % 3 == 1:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, held_out).item())
            model.train()
        if number % 5 == 2:
            losses.append(loss_of(model, held_out).item())
        return losses

    return training.each(turn)


def stumbling(error: Callable[[], BaseException], at: tuple[int, ...]) -> Training:
    """Forward raises in these turns; the loop goes on with the next."""
    first, second, errors = blocks(3), blocks(3), list[BaseException]()

    def stumble(_: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return rows * 1.5

    def turn(inner: Turn, number: int) -> Losses:
        if number in at:
            errors.append(error())
            try:
                inner(number)
            except (ValueError, KeyboardInterrupt):
                return []
        return inner(number)

    return plain(nn.Sequential(first, Net(stumble), nn.Linear(CLASSES, WIDTH), second)).each(turn)


def lengths() -> Training:
    """Sequences of several lengths; the longest comes first, and most often."""
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), blocks())
    data = {length: torch.randint(CLASSES, (32, length)) for length in (16, 24, 32)}

    def forward(number: int) -> torch.Tensor:
        tokens = data[(32, 32, 24, 32, 16)[number % 5]]
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return stepping(model, forward)


def data_set_in_one_tensor() -> Training:
    model = blocks()
    rows, labels = batch(8 * ROWS)

    def forward(number: int) -> torch.Tensor:
        part = slice(ROWS * (number % 8), ROWS * (number % 8 + 1))
        return loss_of(model, (rows[part], labels[part]))

    return stepping(model, forward)


TRAININGS: dict[str, Callable[[], Training]] = {
    "plain": dropout_and_batch_norm,
    "accumulation": accumulation,
    "clipping_and_scheduler": clipping_and_scheduler,
    "skipping_scaler": skipping_scaler,
    "two_passes": two_passes,
    "two_optimizers": two_optimizers,
    "gan": gan,
    "closure": lambda: with_lbfgs(batch(), max_iter=3, history_size=3),
    "averaged_copy": averaged_copy,
    "evaluated_between": evaluated_between,
    "raising": lambda: stumbling(lambda: ValueError("a bad batch"), (4, 15)),
    "interrupted": lambda: stumbling(KeyboardInterrupt, (5, 16)),
    "lengths": lengths,
    "data_set_in_one_tensor": data_set_in_one_tensor,
    "checkpointing_inside": checkpointing_inside,
    "compiled_blocks": compiled_blocks,
    "autocast": autocast,
}
