"""Hundreds of steps (a thousand when deep), plain ones and ones that diverge, fail or only evaluate: nothing grows."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.devices.transfers import Copy
from poochplan.runtime.engine.saved_value import SavedHandle, SavedValue
from poochplan.runtime.session import Session
from tests.depth import tries
from tests.runtime.nets import equal, snapshot, taken
from tests.runtime.random_plans import random_plan

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread")]

STEPS = tries(day=300, deep=1000)
ROUND = 10
"""Steps after which the mixed test has done each of its kinds; counted at the end of rounds only."""
WARM_ROUNDS = STEPS // ROUND // 5


class Net(nn.Module):
    """A step of a few milliseconds, in which storages are large enough (128 KiB) to be mappings of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.fails = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            batch = batch + self.drop(torch.nn.functional.gelu(layer(batch)))
            if self.fails and index == 0:
                raise KeyError("asked to fail")
        return batch


class Counts(NamedTuple):
    """What must not grow."""

    tensors: int
    values: int
    handles: int
    copies: int
    threads: int
    files: int
    spill_bytes: int
    registered: int
    unplanned_bytes: int


def count(session: Session) -> Counts:
    gc.collect()
    things = [type(thing) for thing in gc.get_objects()]
    host = session._engine.host
    return Counts(
        sum(issubclass(kind, torch.Tensor) for kind in things),
        *(things.count(kind) for kind in (SavedValue, SavedHandle, Copy)),
        threads=threading.active_count(),
        files=len(list(Path("/proc/self/fd").iterdir())),
        spill_bytes=os.fstat(session._device.file.descriptor).st_size,
        registered=sum(one.storage() is not None for one in session._engine.tape.registered()),
        unplanned_bytes=sum(behind - first for first, behind in host.taken()) - host.planned_bytes,
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fresh() -> tuple[Net, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(512, 64)


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, optimizer, batch = fresh()
    profile = taken(lambda: model(batch).square().mean(), model, optimizer)
    found = random_plan(profile, 3)
    assert {value.decision for value in found.values} == set(Decision)
    return found


def train(model: Net, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def mixed_round(model: Net, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """Ten steps: a smaller batch, an exception in forward, an evaluation, two backwards of one graph, plain ones."""
    train(model, optimizer, batch[:256])
    train(model, optimizer, batch)
    model.fails = True
    with pytest.raises(KeyError):
        train(model, optimizer, batch)
    model.fails = False
    train(model, optimizer, batch)
    loss = model(batch).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    with torch.no_grad():
        model.eval()(batch)
    model.train()
    model(batch)  # a forward without a backward
    for _ in range(ROUND - 7):
        train(model, optimizer, batch)
    return train(model, optimizer, batch)


def plain_round(model: Net, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    for _ in range(ROUND - 1):
        train(model, optimizer, batch)
    return train(model, optimizer, batch)


@pytest.mark.parametrize("one_round", [plain_round, mixed_round])
def test_nothing_grows_over_many_steps_and_they_stay_exact(plan: Plan, one_round: object) -> None:
    model, optimizer, batch = fresh()
    torch.manual_seed(1)
    for _ in range(STEPS // ROUND):
        loss = one_round(model, optimizer, batch)
    reference = snapshot(model, loss)
    model, optimizer, batch = fresh()
    torch.manual_seed(1)
    counts, resident = [], []
    with poochplan.apply(plan, model, meter="never") as session:
        for index in range(STEPS // ROUND):
            loss = one_round(model, optimizer, batch)
            resident.append(resident_bytes())
            if index + 1 in (WARM_ROUNDS, STEPS // ROUND):
                counts.append(count(session))
        steps = session.report().total.steps
    assert steps >= STEPS
    assert equal([reference], [snapshot(model, loss)])
    assert counts[0] == counts[1]
    assert grown_bytes(resident[WARM_ROUNDS:]) <= allowed_bytes(resident[WARM_ROUNDS:])


def grown_bytes(resident: list[int]) -> float:
    """Four times what most fifths of the rounds grew by over the fifth before: a leak grows in all of them, while the
    kernel may fill up some huge pages (2 MiB each) of the process at any one moment.
    """
    fifth = len(resident) // 5
    medians = [statistics.median(resident[first : first + fifth]) for first in range(0, 5 * fifth, fifth)]
    return 4 * sorted(later - earlier for earlier, later in itertools.pairwise(medians))[1]


def allowed_bytes(resident: list[int]) -> float:
    """Three times the spread between neighbouring rounds, or four of Python's arenas (256 KiB each, which fill as
    objects of any kind move): a leaked value a round, of 128 KiB, would be more than twice that.
    """
    steps = [abs(later - earlier) for earlier, later in itertools.pairwise(resident)]
    return max(1 << 20, 3 * statistics.median(steps))
