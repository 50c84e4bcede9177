"""Never a wrong gradient, whatever the user's code does between pack and unpack."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from tests.runtime.nets import CASES, LINK, Residual, equal, snapshot, train
from tests.runtime.random_plans import random_plan

CASE = CASES["residual"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(CASE.profile(), 1, (1, 2, 2))


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return equal([left], [right])


def _both(plan: Plan, use: Callable[[torch.nn.Module, Callable[[], torch.Tensor]], list[torch.Tensor]]) -> None:
    """Runs ``use`` in-core and under the plan and asserts that it returns the same tensors."""
    model, step, _ = CASE.fresh()
    reference = use(model, step)
    model, step, _ = CASE.fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with poochplan.apply(plan, model):
            planned = use(model, step)
    assert _same(reference, planned)


def test_a_plan_for_another_machine_warns_and_is_still_exact(plan: Plan) -> None:
    elsewhere = msgspec.structs.replace(plan, estimate=True, assumed=("link pcie3, instead of spill",))
    with pytest.warns(RuntimeWarning, match="for another machine .link pcie3, instead of spill.: its memory holds"):
        poochplan.apply(elsewhere, CASE.fresh()[0])
    _both(elsewhere, lambda model, step: [step().backward(), *_gradients(model)][1:])


def test_backward_twice_with_retain_graph(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        loss = step()
        loss.backward(retain_graph=True)
        loss.backward()
        return _gradients(model)

    _both(plan, use)


def test_double_backward(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        weights = [p for p in model.parameters() if p.ndim > 1]
        gradients = torch.autograd.grad(step(), weights, create_graph=True)
        sum(g.square().sum() for g in gradients).backward()
        return _gradients(model)

    _both(plan, use)


def test_several_forwards_before_one_backward(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        (step() + step() + step()).backward()
        return _gradients(model)

    _both(plan, use)


def test_gradient_accumulation(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        for _ in range(3):
            step().backward()
        return _gradients(model)

    _both(plan, use)


def test_an_exception_between_forward_and_backward_then_another_step(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        with pytest.raises(KeyError):
            loss = step()
            raise KeyError(loss.item())
        del loss
        step().backward()
        return _gradients(model)

    _both(plan, use)


def test_part_of_the_graph_alone(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        assert isinstance(model, Residual)
        return list(torch.autograd.grad(step(), [model.head.weight]))

    _both(plan, use)


def test_evaluation_inside_the_session(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        loss = step()
        with torch.no_grad():
            step()
        loss.backward()
        return _gradients(model)

    _both(plan, use)


def test_backward_on_another_thread(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        loss = step()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return _gradients(model)

    _both(plan, use)


def test_backward_after_the_session(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    step().backward()
    reference = _gradients(model)
    model, step, _ = CASE.fresh()
    with poochplan.apply(plan, model):
        loss = step()
    loss.backward()
    assert _same(reference, _gradients(model))


def test_the_users_own_checkpoint(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        images = torch.ones(4, 8, 16, 16, requires_grad=True)
        checkpoint(model, images, use_reentrant=False).sum().backward()
        step().backward()
        return _gradients(model)

    _both(plan, use)


def test_an_optimizer_that_steps_inside_backward_is_told_of_like_in_core(plan: Plan) -> None:
    def outcome(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> str:
        loss = step()
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" if "modified by an inplace operation" in str(error) else "other"
        return "none"

    model, step, _ = CASE.fresh()
    reference = outcome(model, step)
    model, step, _ = CASE.fresh()
    with poochplan.apply(plan, model):
        assert outcome(model, step) == reference


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["keep", "swap", "replay"])
def test_a_saved_value_written_in_place_raises_what_autograd_raises(weights: tuple[float, float, float]) -> None:
    written: list[torch.Tensor] = []

    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

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


def test_nothing_is_left_behind_after_many_steps(plan: Plan) -> None:
    threads = threading.active_count()
    model, step, optimizer = CASE.fresh()
    with poochplan.apply(plan, model) as session:
        counts = []
        for step_number in range(12):
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()
            if step_number in (4, 11):
                gc.collect()
                counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        assert not session._engine.cursor.holds_values
        assert counts[0] == counts[1]
    assert threading.active_count() == threads


def test_a_snapshot_holds_loss_gradients_buffers_parameters_and_the_generators_state() -> None:
    model, step, _ = CASE.fresh()
    loss = step()
    loss.backward()
    parameters = list(model.parameters())
    assert len(snapshot(model, loss)) == 1 + 2 * len(parameters) + len(list(model.buffers())) + 1


def test_in_core_training_repeats_itself_bitwise() -> None:
    assert equal(train(CASE, 2)[0], train(CASE, 2)[0])


def test_steps_taken_away_from_the_session_are_plain_ones_and_the_next_follows_the_plan(plan: Plan) -> None:
    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor], away: Callable[[], object]) -> list[torch.Tensor]:
        gradients = []
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            step().backward()
            gradients += _gradients(model)
            model.zero_grad(set_to_none=True)
            with away():  # type: ignore[attr-defined]
                step().backward()
            gradients += _gradients(model)
        return gradients

    reference = use(*CASE.fresh()[:2], contextlib.nullcontext)
    model, step, _ = CASE.fresh()
    with poochplan.apply(plan, model) as session:
        planned = use(model, step, session.away)
        report = session.report()
    assert _same(reference, planned)
    assert (report.total.steps, report.total.fallbacks) == (2, 0)
    with pytest.raises(UsageError, match="expected an open session, found a closed one"), session.away():
        pass
