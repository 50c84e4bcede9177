"""Dispatch modes of the user's see the step as it is in-core, the plan is followed, and a default device is theirs."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import poochplan
from poochplan.formats.plan import Plan
from poochplan.planner.simulator.problem import Problem
from poochplan.tensors.modes import ToggledMode
from tests.planner.plans import plan_with
from tests.runtime.nets import CASES, LINK, Case, Loop, equal, followed, in_core, of, train
from tests.runtime.random_plans import random_plan
from tests.runtime.test_recording import one_late_value

STEPS = 3
"""Of which the session meters two."""
PLANS: dict[str, Callable[[Case], Plan]] = {
    "mixed": lambda case: random_plan(case.profile(), 0, (1, 2, 2)),
    "swap": lambda case: random_plan(case.profile(), 0, (0, 1, 0)),
    "replay": lambda case: random_plan(case.profile(), 0, (0, 0, 1)),
    "late": lambda case: plan_with(case.profile(), one_late_value(Problem.of(case.profile()))),
}
"""In the last one recording begins in the middle of forward."""
SPANS = {
    "around the session": ("before", "after"),
    "within the session": ("opened", "closing"),
    "from before the session into it": ("before", "closing"),
    "from the session out of it": ("opened", "after"),
    "around each step": ("step", "updated"),
    "around each forward": ("step", "forward"),
    "around each backward": ("forward", "backward"),
    "from backward to the next forward": ("forward", "step"),
}
"""Where a mode is entered, and where it is left."""
PAIRS = [*(("mixed", span) for span in SPANS), *((plan, "around each step") for plan in ("swap", "replay", "late"))]
some_pairs = pytest.mark.parametrize(("plan", "span"), [("mixed", "around the session"), ("late", "around each step")])
"""For tools that count the ops which the test of all pairs compares."""


class Ops(TorchDispatchMode):
    """The ops that a user's mode is handed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def without_detach(self) -> list[str]:
        """Autograd itself detaches at other places where there are hooks on what is saved."""
        return [name for name in self.seen if name != "aten.detach.default"]


class Everything(Ops):
    """A mode that asks for what a session runs as well."""

    sees_poochplan = True


class Span:
    """Enters a mode where the span begins and leaves it where it ends, as often as a step comes by."""

    def __init__(self, mode: Any, span: str) -> None:
        self.mode = mode
        self.begin, self.end = SPANS[span]
        self.inside = False

    def at(self, place: str) -> None:
        if place == self.end and self.inside:
            self.mode.__exit__(None, None, None)
            self.inside = False
        if place == self.begin:
            self.mode.__enter__()
            self.inside = True

    def finish(self) -> None:
        if self.inside:
            self.at(self.end)


def run(case: Case, plan: Plan | None, *spans: Span) -> None:
    """Each step leaves behind what it does in-core, and the plan is followed to the end; spans are told each place."""

    def at(place: str) -> None:
        for span in spans if place == "step" else reversed(spans):
            span.at(place)

    seen, report = train(case, STEPS, plan, at)
    for span in reversed(spans):
        span.finish()
    assert equal(in_core(case, STEPS), seen)
    assert report is None or report.total.fallbacks == 0, report.total.fallback_reasons


@pytest.fixture(autouse=True)
def _the_stack_is_as_it_was() -> Iterator[None]:
    yield
    left = _get_current_dispatch_mode_stack()
    for _ in left:
        torch._C._pop_torch_dispatch_stack(None)  # or the tests after this one would fail too
    assert left == []


@pytest.mark.parametrize(("plan", "span"), PAIRS)
def test_a_mode_sees_the_ops_of_in_core_training_in_their_order(plan: str, span: str) -> None:
    case = CASES["residual"]
    given, plain, hooked, planned = PLANS[plan](case), Ops(), Ops(), Ops()
    run(case, None, Span(plain, span))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        run(case, None, Span(hooked, span))
    run(case, given, Span(planned, span))
    assert len(plain.without_detach) > 0
    assert planned.without_detach == plain.without_detach
    assert planned.seen == hooked.seen


@pytest.mark.parametrize("name", CASES)
def test_two_modes_one_around_the_other_see_the_same_ops(name: str) -> None:
    case, seen = CASES[name], []
    for plan in (None, PLANS["mixed"](case)):
        outer, inner = Ops(), Ops()
        run(case, plan, Span(outer, "around the session"), Span(inner, "around each step"))
        seen.append([outer.without_detach, inner.without_detach])
    assert seen[0] == seen[1]


class Scoped(nn.Module):
    """Enters a mode in the middle of its own forward, around every other layer."""

    def __init__(self, mode: Ops) -> None:
        super().__init__()
        self.mode = mode
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with self.mode if index % 2 else contextlib.nullcontext():
                batch = layer(batch)
        return batch


@pytest.mark.parametrize("plan", PLANS)
def test_a_mode_that_the_model_enters_in_its_forward(plan: str) -> None:
    """Recording begins and ends while it is on, and it is left in the middle of what is recorded."""
    given = PLANS[plan](of(lambda: Scoped(Ops()), 8, 16))
    seen = []
    for one in (None, given):
        mode = Ops()
        case = of(lambda mode=mode: Scoped(mode), 8, 16)  # type: ignore[misc]
        steps, report = train(case, STEPS, one)
        assert report is None or report.total.fallbacks == 0
        seen.append((steps, mode.without_detach))
    (reference, ops), (planned, planned_ops) = seen
    assert equal(reference, planned)
    assert planned_ops == ops != []


def test_a_mode_between_two_steps_alone() -> None:
    """The session goes on recording where it is left; in backward and behind it the mode is alone."""
    mode, stacks = Ops(), []
    outside = _get_current_dispatch_mode_stack()

    def at(place: str) -> None:
        if place == "forward":
            loop.model.head.weight.register_hook(lambda _: stacks.append(_get_current_dispatch_mode_stack()))
        if place == "backward":
            mode.__enter__()
            stacks.append(_get_current_dispatch_mode_stack()[:-1])
        if place == "updated":
            mode.__exit__(None, None, None)

    loop = Loop(CASES["residual"], at=at)
    with poochplan.apply(PLANS["mixed"](CASES["residual"]), loop.model, meter="always") as session:
        for _ in range(STEPS):
            loop.step()
    assert equal(in_core(CASES["residual"], STEPS), loop.seen)
    assert stacks == [outside] * len(stacks)
    assert session.report().total.fallbacks == 0


@some_pairs
def test_a_flop_counter_counts_what_it_counts_in_core(plan: str, span: str) -> None:
    """So replays are not counted."""
    case = CASES["attention"]
    reference, counter = FlopCounterMode(display=False), FlopCounterMode(display=False)
    run(case, None, Span(reference, span))
    run(case, PLANS[plan](case), Span(counter, span))
    assert counter.get_total_flops() == reference.get_total_flops() > 0
    assert counter.get_flop_counts() == reference.get_flop_counts()


def test_a_mode_that_asks_for_it_sees_replays_and_buffers_too() -> None:
    case = CASES["residual"]
    reference, everything = Ops(), Everything()
    run(case, None, Span(reference, "around each step"))
    run(case, PLANS["mixed"](case), Span(everything, "around each step"))
    for name in ("aten.convolution.default", "aten.empty.memory_format"):
        assert everything.seen.count(name) > reference.seen.count(name)


class Tracked(Span):
    """A memory tracker is told of each new step; else it refuses to see the model called twice."""

    def at(self, place: str) -> None:
        super().at(place)
        if place == "step":
            self.mode.reset_mod_stats()


@some_pairs
def test_a_memory_tracker_runs_through(plan: str, span: str) -> None:
    tracker = MemTracker()
    run(CASES["residual"], PLANS[plan](CASES["residual"]), Tracked(tracker, span))
    assert max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values()) > 0


@pytest.mark.parametrize("span", ["around the session", "around each step"])
def test_the_profiler_of_torch_runs_through(span: str) -> None:
    case = CASES["residual"]
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True
    )
    run(case, PLANS["mixed"](case), Span(profiler, span))
    assert any("convolution" in event.key for event in profiler.key_averages())


def test_a_step_without_memory_in_the_middle_of_a_planned_one() -> None:
    def at(place: str) -> None:
        if place == "forward":
            with FakeTensorMode():
                other = nn.Sequential(nn.Linear(3, 4), nn.GELU())
                other(torch.empty(2, 3)).sum().backward()
            assert type(other[0].weight.grad) is FakeTensor

    case = CASES["residual"]
    followed(case, PLANS["mixed"](case), STEPS, at)


def test_a_session_around_which_there_are_fake_tensors() -> None:
    """They have nothing that could be moved: all is kept, and counted as it is without a session."""
    case = CASES["residual"]
    flops = []
    for plan in (None, PLANS["mixed"](case)):
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            model, step, _ = case.fresh()
            with contextlib.nullcontext() if plan is None else poochplan.apply(plan, model):
                step().backward()  # type: ignore[no-untyped-call]
            assert all(type(p.grad) is FakeTensor for p in model.parameters())
        flops.append(counter.get_flop_counts())
    assert flops[0] == flops[1]


class Ours(ToggledMode):
    """One that passes every op on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu_device
def test_what_is_switched_on_lies_below_all_modes_of_the_user_and_above_those_of_torch() -> None:
    first, second, user, other = Ours(), Ours(), Ops(), Ops()
    with FakeTensorMode() as fake, user, other:
        first.switch_on()
        second.switch_on()
        assert _get_current_dispatch_mode_stack() == [fake, first, second, user, other]
        first.switch_off()
        assert _get_current_dispatch_mode_stack() == [fake, second, user, other]
        first.switch_on()
        assert _get_current_dispatch_mode_stack() == [fake, second, first, user, other]
        second.switch_off()
        first.switch_off()
        assert _get_current_dispatch_mode_stack() == [fake, user, other]


SWAPS, REPLAYS = (0, 1, 0), (0, 0, 1)
ROOT = Path(__file__).parents[2]
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


@pytest.mark.parametrize("weights", [SWAPS, REPLAYS])
@pytest.mark.parametrize("name", ["residual", "attention"])
def test_a_session_within_a_device_context_gives_the_gradients_of_in_core_training(
    name: str, weights: tuple[float, float, float]
) -> None:
    others = torch.device("meta")

    def at(place: str) -> None:
        if place == "step":
            others.__enter__()
        elif place == "backward":
            others.__exit__(None, None, None)

    case = CASES[name]
    total = followed(case, random_plan(case.profile(), 1, weights), at=at).total
    assert total.out_bytes + total.replayed_values > 0


@pytest.mark.cpu_device
@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_a_profile_and_a_session_under_another_default_device_are_as_always(mode: str) -> None:
    model, step, _ = CASES["residual"].fresh()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # AdamW of torch 2.12 counts its steps on the default device
    options = {"model": model, "optimizer": optimizer, "iterations": 1, "mode": mode, "link": LINK}
    usual = poochplan.profile(step, **options)  # type: ignore[call-overload]
    torch.set_default_device("meta")
    try:
        profile = poochplan.profile(step, **options)  # type: ignore[call-overload]
        plan = random_plan(profile, 0, SWAPS)
        with poochplan.apply(plan, model) as session:
            step().backward()
    finally:
        torch.set_default_device(None)
    assert profile.ops_fingerprint == usual.ops_fingerprint
    assert session.report().total.fallbacks == 0
    assert session.report().total.out_bytes > 0


@pytest.mark.cpu_device
def test_every_tensor_that_the_package_makes_names_its_device() -> None:
    nameless = []
    for room in ("profiler", "runtime", "src/poochplan/tensors", "src/poochplan/torch_private"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for call in ast.walk(ast.parse(path.read_text())):
                if _makes_a_tensor(call) and "device" not in {keyword.arg for keyword in call.keywords}:  # type: ignore[attr-defined]
                    nameless.append(f"{path.relative_to(ROOT)}:{call.lineno}")  # type: ignore[attr-defined]
    assert nameless == [], f"expected device=... in {nameless}"


def _makes_a_tensor(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in CONSTRUCTORS
    )
