"""Loops whose steps take one path or another at random: one plan, of the longest path, serves them all, in budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poochplan.runtime.arena.library import is_loaded
from poochplan.runtime.session import Session
from tests.online.runs import run_auto, run_plain
from tests.online.trainings import Training, stepping
from tests.runtime.nets import Net
from tests.runtime.served import needs_compiler

WIDTH, BLOCKS, TURNS = 32, 4, 110
Path_ = Callable[[random.Random], list[int]]


def dropped(chance: random.Random) -> list[int]:
    """LayerDrop: now and then a block is left out."""
    left = chance.randrange(BLOCKS) if chance.random() < 0.25 else -1
    return [number for number in range(BLOCKS) if number != left]


def repeated(chance: random.Random) -> list[int]:
    """Now and then the first block runs once more: the longest path is the rare one."""
    return [*range(BLOCKS), *([0] if chance.random() < 0.4 else [])]


def exited(chance: random.Random) -> list[int]:
    """Early exit: now and then only the first half runs."""
    return list(range(BLOCKS // 2 if chance.random() < 0.25 else BLOCKS))


def training_of(path: Path_, *, has_term: bool = False) -> Callable[[], Training]:
    """``has_term``: now and then the loss has one more term."""

    def make() -> Training:
        chance = random.Random(5)
        blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

        def forward(its: Any, batch: torch.Tensor) -> torch.Tensor:
            for number in path(chance):
                batch = batch + its.blocks[number](batch)
            return its.head(batch)

        model = Net(forward, blocks=blocks, head=nn.Linear(WIDTH, 8))
        batch = torch.randn(512, WIDTH)

        def loss(_: int) -> torch.Tensor:
            found = model(batch)
            value: torch.Tensor = found.square().mean()
            return value + torch.tanh(found).exp().mean() if has_term and chance.random() < 0.4 else value

        return stepping(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))

    return make


LOOPS = {
    "a block left out": training_of(dropped),
    "a block run again": training_of(repeated),
    "an early exit": training_of(exited),
    "one more term": training_of(lambda _: list(range(BLOCKS)), has_term=True),
}


@needs_compiler
@pytest.mark.parametrize("what", LOOPS)
def test_steps_of_every_path_are_within_the_budget_once_the_longest_one_is_planned_and_bitwise_plain(
    what: str, tmp_path: Path
) -> None:
    plain = run_plain(LOOPS[what], TURNS)
    budget, peaks, lacking = int(0.75 * plain.peak_bytes), list[int | None](), list[int]()

    def look(session: Session) -> None:
        peaks.append(session.last.peak_bytes)
        arena = session.arena
        lacking.append(-1 if arena is None else arena.missed)

    found = run_auto(LOOPS[what], budget, tmp_path, TURNS, look=look)
    assert found.equals(plain)
    late = [peak for peak in peaks[-30:] if peak is not None]
    assert len(late) == 30
    assert max(late) <= budget
    assert max(found.peaks[-30:]) <= budget
    assert max(plain.peaks[-30:]) > budget
    if is_loaded():
        assert set(lacking[-30:]) == {0}, "all blocks come from the arena, whatever the path"
    assert found.session.total.fallback_kinds.get("diverged", 0) <= 2
