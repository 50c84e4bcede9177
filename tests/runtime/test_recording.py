"""Recording is on in the planned windows alone, and what it reads within ops is no write that there was not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Phase, PointKind, Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.schedule import Schedule, assemble
from poochplan.runtime.replays.replay import WRITTEN_SINCE
from poochplan.runtime.replays.tape import Recorder
from tests.depth import seeds
from tests.planner.plans import plan_with, random_decisions
from tests.runtime.nets import CASES, Case, equal, in_core, taken, train
from tests.runtime.random_plans import random_plan, windowed

STEPS = 2


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all ops that the recorder writes down, in order."""
    names: list[str] = []
    original = Recorder._before

    def listening(self: Recorder, func: Any, *rest: Any) -> Any:
        names.append(str(func))
        return original(self, func, *rest)

    monkeypatch.setattr(Recorder, "_before", listening)
    return names


def planned_windows(profile: Profile, plan: Plan) -> list[str]:
    """The ops that the plan says are recorded in a step, by the switches at its save points."""
    switches = {actions.index: actions.record for actions in plan.schedule if actions.at == "save"}
    last = len(plan.values) - 1
    saves = [point.op for point in profile.points if point.kind is PointKind.SAVE]
    is_on, names = plan.record_from_start, []
    for number, op in enumerate(profile.ops):
        is_recorded = is_on
        for index, at in enumerate(saves):
            if at == number:
                is_off = switches.get(index) == "off" or index == last
                is_on = (is_on or switches.get(index) == "on") and not is_off
                is_recorded = is_recorded and not is_off
        if is_recorded and op.phase is Phase.FORWARD:
            names.append(op.name)
    return names


def one_late_value(problem: Problem) -> Schedule:
    """Everything kept but the last value that can be recomputed."""
    able = [v for v, replay in enumerate(problem.replay.replays) if replay is not None and not problem.must_keep[v]]
    decisions = [Decision.KEEP] * problem.value_count
    decisions[able[-1]] = Decision.RECOMPUTE
    return assemble(problem, decisions, {})


@pytest.mark.parametrize("name", CASES)
def test_a_plan_without_replays_hands_nothing_to_the_recorder(name: str, handed: list[str]) -> None:
    case = CASES[name]
    profile = case.profile()
    problem = build_problem(profile)
    swapped = [Decision.KEEP if reason else Decision.SWAP for reason in problem.must_keep]
    for decisions in ([Decision.KEEP] * problem.value_count, swapped):
        plan = plan_with(profile, fit(problem, decisions, smallest_budget(profile)))
        handed.clear()
        train(case, STEPS, plan)
        assert handed == []


@pytest.mark.cpu_device  # the other one's own mode has the op of the save point recorded too
@pytest.mark.parametrize("name", CASES)
def test_the_recorder_is_handed_the_ops_of_the_planned_windows(name: str, handed: list[str]) -> None:
    case = CASES[name]
    profile = case.profile()
    problem = build_problem(profile)
    schedules = [one_late_value(problem)]
    schedules += [fit(problem, random_decisions(problem, seed), profile.in_core_peak_bytes) for seed in seeds(day=2)]
    for schedule in schedules:
        plan = plan_with(profile, schedule)
        windows = planned_windows(profile, plan)
        handed.clear()
        train(case, STEPS, plan)
        assert handed == windows * STEPS
    forward = [op for op in profile.ops if op.phase is Phase.FORWARD]
    assert 0 < len(planned_windows(profile, plan_with(profile, schedules[0]))) < len(forward) / 2


def test_backward_and_optimizer_are_not_recorded_when_a_step_recomputes_everything(handed: list[str]) -> None:
    case: Case = CASES["residual"]
    profile = case.profile()
    problem = build_problem(profile)
    decisions = [
        Decision.RECOMPUTE if replay is not None and not problem.must_keep[value] else Decision.KEEP
        for value, replay in enumerate(problem.replay.replays)
    ]
    plan = plan_with(profile, assemble(problem, decisions, {}))
    model, step, optimizer = case.fresh()
    with poochplan.apply(plan, model):
        loss = step()
        in_forward = len(handed)
        loss.backward()
        optimizer.step()
        (torch.ones(3) * 2).sum()
        assert in_forward > 0
        assert len(handed) == in_forward


class Halting(nn.Module):
    """Two layers, and an exception between them where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.halts = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = torch.tanh(self.first(batch))
        if self.halts:
            raise KeyError("asked to")
        return torch.tanh(self.second(batch)).square().mean()


@pytest.mark.parametrize("compiled", [False, True])
def test_after_an_exception_in_forward_nothing_is_recorded_until_the_next_step(compiled: bool) -> None:
    torch.manual_seed(0)
    model, batch = Halting(), torch.randn(4, 8)
    profile = taken(lambda: model(batch), model)
    plan = random_plan(profile, 0, (0, 0, 1))
    model(batch).backward()
    in_core = [p.grad for p in model.parameters()]
    if compiled:
        model.compile(backend="eager", dynamic=False)
    with poochplan.apply(plan, model, on_divergence="warn") as session:
        model.halts = True
        with pytest.raises(KeyError):
            model(batch)
        assert not session._engine.recorder.is_on
        model.halts = False
        model.zero_grad()
        model(batch).backward()
        assert compiled or session.report().last_step.replayed_values > 0
        assert session.report().last_step.fallbacks == 0 or compiled
    assert equal([in_core], [[p.grad for p in model.parameters()]])  # type: ignore[list-item]


def test_a_model_that_returns_nothing_goes_on_being_recorded() -> None:
    class Quiet(Halting):
        def forward(self, batch: torch.Tensor) -> None:  # type: ignore[override]
            self.loss = super().forward(batch)

    torch.manual_seed(0)
    model, batch = Quiet(), torch.randn(4, 8)

    def step() -> torch.Tensor:
        model(batch)
        return model.loss.sin()

    plan = random_plan(taken(step, model), 0, (0, 0, 1))
    with poochplan.apply(plan, model) as session:
        step().backward()
    assert session.report().last_step.fallbacks == 0
    assert session.report().last_step.replayed_values > 0


Tensor = torch.Tensor
Forward = Callable[["Twice", Tensor], Tensor]
THREE_STEPS = 3
"""From the second on the version counters of parameters are not at zero."""
WINDOWS = 30
"""Plans of each program; few of them begin to record where it matters."""
BATCH = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)


class Twice(nn.Module):
    """Layers for a forward that reads something in two windows of recording."""

    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.first, self.shared, self.body = nn.Linear(16, 16), nn.Linear(16, 16), body
        self.writes = False

    def forward(self, batch: Tensor) -> Tensor:
        return self.body(self, batch)


def a_layer_called_twice(self: Twice, batch: Tensor) -> Tensor:
    return self.shared(self.shared(batch).sin()).sin()


def an_activation_as_a_bias(self: Twice, batch: Tensor) -> Tensor:
    """It has been written, and nothing saves it."""
    bias = self.first(batch[0]).add_(1)
    hidden = self.shared(batch).sin()
    hidden = hidden + (bias * 2).sin()
    return (F.linear(hidden, self.shared.weight, bias).sin() + bias).sin()


def weights_without_a_gradient(self: Twice, batch: Tensor) -> Tensor:
    hidden = F.linear(self.first(batch).sin(), self.shared.weight.data, self.shared.bias.data).sin()
    return self.shared(hidden.sin()).sin()


def and_the_other_way_round(self: Twice, batch: Tensor) -> Tensor:
    hidden = self.first(self.shared(batch).sin()).sin()
    return F.linear(hidden, self.shared.weight.data, self.shared.bias.data).sin()


def filled_in_parts(self: Twice, batch: Tensor) -> Tensor:
    """What may be written behind its last use is saved by nobody."""
    value = self.first(batch)
    whole = torch.empty_like(value)
    whole[:, :8] = value[:, 8:]
    whole[:, 8:] = value[:, :8]
    hidden = (whole * 2).sin()
    if self.writes:
        whole.detach().mul_(3)
    return self.shared(hidden).sin()


PROGRAMS = [a_layer_called_twice, an_activation_as_a_bias, weights_without_a_gradient, and_the_other_way_round]


@functools.cache
def case_of(body: Forward, *, writes: bool = False) -> Case:
    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        model = Twice(body)
        model.writes = writes
        return model, lambda model: model(BATCH).square().sum()

    return Case(make)


def _planned(body: Forward, seed: int, *, writes: bool = False) -> list[list[Tensor]]:
    """Nothing meters the steps: so an op is dispatched as before when recording begins in it."""
    plan = windowed(random_plan(case_of(body).profile(), seed, (0, 0, 1)), seed)
    return train(case_of(body, writes=writes), THREE_STEPS, plan, meter="never", arena="off")[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("body", PROGRAMS)
def test_a_right_program_trains_bitwise_as_in_core_wherever_recording_begins(body: Forward) -> None:
    for seed in range(WINDOWS):
        assert equal(in_core(case_of(body), THREE_STEPS), _planned(body, seed)), seed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_write_into_what_no_replay_builds_is_noticed_where_it_is_not_recorded() -> None:
    wanted, noticed = in_core(case_of(filled_in_parts, writes=True), THREE_STEPS), 0
    for seed in range(WINDOWS):
        try:
            found = _planned(filled_in_parts, seed, writes=True)
        except RuntimeError as error:
            if WRITTEN_SINCE not in str(error):
                raise
            noticed += 1
        else:
            assert equal(wanted, found), seed
    assert noticed
