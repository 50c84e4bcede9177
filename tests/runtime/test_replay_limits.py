"""What must not be replayed is not: the value is swapped or kept instead, and the gradient is right."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan, PointActions
from poochplan.formats.profile import Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import assemble
from poochplan.profiler.trials.compare import DIFFERS
from poochplan.runtime.run_report import FallbackKind, StepReport
from poochplan.runtime.session import Session
from tests.planner.plans import plan_with
from tests.runtime.besides import no_collector
from tests.runtime.nets import CASES, Case, Net, either_way, of
from tests.runtime.random_plans import random_plan

REPLAY_ALL = (0, 0, 1)


@pytest.fixture(autouse=True)
def _clean_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _replay_all(profile: Profile) -> Plan:
    return random_plan(profile, 0, REPLAY_ALL)


def _one_step(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
    step().backward()  # type: ignore[no-untyped-call]


def _check(case: Case, plan_of: Callable[[Profile], Plan] = _replay_all) -> StepReport:
    """A step has the gradients of in-core training, whether it can follow the plan or not."""
    return either_way(case, plan_of(case.profile()), _one_step, is_followed=False).last_step


def _stages(between: Callable[[torch.Tensor], torch.Tensor]) -> Net:
    """A linear layer whose output goes through ``between`` before a sine is saved."""
    return Net(
        lambda net, batch: net.second(between(net.first(batch)).sin()).sin(),
        **{name: nn.Linear(16, 16) for name in ("first", "second")},
    )


def _staged(between: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    return of(lambda: _stages(between), 8, 16)


def test_a_compiled_region_that_writes_its_argument_in_place() -> None:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        value = net.first(batch) * 1.5
        out = net.writes(value)
        return out + (value + 0.5).sin()  # type: ignore[no-any-return]

    def make() -> nn.Module:
        writes = Net(lambda _, value: value.mul_(3).sin())
        return Net(body, first=nn.Linear(16, 16), writes=torch.compile(writes, backend="aot_eager"))

    _check(of(make, 8, 16))


def test_a_value_written_where_recording_is_off() -> None:
    def between(value: torch.Tensor) -> torch.Tensor:
        hidden = value + 0
        hidden.sigmoid()  # a save point before the write, at which recording is switched off
        hidden.detach().add_(3)
        return (hidden + 0).exp()

    def plan_of(profile: Profile) -> Plan:
        plan = random_plan(profile, 0, REPLAY_ALL)
        have = {actions.index: actions for actions in plan.schedule if actions.at == "save"}
        saves = (have.get(index, PointActions(at="save", index=index)) for index in range(len(plan.values)))
        switched = (msgspec.structs.replace(one, record="off" if one.index == 1 else "on") for one in saves)
        rest = (actions for actions in plan.schedule if actions.at == "use")
        return msgspec.structs.replace(plan, schedule=(*switched, *rest))

    with pytest.warns(RuntimeWarning, match="is swapped, not recomputed: an op that made it was not recorded"):
        assert _check(_staged(between), plan_of).fallback_kinds == {FallbackKind.NOT_REPLAYABLE: 1}


def test_a_saved_value_written_after_its_save_point_is_no_input_of_a_replay() -> None:
    writes = [False]

    def between(value: torch.Tensor) -> torch.Tensor:
        norm = value.norm().detach()  # saves value
        doubled = value * 2
        out = doubled.sin()
        if writes[0]:
            value.detach().add_(1)
        return out + norm

    case = _staged(between)
    plan = _replay_all(case.profile())
    writes[0] = True
    _check(case, lambda _: plan)


def test_a_storage_that_has_grown_leaves_the_plan() -> None:
    rows = [16]

    def tail(net: Net, batch: torch.Tensor) -> torch.Tensor:
        big = net.first(batch.repeat(rows[0], 1))
        return big[-8:].sin() + net.first(batch).cos()  # type: ignore[no-any-return]

    case = of(lambda: Net(tail, first=nn.Linear(16, 16)), 8, 16)
    plan = random_plan(case.profile(), 0, (0, 1, 0))
    rows[0] = 32
    _check(case, lambda _: plan)


def test_an_operator_that_draws_random_numbers_without_saying_so() -> None:
    @torch.library.custom_op("poochplan_tests::noise", mutates_args=())
    def noise(value: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(value)

    def between(value: torch.Tensor) -> torch.Tensor:
        return value * noise(value.detach())

    _check(_staged(between))


def test_a_write_through_numpy_is_found_by_verification() -> None:
    def between(value: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, 16)
        mask.numpy()[::2] = 1
        return value * mask

    case = _staged(between)
    _check(case)
    assert [value.name for value in case.profile().values if value.unreplayable == DIFFERS] == ["step/zeros"]


def test_running_statistics_that_are_no_buffers_of_the_model() -> None:
    def between(value: torch.Tensor) -> torch.Tensor:
        mean, variance = torch.zeros(16), torch.ones(16)
        nn.functional.batch_norm(value.detach(), mean, variance, training=True)
        return value * mean

    _check(_staged(between))


def test_a_model_with_a_sparse_and_an_expanded_buffer() -> None:
    def make() -> nn.Module:
        net = Net(
            lambda net, batch: (torch.sparse.mm(net.adjacency, net.first(batch)) * net.row).sin(),
            first=nn.Linear(16, 16),
        )
        net.register_buffer("adjacency", torch.eye(8).to_sparse())
        net.register_buffer("row", torch.ones(1).expand(16))
        return net

    _check(of(make, 8, 16))


def _alone(step: Callable[[], torch.Tensor], session: Session) -> Iterator[None]:
    while True:
        step().backward()  # type: ignore[no-untyped-call]
        yield


def _two_that_wait_for_each_other(step: Callable[[], torch.Tensor], session: Session) -> Iterator[None]:
    while True:
        losses = []
        for _ in range(2):
            session.step()
            losses.append(step())
        while losses:
            losses.pop(0).backward()  # type: ignore[no-untyped-call]
        yield


def _always_overlapping(step: Callable[[], torch.Tensor], session: Session) -> Iterator[None]:
    """Something is held at all times."""
    session.step()
    waiting = [step()]
    while True:
        session.step()
        waiting.append(step())
        waiting.pop(0).backward()  # type: ignore[no-untyped-call]
        yield


@pytest.mark.parametrize("steps", [_alone, _two_that_wait_for_each_other, _always_overlapping])
def test_recordings_go_with_their_steps_and_do_not_wait_for_the_garbage_collector(
    steps: Callable[..., Iterator[None]],
) -> None:
    case = CASES["residual"]
    model, step, _ = case.fresh()
    blocks = []
    with poochplan.apply(_replay_all(case.profile()), model) as session, no_collector():
        for _ in itertools.islice(steps(step, session), 12):
            blocks.append(sys.getallocatedblocks())
        storages = sum(one.storage() is not None for one in session._engine.tape.registered())
    grown = [after - before for before, after in itertools.pairwise(blocks[4:])]
    assert statistics.median(grown) < 5 * storages, f"a step's recording has some 20 blocks a storage: {grown}"


def test_a_session_that_is_never_entered_starts_nothing() -> None:
    import threading

    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (0, 1, 0))
    before = threading.active_count()
    poochplan.apply(plan, case.fresh()[0])
    assert threading.active_count() == before


def test_steps_that_call_the_model_twice_follow_the_plan_when_they_are_announced() -> None:
    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        batch = torch.randn(8, 16)
        return _stages(torch.tanh), lambda model: model(batch).square().sum() + model(batch).sum().item()

    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
        for _ in range(2):
            if session is not None:
                session.step()
            step().backward()  # type: ignore[no-untyped-call]

    case = Case(make)
    plan = _replay_all(case.profile())
    assert Decision.RECOMPUTE in {value.decision for value in plan.values}
    either_way(case, plan, use)


def _weighted(body: Callable[[Net, torch.Tensor], torch.Tensor]) -> Case:
    return of(lambda: Net(body, weight=nn.Parameter(torch.linspace(-1, 1, 16))), 8, 16)


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
    """What an exponential reads is written in place and saved only afterwards, through a view or a chunk."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        scaled = batch * net.weight
        part = part_of(scaled)
        grown = part.exp()
        part.mul_(2.0)
        return grown.sum() + part.square().sum()

    _check(_weighted(body), _recorded_only_until_the_first_save)


def test_a_write_that_no_counter_tells_of_is_recorded() -> None:
    """What an exponential reads is written afterwards through a chunk whose own counter has not been ahead."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        scaled = batch * net.weight
        left, right = scaled.unsafe_chunk(2)
        left.add_(1.0)
        grown = scaled.exp()
        right = right.sigmoid_()
        return grown.sum() + (left.sum() + right.sum())

    def recomputing_the_exponential(profile: Profile) -> Plan:
        problem = Problem.of(profile)
        decisions = [Decision.RECOMPUTE if "exp" in name else Decision.KEEP for name in problem.names]
        assert Decision.RECOMPUTE in decisions
        return plan_with(profile, assemble(problem, decisions, {}))

    _check(_weighted(body), recomputing_the_exponential)
