"""Copies and pickles of a model within a session have no hook of ours, and the session goes on undisturbed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.session import Session
from poochplan.tensors.modes import around_calls
from tests.runtime.compiled_nets import WAYS, Chained, compiled, profiled, train
from tests.runtime.nets import Case, Loop, Residual, equal, in_core, of, snapshot
from tests.runtime.random_plans import random_plan

STEPS = 3


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
}
each_way = pytest.mark.parametrize("way", COPIES)


def _plain() -> nn.Module:
    layers = (nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Tanh())
    return nn.Sequential(*layers)


NETS = {"plain": of(_plain, 8, 16), "residual": of(Residual, 4, 8, 16, 16)}


def _plan(case: Case) -> poochplan.Plan:
    return random_plan(case.profile(), 0, (1, 2, 2))


def _hooks(model: nn.Module) -> list[Any]:
    """All hooks of all modules."""
    names = [name for name in vars(model) if name.endswith(("_hooks", "_hooks_with_kwargs"))]
    assert "_forward_pre_hooks_with_kwargs" in names
    return [hook for module in model.modules() for name in names for _, hook in vars(module)[name].items()]


def _trained_alone(model: nn.Module, case: Case) -> list[torch.Tensor]:
    """What a step of the model leaves behind, on the case's data."""
    torch.manual_seed(0)
    _, loss_of = case.make()
    torch.manual_seed(5)
    loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    return snapshot(model, loss)


@each_way
@pytest.mark.parametrize("name", NETS)
def test_a_copy_has_no_hook_of_ours_and_trains_by_itself_and_the_session_goes_on_undisturbed(
    name: str, way: str
) -> None:
    """Copies are made before the first step, between steps, and between forward and backward."""
    case, plan = NETS[name], _plan(NETS[name])  # the profile draws numbers
    loop = Loop(case, at=lambda place: copies.append(COPIES[way](loop.model)) if place in ("step", "forward") else None)
    with poochplan.apply(plan, loop.model) as session:
        copies = [COPIES[way](loop.model)]
        assert session._engine.segment.number == 0
        for _ in range(STEPS):
            loop.step()
        assert _hooks(loop.model)
    assert equal(in_core(case, STEPS), loop.seen)
    assert [_hooks(one) for one in (loop.model, *copies)] == [[]] * (2 + 2 * STEPS)
    assert not any(vars(one._forward_pre_hooks) for one in (loop.model, copies[0]))
    assert equal([_trained_alone(case.fresh()[0], case)], [_trained_alone(copies[0], case)])
    assert session._engine.segment.number == session.report().total.steps == STEPS
    assert session.report().total.fallbacks == 0, session.report().total.fallback_reasons


@pytest.mark.cpu_device
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_names_nothing_of_this_package(protocol: int) -> None:
    """So it is read where the package is not installed."""
    case = NETS["plain"]
    model = case.fresh()[0]
    outside = pickle.dumps(model, protocol)
    with poochplan.apply(_plan(case), model):
        both = [pickle.dumps(model, protocol), pickle._dumps(model, protocol)]  # type: ignore[attr-defined] # in Python
    for within in both:
        assert vars(pickle.loads(within)).keys() == vars(pickle.loads(outside)).keys()
        words = [argument for _, argument, _ in pickletools.genops(within) if isinstance(argument, str)]
        assert any("torch" in word for word in words)
        assert not any("poochplan" in word for word in words)


EXPORTS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "jit.script": lambda model, rows: torch.jit.script(model),
    "jit.trace": torch.jit.trace,
    "export": lambda model, rows: torch.export.export(model, (rows,)).module(),
    "export, strict": lambda model, rows: torch.export.export(model, (rows,), strict=True).module(),
}


@pytest.mark.parametrize("way", EXPORTS)
def test_a_model_is_exported_within_a_session_and_the_session_goes_on(way: str) -> None:
    case = NETS["plain"]
    model, step, _ = case.fresh()
    rows = torch.randn(8, 16)
    with poochplan.apply(_plan(case), model) as session:
        step().backward()
        model.eval()
        with torch.no_grad():
            exported = EXPORTS[way](model, rows)
            assert torch.equal(exported(rows), model(rows))
        model.train()
        step().backward()
    assert session.report().steps_followed == session.report().total.steps == 2


def a_users_hook(module: nn.Module, args: Any) -> None:
    """Can be pickled by its name."""
    CALLS.append(module)


CALLS: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


@each_way
def test_a_users_own_hooks_travel_and_are_removed_by_their_handles(way: str) -> None:
    case = NETS["plain"]
    model, step, _ = case.fresh()
    before = model.register_forward_pre_hook(a_users_hook)
    with poochplan.apply(_plan(case), model) as session:
        within = model.register_forward_pre_hook(a_users_hook, prepend=True)
        other = model.register_forward_pre_hook(a_users_hook, with_kwargs=False)
        copied = COPIES[way](model)
        assert list(copied._forward_pre_hooks) == [within.id, before.id, other.id]
        assert _hooks(copied) == [a_users_hook] * 3
        CALLS.clear()
        step().backward()
        assert [model] * 3 == CALLS
        before.remove()
        assert session.report().total.fallbacks == 0
    assert _hooks(model) == [a_users_hook] * 2
    within.remove()
    other.remove()
    assert _hooks(model) == []


@pytest.mark.cpu_device
def test_two_who_listen_to_one_model_leave_in_any_order() -> None:
    model = nn.Linear(2, 2)
    heard: list[str] = []
    first = around_calls(model, lambda args, kwargs: heard.append("first"))
    second = around_calls(model, lambda args, kwargs: heard.append("second"))
    first.__enter__()
    second.__enter__()
    assert _hooks(copy.deepcopy(model)) == []
    first.__exit__(None, None, None)
    assert _hooks(copy.deepcopy(model)) == []
    model(torch.ones(2))
    assert heard == ["second"]
    second.__exit__(None, None, None)
    assert _hooks(model) == []
    assert vars(model._forward_pre_hooks) == vars(model._forward_pre_hooks_with_kwargs) == {}


def _made(where: str, how: str) -> nn.Module:
    """A model that is compiled as a whole or in a part of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = compiled(Chained(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid()), how, "eager")
    return block if where == "whole" else Chained(nn.Linear(32, 32), block, nn.Linear(32, 32))


@each_way
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("where", ["whole", "part"])
def test_a_model_that_is_compiled(where: str, how: str, way: str) -> None:
    batch = torch.randn(16, 32)
    profile = profiled(_made(where, how), batch)
    reference = train(_made(where, how), batch)
    model, copies = _made(where, how), []

    def copy_it(loss: torch.Tensor | None = None) -> None:
        copies.append(COPIES[way](model))
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]

    with poochplan.apply(random_plan(profile, 0, (0, 1, 0)), model) as session:
        assert equal(train(model, batch, back=copy_it, before=copy_it), reference)
        steps = session._engine.segment.number
    assert session.report().total.fallbacks == 0
    assert len(copies) == 6
    for copied in copies:
        assert _hooks(copied) == []
        assert equal([step[:1] for step in train(copied, batch)], [step[:1] for step in reference])
    assert session._engine.segment.number == steps == STEPS
    torch._dynamo.reset()


@pytest.mark.cpu_device
def test_no_copy_takes_the_session_along() -> None:
    """Of the loss, the optimizer, the gradients and the model: there is one session, and one engine."""
    case = NETS["residual"]
    model, step, optimizer = case.fresh()

    def ours() -> int:
        return sum(type(thing) in (Session, Engine) for thing in gc.get_objects())

    with poochplan.apply(_plan(case), model) as session:
        step().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        before, loss = ours(), step()
        copies = [copy.deepcopy(thing) for thing in (loss.detach(), optimizer, model)]
        pickles = [pickle.dumps(thing) for thing in (loss.detach(), optimizer, model)]
        assert ours() == before
        loss.backward()
        assert session.report().total.fallbacks == 0
    assert len(copies) == len(pickles)  # they live until here
    assert not any(b"poochplan" in one for one in pickles)
