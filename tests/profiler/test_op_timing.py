"""Ops are timed in C++ where the compiled tape serves, as a dispatch mode and hooks of Python time them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poochplan.formats.profile import Phase, Profile
from poochplan.profiler.capture.captured import CapturedOp
from poochplan.profiler.capture.clock import clock_of
from poochplan.profiler.capture.node_ops import is_node
from poochplan.profiler.live.after_capture import UNDER_A_MODE, CompiledOpTimer, OpTimer, OpTiming
from poochplan.profiler.live.segment_observer import StudyContext
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.replays import compiled_tape
from poochplan.runtime.replays.compiled_tape import TAPE
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.faults import _ctrl_c_is_heard
from tests.runtime.nets import CASES, Case, Net, equal, of, snapshot, taken
from tests.runtime.third_party_networks import NETWORKS, QUICK

__all__ = ["_ctrl_c_is_heard"]

CPU = torch.device("cpu")
KINDS = FUNCTION, LOOP = "function", "loop"


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_tape, "IS_WANTED", True)
    if not TAPE.is_built():
        pytest.skip(TAPE.why_unavailable() or TAPE.last_failure())


class Step:
    """A step of a case, which may be observed, and what it has left."""

    def __init__(self, case: Case, kind: str) -> None:
        self.model, self._loss_of, self._optimizer = case.fresh()
        there = list if kind == FUNCTION else None
        self.context = StudyContext(self.model, CPU, clock_of(CPU), None, [self._optimizer], there_before=there)
        self.left: list[list[torch.Tensor]] = []

    def timed(self, *, is_compiled: bool) -> OpTimer:
        observer = OpTiming(self.context, None, is_compiled=is_compiled)
        self.run(observer)
        assert isinstance(observer.timer, CompiledOpTimer) == is_compiled
        return observer.timer

    def run(self, observer: OpTiming | None = None) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        if observer is not None:
            observer.begin(Segment(0, 0))
        loss = self._loss_of()
        if observer is not None and self.context.is_repeated:
            observer.enter(Phase.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if observer is not None:
            observer.end(stepped=True)
        self.left.append(snapshot(self.model, loss))


def seen(timer: OpTimer) -> list[tuple[Any, ...]]:
    def facts(op: CapturedOp) -> tuple[Any, ...]:
        return "" if op.phase is Phase.BACKWARD else op.layer, () if is_node(op.name) else op.shapes

    return [(UNDER_A_MODE.get(op.name, op.name), op.phase, *facts(op)) for op in timer.ops]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*CASES, *QUICK])
def test_both_see_the_same_ops_and_leave_what_the_plain_step_leaves(name: str, kind: str) -> None:
    case = CASES.get(name) or NETWORKS[name]
    plain, step = Step(case, kind), Step(case, kind)
    for _ in range(3):
        plain.run()
    step.run()  # makes the optimizer's states
    by_mode, compiled = (step.timed(is_compiled=is_compiled) for is_compiled in (False, True))
    assert seen(compiled) == seen(by_mode)
    assert equal(step.left, plain.left)
    assert all(op.duration_s > 0 for op in compiled.ops)
    is_by_node = {is_node(op.name) for op in compiled.ops if op.phase is Phase.BACKWARD}
    assert is_by_node == {kind == LOOP}


def looking(found: list[int]) -> Callable[[Any, Any, torch.Tensor], None]:
    return lambda module, args, output: found.append(mode_count())


@pytest.mark.parametrize("kind", KINDS)
def test_no_mode_is_on_in_a_step_that_is_timed_in_c_plus_plus(kind: str) -> None:
    step, found = Step(CASES["residual"], kind), list[int]()
    step.model.register_forward_hook(looking(found))
    for parameter in step.model.parameters():
        parameter.register_hook(lambda _: found.append(mode_count()))
    step.timed(is_compiled=True)
    assert len(found) > 2
    assert not any(found)


def test_it_times_nothing_behind_its_step_nor_in_a_pause() -> None:
    step = Step(CASES["residual"], LOOP)
    timer = step.timed(is_compiled=True)
    count = len(timer.ops)
    step.run()
    with timer.running():
        torch.ones(2).neg()
        with timer.beside_nodes():
            torch.ones(2).neg()
    assert [op.name for op in timer.ops[count:]] == ["aten.ones.default", "aten.neg.default"]


def test_nodes_are_timed_in_their_backward_alone_also_if_it_raises() -> None:
    timer = CompiledOpTimer(nn.Linear(1, 1), CPU)
    weight = torch.ones(2, requires_grad=True)
    handle = weight.register_hook(lambda _: 1 / 0)
    loss = (weight * 2).sum()
    with timer.running(), pytest.raises(ZeroDivisionError):
        timer.observed([loss], lambda: loss.backward(retain_graph=True))  # type: ignore[no-untyped-call]
    handle.remove()
    assert [op.name for op in timer.ops] == ["autograd.SumBackward0", "autograd.MulBackward0"]
    with timer.running(), timer.away():
        loss.backward()  # type: ignore[no-untyped-call]
    assert len(timer.ops) == 2


def test_a_model_that_is_compiled_is_timed_by_a_mode() -> None:
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    context = StudyContext(model, CPU, clock_of(CPU), None, [])
    assert not isinstance(OpTiming(context, None, is_compiled=True).timer, CompiledOpTimer)


def profiled(body: Callable[[Net, torch.Tensor], torch.Tensor]) -> Profile:
    model, step, _ = of(lambda: Net(body, linear=nn.Linear(8, 8)), 4, 8).fresh()
    return taken(step, model, iterations=2)


def test_where_torch_runs_other_ops_because_a_mode_looks_on_a_mode_times_them_too() -> None:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        return (1 - net.linear(batch).sigmoid()).prod(dim=1)  # the gradient of ``prod`` has another formula

    profile = profiled(body)
    assert not any("steps differ" in note for note in profile.notes)


def test_an_interrupt_amid_a_look_at_an_op_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    timer, library = CompiledOpTimer(nn.Linear(1, 1), CPU), torch.library.Library("pooch_interrupted", "DEF")
    library.define("never_seen(Tensor x) -> Tensor")  # its facts are asked for
    library.impl("never_seen", torch.clone, "CPU")
    monkeypatch.setattr(compiled_tape._HELPERS, "facts", interrupted)
    with timer.running(), pytest.raises(KeyboardInterrupt):
        torch.ops.pooch_interrupted.never_seen(torch.ones(2)).sum()
        for _ in range(1000):
            pass
    assert "aten.sum.default" not in [op.name for op in timer.ops]
