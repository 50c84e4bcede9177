"""Loops whose values have other sizes in each step, which no input tells: a budget in bytes is kept by swapping, or the
excess is told; where it has room for all, the session rests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poochplan.runtime.arena.library import is_loaded
from poochplan.runtime.session import Session
from tests.online.runs import Run, run_auto, run_plain
from tests.online.trainings import Training, stepping
from tests.runtime.nets import Net

pytestmark = pytest.mark.filterwarnings(
    "ignore:poochplan. (no plan|a step without)", "ignore:The PyTorch API of nested"
)
WIDTH, LAYERS, TURNS, KNOWN_AT = 32, 10, 28, 16


def trained(layers: Callable[[], nn.Module], forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Training:
    model = Net(forward, layers=nn.ModuleList(layers() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return stepping(model, lambda _: model(torch.randn(256, WIDTH)).square().mean(), optimizer)


def experts() -> nn.Module:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))


def routed() -> Training:
    """Tokens go to one of two experts, or to none."""

    def forward(its: Any, rows: torch.Tensor) -> torch.Tensor:
        for first, second in its.layers:
            chance = torch.rand(len(rows))
            for expert, chosen in ((first, chance < 0.4), (second, chance > 0.5)):
                rows = rows.index_add(0, chosen.nonzero()[:, 0], expert(rows[chosen]))
        return rows

    return trained(experts, forward)


def packed() -> Training:
    """Sequences are put one behind the other, without padding."""

    def forward(its: Any, rows: torch.Tensor) -> torch.Tensor:
        tokens = rows[: 128 + int(torch.randint(128, ()))]
        for layer in its.layers:
            tokens = tokens + layer(tokens)
        return tokens

    return trained(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), forward)


def graphs() -> Training:
    """Messages along as many edges as the graph of the turn has."""

    def forward(its: Any, nodes: torch.Tensor) -> torch.Tensor:
        many = 200 + int(torch.randint(200, ()))
        origin, target = torch.randint(len(nodes), (2, many))
        for layer in its.layers:
            nodes = nodes + torch.zeros_like(nodes).index_add(0, target, layer(nodes[origin]))
        return nodes

    return trained(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), forward)


def dropped() -> Training:
    """Patches are left out at random, before attention."""

    def forward(its: Any, rows: torch.Tensor) -> torch.Tensor:
        tokens = rows[:128][torch.rand(128) < 0.7]
        for layer in its.layers:
            query, key, value = layer(tokens).chunk(3, 1)
            tokens = tokens + torch.softmax(query @ key.T, 1) @ value
        return tokens

    return trained(lambda: nn.Linear(WIDTH, 3 * WIDTH), forward)


LOOPS = {"routed tokens": routed, "packed sequences": packed, "graphs": graphs, "patches left out": dropped}


class Looked:
    """What a session did in each turn."""

    def __init__(self, what: str, share: float, cache: Path) -> None:
        self.plain, self.resting, self.told_peaks = run_plain(LOOPS[what], TURNS), list[bool](), list[int]()
        self.budget = int(share * self.plain.peak_bytes)
        with warnings.catch_warnings(record=True) as self.said:
            warnings.simplefilter("always")
            self.run: Run = run_auto(LOOPS[what], self.budget, cache, TURNS, look=self._look)

    def _look(self, session: Session) -> None:
        self.resting.append(session._attachment.is_resting)
        self.told_peaks.append(session.last.peak_bytes or 0)

    def says(self, words: str) -> int:
        return sum(words in str(one.message) for one in self.said)


needs_allocator = pytest.mark.skipif("not __import__('shutil').which('c++')", reason="live bytes are not counted")


@needs_allocator
@pytest.mark.parametrize("what", LOOPS)
def test_steps_that_vary_keep_within_a_budget_in_bytes_and_are_bitwise_plain(what: str, tmp_path: Path) -> None:
    found = Looked(what, 0.7, tmp_path)
    assert is_loaded()
    assert found.run.equals(found.plain)
    assert not found.run.session.plans
    assert max(found.run.peaks[KNOWN_AT:]) <= found.budget < max(found.plain.peaks[KNOWN_AT:])
    assert max(found.told_peaks[KNOWN_AT:]) <= found.budget
    assert not any(found.resting[KNOWN_AT:]), "the rule stays in force"
    assert found.says("are kept while the budget of") == 1
    assert found.says("a step without a plan took") == 0


@needs_allocator
@pytest.mark.parametrize("what", LOOPS)
def test_steps_that_vary_and_fit_the_budget_run_without_hooks(what: str, tmp_path: Path) -> None:
    found = Looked(what, 1.6, tmp_path)
    assert found.run.equals(found.plain)
    assert all(found.resting[-6:])
    assert found.run.session._engine.segment.report.out_bytes == 0


@needs_allocator
@pytest.mark.parametrize("what", LOOPS)
def test_a_budget_that_swapping_cannot_keep_is_told_once(what: str, tmp_path: Path) -> None:
    found = Looked(what, 0.1, tmp_path)
    assert found.run.equals(found.plain)
    assert max(found.run.peaks[KNOWN_AT:]) > found.budget
    assert found.says("a step without a plan took") == 1
