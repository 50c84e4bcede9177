"""Where no plan is in force and none is to come, a session rests: no hook of it is left, and bits are the plain ones.
A step that takes too much ends the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poochplan.torch_private.hooks import topmost_hooks
from tests.online.runs import opened, run_auto, run_plain
from tests.online.trainings import Training, gan, stepping
from tests.runtime.nets import Net
from tests.runtime.served import needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore:poochplan. no plan:RuntimeWarning")
WIDTH = 32


def rows(count: int = 128) -> torch.Tensor:
    return torch.randn(count, WIDTH)


def trained(model: nn.Module, forward: Callable[[int], Any]) -> Training:
    return stepping(model, forward, torch.optim.Adam(model.parameters(), lr=1e-3))


def routed() -> Training:
    """Each row goes to one of three experts: how many each gets is known inside alone."""
    experts, router = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(its: Any, batch: torch.Tensor) -> torch.Tensor:
        chosen = its.router(batch).argmax(1)
        parts = [torch.relu(one(batch[chosen == number])) for number, one in enumerate(its.experts)]
        return torch.cat(parts)

    model = Net(forward, experts=experts, router=router)
    return trained(model, lambda _: model(rows()).square().mean())


def packed() -> Training:
    embed, recurrent = nn.Linear(8, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(its: Any, batch: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        given = nn.utils.rnn.pack_padded_sequence(its.embed(batch), lengths, batch_first=True, enforce_sorted=False)
        return its.recurrent(given)[1][0]

    model = Net(forward, embed=embed, recurrent=recurrent)
    return trained(model, lambda _: model(torch.randn(8, 12, 8), torch.randint(3, 13, (8,))).square().mean())


def graphs() -> Training:
    """Messages along as many edges as the graph of the turn has."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(its: Any, nodes: torch.Tensor, adjacent: torch.Tensor) -> torch.Tensor:
        for layer in (its.first, its.second):
            origin, target = adjacent.nonzero(as_tuple=True)
            nodes = nodes + torch.zeros_like(nodes).index_add(0, target, layer(nodes[origin]).relu())
        return nodes

    model = Net(forward, first=first, second=second)
    return trained(model, lambda _: model(rows(24), torch.rand(24, 24) < 0.3).square().mean())


class Tagged(torch.Tensor):
    """A subclass, which no plan moves."""


def tagged() -> Training:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return trained(model, lambda _: model(rows().as_subclass(Tagged)).square().mean())


def small() -> Training:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    return trained(model, lambda _: model(rows()).square().mean())


def compiled() -> Training:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    whole = torch.compile(model, backend="eager")
    return trained(whole, lambda _: whole(rows()).square().mean())


LOOPS: dict[str, tuple[Callable[[], Training], str | int]] = {
    "routed tokens": (routed, "70%"),
    "packed sequences": (packed, "70%"),
    "graphs of several sizes": (graphs, "70%"),
    "what no plan moves": (tagged, "70%"),
    "a budget that nothing fits": (small, 1000),
    "a budget that holds everything": (small, "200%"),
    "compiled whole": (compiled, "70%"),
}


@pytest.mark.parametrize("what", LOOPS)
def test_a_loop_without_use_for_its_session_runs_without_hooks_and_is_bitwise_the_plain_one(
    what: str, tmp_path: Path
) -> None:
    make, budget = LOOPS[what]
    resting, hooked = list[bool](), list[Any]()

    def look(session: Any) -> None:
        resting.append(session._attachment.is_resting)
        model = session.model
        hooked.append((topmost_hooks(), len(model._forward_hooks)) if resting[-1] else None)

    found = run_auto(make, budget, tmp_path, 34, look=look, is_metered=False)
    assert found.equals(run_plain(make, 34, is_metered=False))
    assert resting[-4:] == [True] * 4
    assert set(hooked[-4:]) == {(None, 0)}
    assert found.session.total.steps == 34
    assert topmost_hooks() is None


class Growing:
    """A loop whose batches are larger from a turn on, of another shape or inside the model alone."""

    def __init__(self, *, inside: bool) -> None:
        self.inside, self.times = inside, 1

    def __call__(self) -> Training:
        layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

        def forward(its: Any, batch: torch.Tensor) -> torch.Tensor:
            return its.layers(batch.repeat(self.times if self.inside else 1, 1))

        model = Net(forward, layers=layers)

        def loss(number: int) -> torch.Tensor:
            self.times = 1 if number < 24 else 6
            return model(rows(1024 if self.inside else 1024 * self.times)).square().mean()

        return trained(model, loss)


@needs_compiler
@pytest.mark.parametrize("inside", [False, True], ids=["of other inputs", "inside"])
def test_a_step_above_the_budget_ends_the_rest_and_the_budget_is_kept_by_a_plan(inside: bool, tmp_path: Path) -> None:
    make, turns, resting = Growing(inside=inside), 60, list[bool]()
    plain = run_plain(make, turns)
    budget = int(0.75 * plain.peak_bytes)
    found = run_auto(make, budget, tmp_path, turns, look=lambda session: resting.append(session._attachment.is_resting))
    assert found.equals(plain)
    assert resting[23]
    assert not resting[-1]
    assert max(found.peaks[-6:]) <= budget
    assert max(plain.peaks[-6:]) > budget


def test_steps_of_two_optimizers_that_take_other_amounts_do_not_end_the_rest(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    training, resting = gan(), list[bool]()
    with opened(training, tmp_path, budget=1000) as session:
        for number in range(40):
            training.turn(number)
            session.wait_until_planned(60)
            resting.append(session._attachment.is_resting)
    assert all(resting[resting.index(True) :])
    assert not any("looked at again" in str(one.message) for one in recwarn)


@needs_compiler
def test_hooks_of_others_stay_where_they_are_when_a_rest_ends(tmp_path: Path) -> None:
    make = Growing(inside=False)
    training, packed = make(), list[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor

    with opened(training, tmp_path, budget=6 << 20) as session:
        number = 0
        while not session._attachment.is_resting and number < 24:
            training.turn(number)
            session.wait_until_planned(60)
            number += 1
        assert session._attachment.is_resting
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for turn in range(24, 30):
                training.turn(turn)
            found = topmost_hooks()
            assert found is not None
            assert found[0] is pack
        assert packed
        assert topmost_hooks() is None
        training.turn(30)
        assert not session._attachment.is_resting
    assert topmost_hooks() is None


def test_steps_that_are_announced_and_those_away_from_a_session_that_rests_are_plain(tmp_path: Path) -> None:
    training = small()
    with opened(training, tmp_path, budget="200%") as session:
        for number in range(30):
            session.step()
            training.turn(number)
            session.wait_until_planned(60)
        assert session._attachment.is_resting
        steps = session.total.steps
        with session.away():
            training.turn(30)
        session.step()
        training.turn(31)
    assert session.total.steps > steps
