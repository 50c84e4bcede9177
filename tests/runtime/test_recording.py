"""Recording is on in the planned windows alone, and what it reads within ops is no write that there was not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poochplan
from poochplan.formats.plan import Decision, Plan, PointActions
from poochplan.formats.profile import Phase, PointKind, Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, assemble
from poochplan.runtime.replays.compiled_tape import CompiledRecorder, recording
from poochplan.runtime.replays.recipes import WRITTEN_SINCE
from poochplan.runtime.replays.replay import OFF, StorageRecord
from poochplan.runtime.replays.tape import Recorder, Tape
from poochplan.runtime.session import Session
from tests.depth import seeds
from tests.planner.plans import plan_with, random_decisions
from tests.runtime.nets import CASES, Case, Net, either_way, equal, followed, in_core, train
from tests.runtime.random_plans import random_plan, windowed

STEPS = 2
Tensor = torch.Tensor
Forward = Callable[[Net, Tensor], Any]
THREE_STEPS = 3
"""From the second on the version counters of parameters are not at zero."""
WINDOWS = 30
"""Plans of each program; few of them begin to record where it matters."""
BATCH = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all ops that the recorder writes down, in order."""
    names: list[str] = []
    original = Recorder._before

    def listening(self: Recorder, func: Any, *rest: Any) -> Any:
        names.append(str(func))
        return original(self, func, *rest)

    monkeypatch.setattr(Recorder, "_before", listening)
    made = CompiledRecorder.__init__

    def heard(self: CompiledRecorder, tape: Any) -> None:
        made(self, tape)
        tape.listener = lambda name, overload: names.append(f"{name.replace('::', '.')}.{overload or 'default'}")

    monkeypatch.setattr(CompiledRecorder, "__init__", heard)
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
    problem = Problem.of(profile)
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
    problem = Problem.of(profile)
    schedules = [one_late_value(problem)]
    schedules += [fit(problem, random_decisions(problem, seed), profile.in_core_peak_bytes) for seed in seeds(day=2)]
    for schedule in schedules:
        plan = plan_with(profile, schedule)
        windows = planned_windows(profile, plan)
        handed.clear()
        train(case, STEPS, plan)
        # Without a mode ``linear`` adds its bias in place.
        seen, planned = ([name.replace("add_", "add") for name in names] for names in (handed, windows * STEPS))
        assert seen == planned
    forward = [op for op in profile.ops if op.phase is Phase.FORWARD]
    assert 0 < len(planned_windows(profile, plan_with(profile, schedules[0]))) < len(forward) / 2


def test_backward_and_optimizer_are_not_recorded_when_a_step_recomputes_everything(handed: list[str]) -> None:
    case: Case = CASES["residual"]
    model, step, optimizer = case.fresh()
    with poochplan.apply(random_plan(case.profile(), 0, (0, 0, 1)), model):
        loss = step()
        in_forward = len(handed)
        loss.backward()
        optimizer.step()
        (torch.ones(3) * 2).sum()
        assert in_forward > 0
        assert len(handed) == in_forward


def halting(net: Net, batch: torch.Tensor) -> torch.Tensor:
    """Two layers, and an exception between them where it is asked for."""
    batch = torch.tanh(net.first(batch))
    if net.halts:
        raise KeyError("asked to")
    return torch.tanh(net.second(batch)).square().mean()


def _halting(body: Forward, loss_of: Callable[[nn.Module], torch.Tensor]) -> Case:
    return Case(lambda: (Net(body, first=nn.Linear(8, 8), second=nn.Linear(8, 8), halts=False), loss_of))


@pytest.mark.parametrize("compiled", [False, True])
def test_after_an_exception_in_forward_nothing_is_recorded_until_the_next_step(compiled: bool) -> None:
    case = _halting(halting, lambda model: model(BATCH[:, :8]))

    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
        if compiled:
            model.compile(backend="eager", dynamic=False)
        model.halts = True
        with pytest.raises(KeyError):
            step()
        assert session is None or not session._engine.recorder.is_on
        model.halts = False
        step().backward()  # type: ignore[no-untyped-call]

    report = either_way(case, random_plan(case.profile(), 0, (0, 0, 1)), use, is_followed=not compiled)
    assert compiled or report.last_step.replayed_values > 0


def test_a_model_that_returns_nothing_goes_on_being_recorded() -> None:
    def quiet(net: Net, batch: torch.Tensor) -> None:
        net.loss = halting(net, batch)

    case = _halting(quiet, lambda model: [model(BATCH[:, :8]), model.loss.sin()][1])
    assert followed(case, random_plan(case.profile(), 0, (0, 0, 1)), 1).last_step.replayed_values > 0


def behind_a_compiled_layer(net: Net, batch: Tensor) -> Tensor:
    """Nothing is saved between the compiled layer and the op that a replay runs first."""
    return net.last((net.layer(net.first(batch)) * 0.5).exp()).sum()  # type: ignore[no-any-return]


def test_recording_that_is_to_begin_in_a_compiled_call_begins_behind_it() -> None:
    def made() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        layer = Net(lambda net, batch: net.inner(batch).tanh(), inner=nn.Linear(16, 16))
        layer.compile(backend="aot_eager", dynamic=False)
        first, last = nn.Linear(16, 16), nn.Linear(16, 16)
        return Net(behind_a_compiled_layer, first=first, layer=layer, last=last), lambda model: model(BATCH)

    torch._dynamo.reset()
    case = Case(made)
    profile = case.profile()
    plan = plan_with(profile, one_late_value(Problem.of(profile)))
    behind = len(plan.values) - 2  # the last save of the compiled layer
    begins = PointActions(at="save", index=behind, record="on")
    schedule = (begins, *(one for one in plan.schedule if one.at == "use" or one.index > behind))
    plan = msgspec.structs.replace(plan, record_from_start=False, schedule=schedule)
    report = either_way(case, plan, lambda model, step, session: step().backward())
    assert report.last_step.replayed_values > 0
    torch._dynamo.reset()


def a_layer_called_twice(net: Net, batch: Tensor) -> Tensor:
    return net.shared(net.shared(batch).sin()).sin()


def an_activation_as_a_bias(net: Net, batch: Tensor) -> Tensor:
    """It has been written, and nothing saves it."""
    bias = net.first(batch[0]).add_(1)
    hidden = net.shared(batch).sin()
    hidden = hidden + (bias * 2).sin()
    return (F.linear(hidden, net.shared.weight, bias).sin() + bias).sin()


def weights_without_a_gradient(net: Net, batch: Tensor) -> Tensor:
    hidden = F.linear(net.first(batch).sin(), net.shared.weight.data, net.shared.bias.data).sin()
    return net.shared(hidden.sin()).sin()


def and_the_other_way_round(net: Net, batch: Tensor) -> Tensor:
    hidden = net.first(net.shared(batch).sin()).sin()
    return F.linear(hidden, net.shared.weight.data, net.shared.bias.data).sin()


def filled_in_parts(net: Net, batch: Tensor) -> Tensor:
    """What may be written behind its last use is saved by nobody."""
    value = net.first(batch)
    whole = torch.empty_like(value)
    whole[:, :8] = value[:, 8:]
    whole[:, 8:] = value[:, :8]
    hidden = (whole * 2).sin()
    if net.writes:
        whole.detach().mul_(3)
    return net.shared(hidden).sin()


PROGRAMS = [a_layer_called_twice, an_activation_as_a_bias, weights_without_a_gradient, and_the_other_way_round]


@functools.cache
def case_of(body: Forward, *, writes: bool = False) -> Case:
    """Layers for a forward that reads something in two windows of recording."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        model = Net(body, first=nn.Linear(16, 16), shared=nn.Linear(16, 16), writes=writes)
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


# -- version counters: a recorded write is told from one that was not recorded -----------------------------------------

Write = Callable[[Tensor], object]


def above_autograd(tensor: Tensor) -> None:
    """As a user's code writes: torch counts it."""
    tensor.copy_(torch.arange(8.0))


def below_autograd(tensor: Tensor) -> None:
    """As a kernel writes what it has allocated itself: torch does not count it."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        tensor.copy_(torch.arange(8.0))


def two_parts_in_one_call(tensor: Tensor) -> None:
    """Counted twice, on one counter."""
    torch._foreach_add_([tensor[:4], tensor[4:]], 1.0)


WRITES = [above_autograd, below_autograd, two_parts_in_one_call]


def _switch_on(recorder: Recorder) -> None:
    """The op in which recording was asked for is over."""
    recorder.switch_on()
    torch.ones(1).neg()


def recorded(tensor: Tensor, *writes: Write) -> tuple[Tape, StorageRecord]:
    tape, recorder = recording("cpu")
    _switch_on(recorder)
    for write in writes:
        write(tensor)
    recorder.switch_off()
    return tape, tape.record_of(tensor)


def met_later(tape: Tape, tensor: Tensor) -> StorageRecord:
    """As it is packed where nothing is recorded."""
    return tape.met(tensor, tensor.untyped_storage(), OFF)


@pytest.mark.parametrize("first", WRITES)
@pytest.mark.parametrize("second", WRITES)
def test_recorded_writes_are_all_that_there_were(first: Write, second: Write) -> None:
    tensor = torch.empty(8)
    tape, _ = recorded(tensor, first, second)
    record = met_later(tape, tensor)
    assert not record.broken
    assert len(record.writes) == 2
    assert None not in record.writes


@pytest.mark.parametrize("first", WRITES)
def test_a_write_behind_them_that_was_not_recorded_is_noticed(first: Write) -> None:
    tensor = torch.empty(8)
    tape, _ = recorded(tensor, first)
    tensor.mul_(2.0)
    record = met_later(tape, tensor)
    assert record.broken
    assert record.writes[-1] is None


def test_one_that_torch_counts_is_noticed_in_the_window_too() -> None:
    tensor = torch.empty(8)
    tape, record = recorded(tensor, above_autograd)
    recorder: Any = Recorder(tape) if isinstance(tape, Tape) else CompiledRecorder(tape)
    _switch_on(recorder)
    below_autograd(tensor)
    recorder.switch_off()
    tensor.add_(1.0)
    assert met_later(tape, tensor) is record
    assert record.broken


def test_what_is_told_of_a_write_beside_a_recorded_one_breaks_the_record() -> None:
    def and_by_hand(tensor: Tensor) -> None:
        tensor.mul_(2.0)
        tensor.numpy()[:] += 1.0
        torch.autograd.graph.increment_version(tensor)

    tensor = torch.ones(8)
    tape, _ = recorded(tensor, and_by_hand)
    assert met_later(tape, tensor).broken


def test_what_a_window_sees_only_the_end_of_is_kept_until_its_save_point() -> None:
    """A value is replayed from one that has its save point later, and that the window has seen made of what is gone."""

    def begins_late(net: Net, hidden: Tensor) -> Tensor:
        hidden = net.inside(hidden)
        before = hidden * 1.5
        waves = hidden.cos()  # here the window begins
        after = before + 1
        del before
        copy = after.clone()
        del after
        return waves + (copy * 2).sin() + copy.cos()

    case = Case(lambda: (Net(begins_late, inside=nn.Linear(16, 16)), lambda model: model(BATCH).square().mean()))
    profile = case.profile()
    problem = Problem.of(profile)
    names = [profile.values[value].name for value in problem.replay.value_of]
    decisions = tuple(Decision.RECOMPUTE if name == "step/mul#2" else Decision.KEEP for name in names)
    schedule = fit(problem, decisions, profile.in_core_peak_bytes)
    assert [actions.record for actions in schedule.actions] == ["on", "off", ""]
    seen, report = train(case, THREE_STEPS, plan_with(profile, schedule))
    assert report is not None
    assert report.total.fallback_reasons == []
    assert report.last_step.replayed_values == 1
    assert equal(train(case, THREE_STEPS)[0], seen)
