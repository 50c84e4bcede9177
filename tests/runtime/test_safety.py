"""Never a wrong gradient, whatever the user's code does between pack and unpack."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.runtime.session import Session
from tests.runtime.autograd_steps import together
from tests.runtime.nets import CASES, LINK, Use, either_way, equal, followed, gradients, snapshot, train
from tests.runtime.random_plans import random_plan

CASE = CASES["residual"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(CASE.profile(), 1, (1, 2, 2))


def test_a_plan_for_another_machine_warns_and_is_still_exact(plan: Plan) -> None:
    elsewhere = msgspec.structs.replace(plan, estimate=True, assumed=("link pcie3, instead of spill",))
    with pytest.warns(RuntimeWarning, match="for another machine .link pcie3, instead of spill.: its memory holds"):
        followed(CASE, elsewhere)


Step = Callable[[], torch.Tensor]


def backward_twice(model: nn.Module, step: Step, session: Session | None) -> None:
    loss = step()
    loss.backward(retain_graph=True)
    loss.backward()


def double_backward(model: nn.Module, step: Step, session: Session | None) -> None:
    weights = [p for p in model.parameters() if p.ndim > 1]
    found = torch.autograd.grad(step(), weights, create_graph=True)
    sum(g.square().sum() for g in found).backward()


def several_forwards_before_one_backward(model: nn.Module, step: Step, session: Session | None) -> None:
    (step() + step() + step()).backward()


def gradient_accumulation(model: nn.Module, step: Step, session: Session | None) -> None:
    for _ in range(3):
        step().backward()


def an_exception_between_forward_and_backward_then_another_step(
    model: nn.Module, step: Step, session: Session | None
) -> None:
    with pytest.raises(KeyError):
        loss = step()
        raise KeyError(loss.item())
    del loss
    step().backward()


def part_of_the_graph_alone(model: nn.Module, step: Step, session: Session | None) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(step(), [model.head.weight])


def evaluation_inside_the_session(model: nn.Module, step: Step, session: Session | None) -> None:
    loss = step()
    with torch.no_grad():
        step()
    loss.backward()


def backward_on_another_thread(model: nn.Module, step: Step, session: Session | None) -> None:
    together(step().backward)


def the_users_own_checkpoint(model: nn.Module, step: Step, session: Session | None) -> None:
    images = torch.ones(4, 8, 16, 16, requires_grad=True)
    checkpoint(model, images, use_reentrant=False).sum().backward()
    step().backward()


def a_parameter_written_between_forward_and_backward(
    model: nn.Module, step: Step, session: Session | None
) -> list[torch.Tensor]:
    """As by an optimizer that steps inside backward."""
    loss, said = step(), ""
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
    model.zero_grad(set_to_none=True)  # a replay meets it earlier
    return [torch.tensor("modified by an inplace operation" in said)]


USES: list[Use] = [
    backward_twice,
    double_backward,
    several_forwards_before_one_backward,
    gradient_accumulation,
    an_exception_between_forward_and_backward_then_another_step,
    part_of_the_graph_alone,
    evaluation_inside_the_session,
    backward_on_another_thread,
    the_users_own_checkpoint,
    a_parameter_written_between_forward_and_backward,
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("use", USES)
def test_whatever_a_loop_does_it_does_what_it_does_in_core(plan: Plan, use: Use) -> None:
    either_way(CASE, plan, use, is_followed=False)


def test_backward_after_the_session(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    step().backward()
    reference = gradients(model)
    model, step, _ = CASE.fresh()
    with poochplan.apply(plan, model):
        loss = step()
    loss.backward()
    assert equal([reference], [gradients(model)])


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["keep", "swap", "replay"])
def test_a_saved_value_written_in_place_raises_what_autograd_raises(weights: tuple[float, float, float]) -> None:
    written: list[torch.Tensor] = []

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            hidden = self.first(batch).sigmoid()
            written[:] = [hidden.detach()]
            return self.second(hidden)

    batch = torch.randn(4, 8)
    model = Writes()
    profile = poochplan.profile(lambda: model(batch).sum(), model=model, iterations=1, link=LINK)
    # The profile sees the alias in ``written`` and pins the value; a plan that did not know must not go wrong either.
    free = msgspec.structs.replace(
        profile, values=tuple(msgspec.structs.replace(value, pinned="") for value in profile.values)
    )
    with poochplan.apply(random_plan(free, 0, weights), model):
        loss = model(batch).sum()
        written[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_options_that_do_not_exist_are_refused(plan: Plan) -> None:
    model, _, _ = CASE.fresh()
    with pytest.raises(UsageError, match="on_divergence"):
        poochplan.apply(plan, model, on_divergence="ignore")  # type: ignore[arg-type]


def test_a_second_session_on_a_thread_is_refused_and_the_first_goes_on(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    other, _, _ = CASE.fresh()
    with poochplan.apply(plan, model) as session:
        step().backward()
        for second in (model, other):
            with pytest.raises(UsageError, match="expected no open session on this thread, found one for Residual"):
                poochplan.apply(plan, second).__enter__()
        with pytest.raises(UsageError, match=r"profile\(\): expected no open session on this thread"):
            poochplan.profile(step, model=model, iterations=1, link=LINK)
        step().backward()
        assert session.report().total.steps == 2
        assert session.report().last_step.fallbacks == 0
        with session.away(), poochplan.apply(plan, other) as inner:
            assert inner.report().total.steps == 0
    with poochplan.apply(plan, model):  # and after its end another one is welcome
        step().backward()


def test_a_second_session_for_a_model_is_refused_on_another_thread_too(plan: Plan) -> None:
    model, _, _ = CASE.fresh()
    other, other_step, _ = CASE.fresh()
    raised: list[str] = []

    def second() -> None:
        with poochplan.apply(plan, other) as session:
            other_step().backward()
        assert session.report().total.steps == 1
        try:
            poochplan.apply(plan, model).__enter__()
        except UsageError as error:
            raised.append(str(error))

    with poochplan.apply(plan, model):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert raised == [
        "apply(): expected no open session for this Residual, found one on another thread; "
        "wait until its with block has ended"
    ]


def test_a_snapshot_holds_loss_gradients_buffers_parameters_and_the_generators_state() -> None:
    model, step, _ = CASE.fresh()
    loss = step()
    loss.backward()
    parameters = list(model.parameters())
    assert len(snapshot(model, loss)) == 1 + 2 * len(parameters) + len(list(model.buffers())) + 1


def test_in_core_training_repeats_itself_bitwise() -> None:
    assert equal(train(CASE, 2)[0], train(CASE, 2)[0])


def test_steps_taken_away_from_the_session_are_plain_ones_and_the_next_follows_the_plan(plan: Plan) -> None:
    def use(model: nn.Module, step: Step, session: Session | None) -> list[torch.Tensor]:
        found = []
        for away in (None, session, None, session):
            model.zero_grad(set_to_none=True)
            with contextlib.nullcontext() if away is None else away.away():
                step().backward()
            found += gradients(model)
        return found

    report = either_way(CASE, plan, use)
    assert report.total.steps == 2


def test_nobody_steps_away_from_a_session_that_is_closed(plan: Plan) -> None:
    with poochplan.apply(plan, CASE.fresh()[0]) as session:
        pass
    with pytest.raises(UsageError, match="expected an open session, found a closed one"), session.away():
        pass
