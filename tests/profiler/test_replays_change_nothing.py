"""A replay that would change what was there before the step, or that raises, is found and never planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import poochplan
from poochplan.planner.planning import smallest_budget
from poochplan.runtime.replays.compiled_tape import serves
from tests.runtime.nets import Case, followed, taken

BATCH = torch.linspace(-2, 2, 16 * 8).reshape(16, 8)


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    """Operators of torch's own namespace, which is taken at its word, that do what their schemas do not say."""
    library = torch.library.Library("aten", "FRAGMENT")

    def counting(batch: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.detach().numpy().reshape(-1)[0] += 1  # moves no version counter
        return batch.sin()

    def passing(batch: torch.Tensor) -> torch.Tensor:
        batch.detach().numpy().reshape(-1)[0] *= 1.5
        return batch.cos()

    once: set[int] = set()

    def fickle(batch: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        if int(turn) in once:
            raise ValueError("runs once a step\nand no more")
        once.add(int(turn))
        return batch.sin()

    for name, signature, kernel in (
        ("poochplan_counting", "(Tensor batch, Tensor count) -> Tensor", counting),
        ("poochplan_passing", "(Tensor batch) -> Tensor", passing),
        ("poochplan_fickle", "(Tensor batch, Tensor turn) -> Tensor", fickle),
    ):
        library.define(name + signature)
        library.impl(name, kernel, "CPU")
    # Torch has these for CUDA alone; they write as those do, and declare as little.
    overriding = torch.library.Library("aten", "IMPL")
    for name in ("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"):
        overriding.impl(name, _gathered, "CPU")
    yield
    overriding._destroy()
    library._destroy()


def _gathered(
    batch: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
    counts: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    mean, invstd = means.mean(0), invstds.mean(0)
    running_mean.detach().lerp_(mean, momentum)
    running_var.detach().lerp_(invstd.pow(-2) - eps, momentum)
    return mean, invstd


@torch.library.custom_op("poochplan_tests::tallying", mutates_args=())
def _tallying(batch: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count[0] += 1
    return batch.sin()


Gate = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers of which the second's input is scaled by what ``gate`` makes of the first's output."""

    def __init__(self, gate: Gate | None = None, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate = gate or (lambda _, hidden: hidden.sigmoid())
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch).tanh()
        return self.last((self.second(hidden * self.gate(self, hidden)) * hidden).sin()).square().mean()


def _quietly(name: str, *arguments: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return getattr(torch.ops.aten, "poochplan_" + name)(*arguments)  # type: ignore[no-any-return]


def _tallies(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    """Counts in a buffer through an operator of another namespace, which is not taken at its word."""
    with torch.no_grad():
        return _tallying(hidden, net.count)


def _counts(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    """Counts in a buffer how often an operator ran, which the operator does not declare."""
    return _quietly("counting", hidden, net.count)


def _counts_in_a_slice(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    """The same in the middle of a buffer that other layers read parts of."""
    counted = _quietly("counting", hidden, net.count[16:20])
    return (counted * net.count[40:48].clone()).sigmoid()


def _changes_its_input(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    """Writes into a buffer that it then reads, through an operator that declares neither."""
    return hidden.detach() * _quietly("passing", net.drifting)


def _updates_statistics(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    """What SyncBatchNorm does with its statistics, called directly."""
    mean, invstd = torch.batch_norm_update_stats(hidden.detach(), net.mean, net.var, 0.1)
    return (hidden.detach() - mean) * invstd


def _gathers_statistics(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    """What it does where several processes take part."""
    batch = hidden.detach()
    mean, invstd = batch.mean(0), batch.var(0).rsqrt()
    both = torch.stack([mean, mean * 0.5]), torch.stack([invstd, invstd])
    mean, invstd = torch.batch_norm_gather_stats(batch, *both, net.mean, net.var, 0.1, 1e-5, 16)
    more, _ = torch.batch_norm_gather_stats_with_counts(batch, *both, net.mean, net.var, 0.1, 1e-5, net.counts)
    return (batch - mean) * invstd + more


def _counting() -> Net:
    return Net(_counts, count=torch.zeros(3))


def _counting_in_a_parameter() -> Net:
    net = Net(_counts)
    net.count = nn.Parameter(torch.zeros(2), requires_grad=False)  # takes no gradients
    return net


def _counting_in_an_input() -> Net:
    given = torch.zeros(5)  # of which the model knows nothing
    return Net(lambda _, hidden: _quietly("counting", hidden, given[1:]))


def _with_statistics(gate: Gate) -> Net:
    return Net(gate, mean=torch.zeros(8), var=torch.ones(8), counts=torch.tensor([16.0, 16.0]))


def _normalised(by: Callable[[nn.Module], nn.Module]) -> Net:
    """Spectral normalisation: its vectors are moved on in every forward, and read."""
    net = Net()
    net.second = by(net.second)
    return net


def _asks_the_teacher(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.teacher(hidden).tanh()


class Teacher(Net):
    """A student whose teacher, the mean of its weights over time, is updated within the step after it was asked."""

    def __init__(self) -> None:
        super().__init__(_asks_the_teacher)
        self.teacher = nn.Linear(8, 8).requires_grad_(requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().forward(batch)
        with torch.no_grad():
            for mean, weight in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
        return loss


class Queue(Net):
    """Momentum contrast: keys of earlier batches in a buffer, of which a part is replaced after it was read."""

    def __init__(self) -> None:
        super().__init__(queue=torch.randn(8, 32), place=torch.zeros(1, dtype=torch.long))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        queries, keys = self.first(batch).tanh(), self.second(batch).detach()
        likeness = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        loss = (likeness.sin() * self.queue.mean()).logsumexp(1).mean() + (self.last(queries) * keys).sum()
        at = int(self.place)
        self.queue[:, at : at + 16] = keys.T
        self.place[0] = (at + 16) % 32
        return loss


NETS: dict[str, Callable[[], Net]] = {
    "an operator of another namespace": lambda: Net(_tallies, count=torch.zeros(2)),
    "a buffer": _counting,
    "a slice": lambda: Net(_counts_in_a_slice, count=torch.ones(64)),
    "a parameter": _counting_in_a_parameter,
    "an input": _counting_in_an_input,
    "what it reads": lambda: Net(_changes_its_input, drifting=torch.ones(16, 8)),
    "statistics": lambda: _with_statistics(_updates_statistics),
    "gathered statistics": lambda: _with_statistics(_gathers_statistics),
    "teacher": Teacher,
    "queue": Queue,
    "spectral norm": lambda: _normalised(nn.utils.parametrizations.spectral_norm),
    "spectral norm, torch's older way": lambda: _normalised(nn.utils.spectral_norm),
}


@functools.cache
def _case(name: str) -> Case:
    return Case(lambda: (NETS[name](), lambda model: model(BATCH)))


@pytest.mark.parametrize("mode", ["run", "swap-all"])
@pytest.mark.parametrize("name", NETS)
def test_whatever_is_recomputed_losses_gradients_and_buffers_are_those_of_in_core(name: str, mode: str) -> None:
    profile = _case(name).profile(mode)
    plan = poochplan.plan(profile, budget=10**9, policy="recompute-all")
    assert "recompute" in {value.decision for value in plan.values}, "other values of the step"
    followed(_case(name), plan, 3)
    followed(_case(name), poochplan.plan(profile, budget=smallest_budget(profile), evaluations=100), 3)


@pytest.mark.parametrize("mode", ["run", "swap-all"])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a buffer", "would write count once more, which no operator declares"),
        ("a slice", "would write count once more, which no operator declares"),
        ("a parameter", "would write count once more, which no operator declares"),
        ("an input", "would write an input of the step once more, which no operator declares"),
        ("what it reads", "would write drifting once more, which no operator declares"),
        ("teacher", "needs teacher.weight as it was, and the step writes that after it was read"),
        ("queue", "needs queue as it was, and the step writes that after it was read"),
    ],
)
def test_the_reason_names_the_buffer_in_a_note(name: str, what: str, mode: str) -> None:
    profile = _case(name).profile(mode)
    (reason,) = {value.unreplayable for value in profile.values if what in value.unreplayable}
    (note,) = [note for note in profile.notes if note.endswith(reason)]
    assert "kept or swapped, never recomputed" in note


@pytest.mark.parametrize("name", ["statistics", "gathered statistics"])
def test_statistics_of_a_batch_norm_in_parts_need_no_refusal(name: str) -> None:
    profile = _case(name).profile()
    assert profile.notes == ()
    assert any("batch_norm" in op.name for op in profile.ops)


def test_a_value_replayed_from_one_that_cannot_be_is_not_blamed() -> None:
    class Chain(Net):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            hidden = self.first(batch) * self.gate(self, batch)  # saves what the operator gave
            return self.last(hidden.sin().sin().sin()).square().mean()

    model = Chain(_counts, count=torch.zeros(3))
    profile = taken(lambda: model(BATCH), model)
    marked = [value.name for value in profile.values if "once more" in value.unreplayable]
    assert len(marked) == 1


def test_the_verified_step_itself_is_not_changed_by_its_replays() -> None:
    model, seen = _counting(), []

    def step() -> torch.Tensor:
        seen.append(model.count.clone())
        return model(BATCH)  # type: ignore[no-any-return]

    taken(step, model)
    counts = [int(count[0]) for count in seen]
    assert sorted(set(counts)) == list(range(max(counts) + 1))  # one a step, whatever was replayed
    repeated = 4 if serves("cpu") else 3  # so many steps run from the state of the next
    assert len(counts) == len(set(counts)) + repeated


def test_a_replay_that_raises_is_a_refusal_and_the_step_goes_on_with_the_right_bits() -> None:
    model = Net(lambda net, hidden: _quietly("fickle", hidden, net.turn), turn=torch.zeros((), dtype=torch.long))
    turns = iter(range(1000))

    def step() -> torch.Tensor:
        model.turn.fill_(next(turns))
        return model(BATCH)  # type: ignore[no-any-return]

    held: list[torch.Tensor] = []
    model.first.weight.register_hook(held.append)
    profile = taken(step, model)
    (reason,) = {value.unreplayable for value in profile.values if "raised" in value.unreplayable}
    assert reason == "its replay raised ValueError: runs once a step"
    assert any(note.endswith(reason) for note in profile.notes)
    assert len(held) > 3
    assert all(torch.equal(held[0], gradient) for gradient in held)
