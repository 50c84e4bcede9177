"""A session that did nothing says so, and one that was left open ends: no other model is moved by it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.runtime.run_report import SessionStatus
from tests.runtime.besides import BATCH, WIDTH, fresh, profiled
from tests.runtime.random_plans import random_plan

pytestmark = pytest.mark.cpu_device


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(profiled(fresh(), None), 1, (0, 1, 0))


def step(model: nn.Module) -> None:
    model(torch.ones(BATCH, WIDTH)).square().mean().backward()
    model.zero_grad(set_to_none=True)


def test_a_session_whose_model_is_never_called_says_so_and_reports_no_success(plan: Plan) -> None:
    model, other = fresh(), fresh()
    with (
        pytest.warns(
            RuntimeWarning, match="Layers was not called with gradients inside the session, so no step"
        ) as told,
        poochplan.apply(plan, model) as session,
    ):
        step(other)
    assert told[0].filename == __file__
    report = session.report()
    assert (report.status, report.steps_followed, report.total.steps) == (SessionStatus.NO_STEPS, 0, 0)
    assert report.total.out_bytes == 0, "the other model was left alone, though it saves what the plan says"


def test_steps_that_other_hooks_hide_are_told_of(plan: Plan) -> None:
    model = fresh()
    with (
        pytest.warns(RuntimeWarning, match="nothing that Layers saved in 2 steps reached the session"),
        poochplan.apply(plan, model) as session,
        torch.autograd.graph.save_on_cpu(),
    ):
        step(model)
        step(model)
    assert session.report().status is SessionStatus.NOT_FOLLOWED


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_session_in_which_an_exception_was_raised_says_no_more_than_that(plan: Plan) -> None:
    with pytest.raises(ZeroDivisionError), poochplan.apply(plan, fresh()):
        1 / 0


def _left_open(plan: Plan, model: nn.Module) -> None:
    session = poochplan.apply(plan, model)
    session.__enter__()
    step(model)
    raise ZeroDivisionError


def test_a_session_left_open_ends_with_its_frame(plan: Plan) -> None:
    model, other = fresh(), fresh()
    with pytest.raises(ZeroDivisionError) as raised:
        _left_open(plan, model)
    assert model._forward_pre_hooks
    raised.value.__traceback__ = None
    del raised
    gc.collect()
    assert not model._forward_pre_hooks
    saved = []
    other.register_forward_hook(lambda *_: saved.append(torch.autograd.graph.saved_tensors_hooks))
    with poochplan.apply(plan, other) as session:  # there is no session on this thread
        step(other)
    assert session.report().steps_followed == 1


def test_a_session_that_a_traceback_keeps_ends_at_the_next_apply(plan: Plan) -> None:
    """As in Jupyter, where the last traceback holds the frames of the cell that raised."""
    model, other = fresh(), fresh()
    kept: list[BaseException] = []
    try:
        _left_open(plan, model)
    except ZeroDivisionError as error:
        kept.append(error)
    step(other)  # not swapped: it is none of the model's steps
    with (
        pytest.warns(RuntimeWarning, match="a session for Layers still open after the code that entered it had ended"),
        poochplan.apply(plan, other) as session,
    ):
        step(other)
    assert session.report().steps_followed == 1
    assert not model._forward_pre_hooks
    assert kept


def test_the_same_function_may_leave_a_session_open_and_be_called_again(plan: Plan) -> None:
    kept: list[BaseException] = []
    for _ in range(2):
        try:
            _left_open(plan, fresh())
        except ZeroDivisionError as error:
            kept.append(error)
    kept.clear()
    gc.collect()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_another_model_is_never_moved_by_a_session_that_is_open(plan: Plan) -> None:
    model, other = fresh(), fresh()
    with poochplan.apply(plan, model) as session:
        step(model)
        moved = session.report().total.out_bytes
        step(other)
        step(other)
        assert session.report().total.out_bytes == moved > 0
        step(model)
    report = session.report()
    assert (report.status, report.total.steps, report.steps_followed) == (SessionStatus.FOLLOWED, 2, 2)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_session_within_another_is_refused_also_where_a_generator_holds_the_outer_one(plan: Plan) -> None:
    model = fresh()

    def training() -> Iterator[None]:
        with poochplan.apply(plan, model):
            yield

    outer = training()
    next(outer)
    with pytest.raises(UsageError, match="expected no open session on this thread"), poochplan.apply(plan, fresh()):
        pass
    step(model)
    assert next(outer, None) is None
