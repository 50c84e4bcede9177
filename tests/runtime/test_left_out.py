"""Steps that run fewer layers than planned follow the plan of the longest path: bitwise, and within its bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.queries import saved_values
from poochplan.runtime.engine import audit
from poochplan.runtime.run_report import FallbackKind, StepReport
from poochplan.runtime.step_policies import marks
from tests.live_bytes import LiveBytes
from tests.runtime.besides import tight
from tests.runtime.detours import Step, fresh_model, gradients_of, profile_of, under
from tests.runtime.nets import our_warnings
from tests.runtime.random_plans import decided, random_plan
from tests.runtime.served import needs_compiler

ROWS = torch.randn(96, 32, generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(4))


class Paths(nn.Module):
    """Networks whose step names the layers that it runs, in ``path``."""

    longest: Sequence[int]
    path: Sequence[int]

    @classmethod
    def step(cls, path: Sequence[int]) -> Step:
        def step(model: nn.Module) -> torch.Tensor:
            model.path = path
            return model(cls.given()).square().mean()

        return step

    @staticmethod
    def given() -> torch.Tensor:
        return ROWS


class Dropped(Paths):
    """LayerDrop over blocks that differ in width, each with dropout."""

    longest = range(4)
    widths: Sequence[int] = (64, 128, 64, 96)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, wide), nn.GELU(), nn.Dropout(0.2), nn.Linear(wide, 32))
            for wide in self.widths
        )
        self.head = nn.Linear(32, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            rows = rows + self.blocks[number](rows)
        return self.head(rows)


class Equal(Dropped):
    """The same with blocks of one look."""

    widths = (64,) * 4


class Bottleneck(nn.Module):
    """Its result is saved by its ReLU, and again by the next block's convolution."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, padding=1)
        self.norm = nn.BatchNorm2d(wide)
        self.short = nn.Conv2d(channels, wide, 1) if channels != wide else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.second(torch.relu(self.first(images)))) + self.short(images))


class Stages(Paths):
    """Stochastic depth of a convolutional network of two stages; the first block of each always runs."""

    longest = range(6)

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleList(Bottleneck(3 if not number else 8, 8) for number in range(3))
        self.two = nn.ModuleList(Bottleneck(8 if not number else 16, 16) for number in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            images = (*self.one, *self.two)[number](images)
        return self.head(images.mean((2, 3)))

    @staticmethod
    def given() -> torch.Tensor:
        return IMAGES


class Iterated(Paths):
    """One layer for as many times as the step says: the same values, again and again."""

    longest = (0,) * 5

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)), nn.Linear(32, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for _ in self.path:
            rows = rows + self.cell(rows)
        return self.head(rows)


class Exits(Paths):
    """Every layer that runs has an exit of its own, whose outcomes are added: what is deep may not be reached."""

    longest = range(4)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(4))
        self.exits = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(96, 4)
        for number in self.path:
            rows = self.layers[number](rows)
            found = found + self.exits[number](rows)
        return found


PATHS: dict[type[Paths], list[Sequence[int]]] = {
    Dropped: [one for many in (3, 2) for one in combinations(range(4), many)],
    Stages: [(0, 1, 3, 4, 5), (0, 2, 3, 4, 5), (0, 1, 2, 3, 5), (0, 1, 2, 3, 4), (0, 3, 5), (0, 3)],
    Iterated: [(0,) * many for many in (4, 3, 1)],
    Exits: [range(3), range(2), range(1)],
}
NETWORKS = pytest.mark.parametrize("network", PATHS, ids=lambda one: one.__name__)


@functools.cache
def plans_of(network: type[Paths]) -> list[Plan]:
    """One at the smallest budget, and random ones that swap, replay or mix."""
    profile = profile_of(network, network.step(network.longest))
    mixes = (0, 1, 0), (0, 0, 1), (1, 2, 2), (1, 2, 2)
    drawn = [random_plan(profile, seed, mix) for seed, mix in enumerate(mixes)]
    return [tight(profile), *drawn]


@NETWORKS
def test_a_step_that_leaves_out_layers_is_bitwise_the_plain_one_and_is_not_told_to_differ(network: type[Paths]) -> None:
    steps = [network.step(path) for path in (network.longest, *PATHS[network], network.longest)]
    for plan in plans_of(network):
        reports, told = under(plan, network, steps)
        left = {kind for report in reports for kind in report.last_step.fallback_kinds}
        assert "diverged" not in left
        assert not [text for text in told if "diverged" in text]
        assert reports[-1].steps_followed == len(steps)


@NETWORKS
def test_the_same_once_layers_are_known_by_their_parameters(
    network: type[Paths], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only some layers are recorded, since only they have values that are recomputed."""
    monkeypatch.setattr(marks, "LEARNED_IN", 2)
    steps = [network.step(path) for path in (network.longest, *PATHS[network], *PATHS[network], network.longest)]
    keep, recompute = Decision.KEEP, Decision.RECOMPUTE
    late = decided(profile_of(network, network.step(network.longest)), [*[keep] * 9, *[recompute] * 9])
    for plan in (plans_of(network)[0], plans_of(network)[3], late):
        reports, told = under(plan, network, steps)
        assert not [text for text in told if "diverged" in text or "recomputed" in text]
        assert not any(report.last_step.fallbacks for report in reports[1:])


def steps_of(plan: Plan, paths: Sequence[Sequence[int]]) -> list[StepReport]:
    """A report of each step; all are bitwise those in-core."""
    reports, _ = under(plan, Equal, [Equal.step(path) for path in paths], arena="off", on_audit="off")
    return [report.last_step for report in reports]


LEARNING = [Equal.longest, (0, 1, 3)] * 5
"""Enough steps for layers to be known by their parameters."""


def plan_of_one(block: int, wish: Decision) -> Plan:
    """Of equal blocks, where values of one block alone do not stay."""
    profile = profile_of(Equal, Equal.step(Equal.longest))
    layers = [profile.values[index].layer for index in saved_values(profile)]
    return decided(profile, [wish if layer.startswith(f"blocks.{block}.") else Decision.KEEP for layer in layers])


@pytest.mark.parametrize("block", [0, 2])
def test_of_equal_layers_a_missing_one_takes_its_own_moves_with_it(block: int) -> None:
    """Without its parameters the layer behind it would have its decisions."""
    without = [number for number in Equal.longest if number != block]
    lacks_another = [number for number in Equal.longest if number != 3 - block]
    whole, short, other = steps_of(
        plan_of_one(block, Decision.SWAP), [*LEARNING, Equal.longest, without, lacks_another]
    )[-3:]
    assert short.out_bytes == short.in_bytes == 0
    assert whole.out_bytes == other.out_bytes > 0


def test_behind_a_missing_layer_the_first_op_is_recorded_too() -> None:
    """Once it saves its parameter it runs already."""
    short = steps_of(plan_of_one(3, Decision.RECOMPUTE), [*LEARNING, (0, 1, 3), (0, 3)])[-2:]
    assert [step.fallbacks for step in short] == [0, 0]
    assert all(step.replayed_values for step in short)


def test_layers_that_come_in_any_order_are_not_known_by_their_parameters() -> None:
    plan = plan_of_one(1, Decision.SWAP)
    found = steps_of(plan, [Equal.longest, (3, 1, 0), (0, 2, 1), (2, 0, 3), *LEARNING, (2, 1, 0), (3, 0), (3, 0)])
    assert not sum(step.fallbacks for step in found)


def test_an_order_that_comes_late_leaves_the_plan_once_at_most() -> None:
    found = steps_of(plan_of_one(1, Decision.SWAP), [*LEARNING, (3, 1, 0), (3, 1, 0), (2, 0), (1, 0)])
    assert sum(step.fallbacks for step in found) <= 1


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_kept_leaves_too_if_a_step_leaves_its_plan_where_steps_vary(is_known: bool) -> None:
    """A longer path that comes for the first time, behind shorter ones."""
    plan = decided(profile_of(Equal, Equal.step(range(3))), [Decision.KEEP])
    before = [range(3), (0, 2) if is_known else range(3), range(3)]
    last = steps_of(plan, [*before, Equal.longest])[-1]
    assert last.fallback_kinds == {FallbackKind.DIVERGED: 1}
    kept_bytes = sum(value.size_bytes for value in plan.values if not value.why)
    assert (last.out_bytes >= kept_bytes) is is_known


def peak_of(plan: Plan, network: type[Paths], make: Callable[[Paths], torch.Tensor]) -> int:
    """Most live bytes of a step under the plan, by the outside meter."""
    model = fresh_model(network)
    with LiveBytes(*model.parameters(), *model.buffers()) as meter, poochplan.apply(plan, model):
        for _ in range(2):
            meter.restart()
            gradients_of(model, make(model))
    return meter.peak


@NETWORKS
def test_a_step_that_leaves_out_layers_takes_what_the_whole_one_takes_and_at_most_one_op_more(
    network: type[Paths],
) -> None:
    """What is planned in layers that it leaves out is done at the first point behind them, so an op may run before."""
    plan = plans_of(network)[0]
    largest = max(value.size_bytes for value in plan.values)
    for path, more in ((network.longest, 0), *((path, largest) for path in PATHS[network])):
        assert peak_of(plan, network, network.step(path)) <= plan.budget_bytes + more, path


@needs_compiler
@pytest.mark.parametrize("wish", [Decision.SWAP, Decision.RECOMPUTE])
def test_what_it_has_released_and_nothing_has_displaced_is_found_again_without_a_copy_or_a_replay(
    wish: Decision,
) -> None:
    """Under an arena: where layers are missing, nothing comes to some of the places."""
    plan = decided(profile_of(Dropped, Dropped.step(Dropped.longest)), [wish])
    brought = {arena: brought_back(plan, arena) for arena in ("on", "off")}
    assert brought["on"][(0, 1, 2, 3)] == brought["off"][(0, 1, 2, 3)]
    assert all(brought["on"][path] < brought["off"][path] for path in SHORT)


SHORT: list[tuple[int, ...]] = [(0, 1), (0,)]


def brought_back(plan: Plan, arena: Literal["on", "off"]) -> dict[tuple[int, ...], int]:
    """Bytes copied back and values replayed, in the last step of each path; all steps are bitwise the plain ones."""
    found, paths = dict[tuple[int, ...], int](), [*[tuple(Dropped.longest)] * 5, *SHORT * 2, (0, 1, 2, 3), (0, 2, 3)]
    plain, model = fresh_model(Dropped), fresh_model(Dropped)
    torch.manual_seed(7)
    wanted = [gradients_of(plain, Dropped.step(path)(plain)) for path in paths]
    torch.manual_seed(7)
    with poochplan.apply(plan, model, arena=arena, on_audit="off") as session:
        for path, gradients in zip(paths, wanted, strict=True):
            assert all(map(torch.equal, gradients, gradients_of(model, Dropped.step(path)(model))))
            last = session.report().last_step
            assert last.fallbacks == 0
            found[path] = last.in_bytes + last.replayed_values
    return found


@needs_compiler
def test_a_single_step_with_more_layers_than_planned_uses_the_arena_and_its_excess_is_told() -> None:
    """No meter is certain of it, and no step like it may come again."""
    short, model = range(2), fresh_model(Dropped)
    plan = poochplan.plan(profile_of(Dropped, Dropped.step(short)), "90%")
    peaks = []
    for arena in ("auto", "off"):
        with our_warnings() as told, poochplan.apply(plan, model, arena=arena) as session:
            for path in [*[short] * 6, Dropped.longest]:
                gradients_of(model, Dropped.step(path)(model))
            peaks.append(session.last.peak_bytes)
        assert len([text for text in told if "has left its plan took up to" in text]) == 1, told
    of_arena, without = peaks
    assert plan.budget_bytes < of_arena < without + plan.prediction.arena_bytes / 4


def test_a_step_that_leaves_out_layers_is_an_error_where_any_other_step_is() -> None:
    plan, model = plans_of(Dropped)[0], fresh_model(Dropped)
    with poochplan.apply(plan, model, on_divergence="error") as session:
        with pytest.raises(poochplan.DivergenceError, match="diverged from the plan"):
            Dropped.step((0, 1, 3))(model)
        gradients_of(model, Dropped.step(Dropped.longest)(model))
        assert session.report().last_step.fallbacks == 0


class Rounded(nn.Module):
    """Rounds its own result or its input behind autograd's back, if ``writes`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(32, 32), ""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = torch.sigmoid(self.linear(rows))
        written = {"result": found, "input": rows}.get(self.writes)
        if written is not None:
            np.round(written.detach().numpy(), 1, out=written.detach().numpy())
        return found.sin()


class Alike(Paths):
    """Blocks of one look, so that each may stand for another."""

    longest = range(4)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Rounded() for _ in self.longest), nn.Linear(32, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            rows = rows + self.blocks[number](rows)
        return self.head(rows)


def silent_steps(plan: Plan, paths: Sequence[Sequence[int]], writer: int, writes: str) -> list[int]:
    """The steps that were wrong before the audit has told it. The block begins to write with the fourth."""
    plain, silent = fresh_model(Alike), list[int]()
    with our_warnings() as told, poochplan.apply(plan, model := fresh_model(Alike), arena="off"):
        for number, path in enumerate(paths):
            for one in (plain, model):
                one.blocks[writer].writes = writes if number >= LATE_FROM else ""
            wanted, found = (gradients_of(one, Alike.step(path)(one)) for one in (plain, model))
            if told:
                break
            silent += [number] * (not all(map(torch.equal, wanted, found)))
    assert any("the audit found" in text for text in told) or not silent, (writer, silent)
    return silent


LATE_FROM, WARM_UP = 3, (Alike.longest, (0, 1, 3), (0, 2, 3))
IN_TURN = [(0, 1, 3), (0, 2, 3)], [(0, 1, 2), (2, 3), (0, 3)]
MIXED = Decision.RECOMPUTE, Decision.SWAP
INPUTS = (*[Decision.KEEP] * 2, Decision.RECOMPUTE, Decision.KEEP, Decision.SWAP, *[Decision.KEEP] * 5)
"""Of the inputs of the second and the third block."""


def alike_plan(monkeypatch: pytest.MonkeyPatch, *wishes: Decision) -> tuple[Plan, int]:
    """With its number of released values. The audit has time for no value but the one whose turn it is."""
    monkeypatch.setattr(audit, "MOST_SHARE", 0.0)
    plan = decided(profile_of(Alike, Alike.step(Alike.longest)), wishes)
    return plan, sum(value.decision is not Decision.KEEP for value in plan.values)


@pytest.mark.parametrize(("paths", "writers"), [(IN_TURN[0], (2,)), (IN_TURN[1], (0, 3))], ids=str)
@pytest.mark.parametrize("wishes", [(Decision.SWAP,), MIXED], ids=len)
def test_each_value_has_its_turn_in_the_audit_on_every_path(
    paths: Sequence[Sequence[int]], writers: Sequence[int], wishes: Sequence[Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the paths come in turn, as the values do."""
    plan, released = alike_plan(monkeypatch, *wishes)
    steps = [*WARM_UP, *list(paths) * (2 * released)]
    for writer in writers:
        silent = silent_steps(plan, steps, writer, "result")
        for path in paths:
            assert sum(steps[number] == path for number in silent) <= released, (writer, path, silent)


def test_a_value_that_only_later_layers_tell_apart_has_its_turn_on_each_path_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block's input looks the same whichever block comes. Its turns fall on both paths, by chance."""
    plan, released = alike_plan(monkeypatch, *INPUTS)
    for paths in (IN_TURN[0], IN_TURN[0][::-1]):
        assert len(silent_steps(plan, [*WARM_UP, *paths * (5 * released)], 1, "input")) <= 4 * released
