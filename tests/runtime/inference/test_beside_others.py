"""Arenas of passes beside what else there is: sessions, copies and compiled models, and where nothing can be served."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import AllocatorError, UsageError
from tests.runtime.inference.passes import KINDS, SETTLED, alike, is_served_whole, leaves, plain, served
from tests.runtime.nets import CASES
from tests.runtime.served import needs_compiler, plan_of

pytestmark = [pytest.mark.cpu_device, needs_compiler]


def _as_it_is(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [_as_it_is, _in_place])
def test_a_compiled_model_is_served_and_not_compiled_again(compiled: Callable[[nn.Module], nn.Module]) -> None:
    plain_model, batch = KINDS["convolutions"].fresh()
    expected = plain(plain_model, batch)
    model = compiled(plain_model)
    with torch.no_grad():
        model(batch)
    with served(model, batch) as arena, torch._dynamo.config.patch(error_on_recompile=True):
        assert alike(leaves(model(batch)), expected)
        assert is_served_whole(arena)


def test_copies_and_pickles_of_the_model_have_no_part_in_its_arena() -> None:
    model, batch = KINDS["recurrent"].fresh()
    with served(model, batch) as arena:
        before = arena.report()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert alike(leaves(other(batch)), plain(other, batch))
        assert arena.report() == before


def test_an_arena_within_a_session_is_refused_in_one_line() -> None:
    model, loss_of, _ = CASES["attention"].fresh()
    with poochplan.apply(plan_of("attention"), model):
        with pytest.raises(UsageError, match=r"^arena\(\): expected no open session on this thread"):
            poochplan.arena(nn.Linear(2, 2))
        loss_of().backward()


def test_passes_within_a_session_are_ordinary() -> None:
    model, loss_of, _ = CASES["attention"].fresh()
    with poochplan.arena(model) as arena:
        with poochplan.apply(plan_of("attention"), model), torch.no_grad():
            for _ in range(SETTLED + 1):
                loss_of()
        assert (arena.report().passes, arena.report().layouts) == (SETTLED + 1, 0)
        with torch.no_grad():
            for _ in range(SETTLED + 1):
                loss_of()
        assert arena.report().layouts == 1


def test_without_a_compiler_one_line_says_so_and_passes_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AllocatorError("expected a C++ compiler, found none; install g++")

    monkeypatch.setattr("poochplan.sessions.library", fail)
    model, batch = KINDS["skips"].fresh()
    with pytest.warns(RuntimeWarning, match=r"^poochplan: arena\(\) .*install g\+\+; they are ordinary$") as told:
        arena = poochplan.arena(model)
    assert (len(told), told[0].filename) == (1, __file__)
    with arena, torch.no_grad():
        assert alike(leaves(model(batch)), plain(model, batch))
    assert "install g++" in arena.report().reason
    assert "install g++" in str(arena.report())


def test_a_model_elsewhere_is_told_of_in_one_line() -> None:
    with pytest.warns(RuntimeWarning, match=r"found a model on meta"):
        poochplan.arena(nn.Linear(2, 2, device="meta")).close()


def test_a_layer_that_has_other_kernels_with_hooks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"found torch\.nn\.TransformerEncoderLayer, which then leaves its fast path"):
        poochplan.arena(nn.TransformerEncoderLayer(8, 2))
