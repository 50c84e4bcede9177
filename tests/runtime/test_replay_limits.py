"""What must not be replayed is not: the value is swapped or kept instead, and the gradient is right."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan, PointActions
from poochplan.formats.profile import Profile
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import assemble
from poochplan.profiler.trials.compare import DIFFERS
from poochplan.runtime.run_report import FallbackKind, StepReport
from tests.planner.plans import plan_with
from tests.runtime.nets import CASES, LINK, equal
from tests.runtime.random_plans import random_plan

REPLAY_ALL = (0, 0, 1)


@pytest.fixture(autouse=True)
def _clean_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _profile(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> Profile:
    return poochplan.profile(lambda: loss_of(model), model=model, iterations=1, link=LINK)


def _gradients(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], torch.Tensor], plan: Plan | None
) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if plan is None:
            loss_of(model).backward()
        else:
            with poochplan.apply(plan, model):
                loss_of(model).backward()
    return [[p.grad for p in model.parameters() if p.grad is not None]]


def _report(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], torch.Tensor], plan: Plan) -> StepReport:
    model = make()
    with poochplan.apply(plan, model) as session:
        loss_of(model).backward()
    return session.report().last_step


def _check(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], torch.Tensor],
    plan_of: Callable[[Profile], Plan] = lambda profile: random_plan(profile, 0, REPLAY_ALL),
) -> None:
    torch.manual_seed(0)
    plan = plan_of(_profile(make(), loss_of))
    assert equal(_gradients(make, loss_of, None), _gradients(make, loss_of, plan))


class Stages(nn.Module):
    """A linear layer whose output goes through ``between`` before a sine is saved."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(16, 16), nn.Linear(16, 16), between

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(batch)).sin()).sin()


BATCH = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)


def _loss(model: nn.Module) -> torch.Tensor:
    return model(BATCH).square().sum()


def test_a_compiled_region_that_writes_its_argument_in_place() -> None:
    def make() -> nn.Module:
        class Writes(nn.Module):
            def forward(self, value: torch.Tensor) -> torch.Tensor:
                return value.mul_(3).sin()

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.writes = nn.Linear(16, 16), torch.compile(Writes(), backend="aot_eager")

            def forward(self, batch: torch.Tensor) -> torch.Tensor:
                value = self.first(batch) * 1.5
                out = self.writes(value)
                return out + (value + 0.5).sin()

        return Model()

    _check(make, _loss)


def test_a_value_written_where_recording_is_off() -> None:
    def between(value: torch.Tensor) -> torch.Tensor:
        hidden = value + 0
        hidden.sigmoid()  # a save point before the write, at which recording is switched off
        hidden.detach().add_(3)
        return (hidden + 0).exp()

    def plan_of(profile: Profile) -> Plan:
        plan = random_plan(profile, 0, REPLAY_ALL)
        middle = tuple(
            msgspec.structs.replace(actions, record="off" if actions.index == 1 else "on")
            for actions in _with_saves(plan)
            if actions.at == "save"
        )
        rest = tuple(actions for actions in plan.schedule if actions.at == "use")
        return msgspec.structs.replace(plan, schedule=middle + rest)

    def make() -> nn.Module:
        return Stages(between)

    _check(make, _loss, plan_of)
    torch.manual_seed(0)
    plan = plan_of(_profile(make(), _loss))
    with pytest.warns(RuntimeWarning, match="is swapped, not recomputed: a writer of the value was not recorded"):
        assert _report(make, _loss, plan).fallback_kinds == {FallbackKind.NOT_REPLAYABLE: 1}


def _with_saves(plan: Plan) -> list[poochplan.formats.plan.PointActions]:
    from poochplan.formats.plan import PointActions

    have = {actions.index: actions for actions in plan.schedule if actions.at == "save"}
    return [have.get(index, PointActions(at="save", index=index)) for index in range(len(plan.values))]


def test_a_saved_value_written_after_its_save_point_is_no_input_of_a_replay() -> None:
    writes = [False]

    def between(value: torch.Tensor) -> torch.Tensor:
        norm = value.norm().detach()  # saves value
        doubled = value * 2
        out = doubled.sin()
        if writes[0]:
            value.detach().add_(1)
        return out + norm

    def loss_of(model: nn.Module) -> torch.Tensor:
        return _loss(model)

    torch.manual_seed(0)
    profile = _profile(Stages(between), loss_of)
    writes[0] = True
    plan = random_plan(profile, 0, REPLAY_ALL)
    assert equal(_gradients(lambda: Stages(between), loss_of, None), _gradients(lambda: Stages(between), loss_of, plan))


def test_a_storage_that_has_grown_leaves_the_plan() -> None:
    rows = [16]

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            big = self.first(batch.repeat(rows[0], 1))
            return big[-8:].sin() + self.first(batch).cos()

    torch.manual_seed(0)
    plan = random_plan(_profile(Tail(), _loss), 0, (0, 1, 0))
    rows[0] = 32
    assert equal(_gradients(Tail, _loss, None), _gradients(Tail, _loss, plan))


def test_an_operator_that_draws_random_numbers_without_saying_so() -> None:
    @torch.library.custom_op("poochplan_tests::noise", mutates_args=())
    def noise(value: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(value)

    def between(value: torch.Tensor) -> torch.Tensor:
        return value * noise(value.detach())

    _check(lambda: Stages(between), _loss)


def test_a_write_through_numpy_is_found_by_verification() -> None:
    def between(value: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, 16)
        mask.numpy()[::2] = 1
        return value * mask

    _check(lambda: Stages(between), _loss)
    torch.manual_seed(0)
    profile = _profile(Stages(between), _loss)
    assert [value.name for value in profile.values if value.unreplayable == DIFFERS] == ["step/zeros"]


def test_running_statistics_that_are_no_buffers_of_the_model() -> None:
    def between(value: torch.Tensor) -> torch.Tensor:
        mean, variance = torch.zeros(16), torch.ones(16)
        nn.functional.batch_norm(value.detach(), mean, variance, training=True)
        return value * mean

    _check(lambda: Stages(between), _loss)


def test_a_model_with_a_sparse_and_an_expanded_buffer() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.register_buffer("adjacency", torch.eye(8).to_sparse())
            self.register_buffer("row", torch.ones(1).expand(16))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return (torch.sparse.mm(self.adjacency, self.first(batch)) * self.row).sin()

    _check(Graph, _loss)


def _blocks_after(rounds: int, one_round: Callable[[], None]) -> list[int]:
    """Of Python's memory in use behind each round, where nobody collects garbage."""
    blocks = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            one_round()
            blocks.append(sys.getallocatedblocks())
    finally:
        gc.enable()
    return blocks


def test_recordings_do_not_wait_for_the_garbage_collector() -> None:
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, REPLAY_ALL)
    model, step, optimizer = case.fresh()

    def one_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        step().backward()
        optimizer.step()

    with poochplan.apply(plan, model) as session:
        blocks = _blocks_after(8, one_step)
        storages = len(session._engine.tape)
    assert blocks[-1] - blocks[3] < 20 * storages  # those of one step's recording; four steps' would be much more


def test_recordings_of_steps_that_wait_for_each_other_go_when_nothing_is_held_any_more() -> None:
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, REPLAY_ALL)
    model, step, _ = case.fresh()
    with poochplan.apply(plan, model) as session:

        def two_steps() -> None:
            session.step()
            first = step()
            session.step()
            second = step()
            first.backward()
            second.backward()

        blocks = _blocks_after(8, two_steps)
        storages = len(session._engine.tape)
    assert blocks[-1] - blocks[3] < 20 * storages


def test_recordings_of_steps_that_always_overlap_go_each_with_its_own_step() -> None:
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, REPLAY_ALL)
    model, step, _ = case.fresh()
    with poochplan.apply(plan, model) as session:
        session.step()
        waiting = [step()]

        def next_step() -> None:
            session.step()
            waiting.append(step())  # before the backward of the one that waits: something is held at all times
            waiting.pop(0).backward()

        blocks = _blocks_after(12, next_step)
        storages = len(session._engine.tape)
    assert blocks[-1] - blocks[4] < 20 * storages  # those of one step's recording; seven steps' would be much more


def test_a_session_that_is_never_entered_starts_nothing() -> None:
    import threading

    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (0, 1, 0))
    before = threading.active_count()
    poochplan.apply(plan, case.fresh()[0])
    assert threading.active_count() == before


def test_steps_that_call_the_model_twice_follow_the_plan_when_they_are_announced() -> None:
    def loss_of(model: nn.Module) -> torch.Tensor:
        model(BATCH).sum().item()
        return _loss(model)

    torch.manual_seed(0)
    model = Stages(torch.tanh)
    plan = random_plan(_profile(model, loss_of), 0, REPLAY_ALL)
    assert Decision.RECOMPUTE in {value.decision for value in plan.values}
    with poochplan.apply(plan, model) as session:
        for _ in range(2):
            session.step()
            loss_of(model).backward()
            assert session.report().last_step.fallbacks == 0


class WrittenLater(nn.Module):
    """What an exponential reads is written in place and saved only afterwards, through a view or a chunk."""

    def __init__(self, part_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.part_of = nn.Parameter(torch.linspace(-1, 1, 16)), part_of

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scaled = batch * self.weight
        part = self.part_of(scaled)
        grown = part.exp()
        part.mul_(2.0)
        return grown.sum() + part.square().sum()


def _recorded_only_until_the_first_save(profile: Profile) -> Plan:
    """The exponential's result is recomputed; recording ends where it is saved, before the write."""
    plan = poochplan.plan(profile, profile.in_core_peak_bytes)
    (index,) = (i for i, value in enumerate(plan.values) if "exp" in value.name)
    values = list(plan.values)
    values[index] = msgspec.structs.replace(values[index], decision=Decision.RECOMPUTE)
    off = PointActions(at="save", index=index, record="off")
    return msgspec.structs.replace(plan, values=tuple(values), schedule=(off,), record_from_start=True)


@pytest.mark.parametrize(
    "part_of", [lambda whole: whole.view(-1), lambda whole: whole.unsafe_chunk(2)[1]], ids=["view", "chunk"]
)
def test_what_is_written_where_recording_is_off_is_another_content(
    part_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    _check(
        lambda: WrittenLater(part_of),
        lambda model: model(BATCH),
        _recorded_only_until_the_first_save,
    )


class ChunkWrittenLater(nn.Module):
    """What an exponential reads is written afterwards through a chunk whose own counter has not been ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scaled = batch * self.weight
        left, right = scaled.unsafe_chunk(2)
        left.add_(1.0)
        grown = scaled.exp()
        right = right.sigmoid_()
        return grown.sum() + (left.sum() + right.sum())


def test_a_write_that_no_counter_tells_of_is_recorded() -> None:
    def recomputing_the_exponential(profile: Profile) -> Plan:
        problem = build_problem(profile)
        decisions = [Decision.RECOMPUTE if "exp" in name else Decision.KEEP for name in problem.names]
        assert Decision.RECOMPUTE in decisions
        return plan_with(profile, assemble(problem, decisions, {}))

    _check(ChunkWrittenLater, lambda model: model(BATCH), recomputing_the_exponential)
