"""A step that is not the planned one: back to safety within the step, or another plan of the set; never other bits."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import poochplan
from poochplan.errors import DivergenceError, ModelMismatchError
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.run_report import FallbackKind
from tests.runtime.nets import LINK, Attention, Residual, equal
from tests.runtime.random_plans import random_plan

WIDTH = 8
Step = Callable[[nn.Module], torch.Tensor]


class Detour(Residual):
    """The residual network with the order of its blocks open: one may be left out or come twice. And it may work on
    several copies of what it is given.
    """

    order: Sequence[int] = (0, 1, 2)
    copies: int = 1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.copies > 1:
            images = images.repeat(self.copies, 1, 1, 1)
        for block in self.order:
            images = images + self.blocks[block](images)
        return self.head(images.mean((2, 3)))


def _images(batch_size: int = 4, *, side: int = 16, order: Sequence[int] = (0, 1, 2), autocast: bool = False) -> Step:
    images = torch.randn(batch_size, WIDTH, side, side, generator=torch.Generator().manual_seed(batch_size))

    def step(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, Detour)
        model.order = order
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            return model(images).float().square().mean()

    return step


def _tokens(batch_size: int = 3, length: int = 24) -> Step:
    tokens = torch.randint(0, 50, (batch_size, length), generator=torch.Generator().manual_seed(length))
    return lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _profile(make: Callable[[], nn.Module], step: Step, **options: Any) -> poochplan.Profile:
    model = _fresh(make)
    return poochplan.profile(lambda: step(model), model=model, iterations=1, link=LINK, **options)


def _gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of it alone; none are left in the model."""
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    with _disable_current_modes():  # or a meter would count the copies as the step's own
        found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def _in_core(make: Callable[[], nn.Module], steps: list[Step]) -> list[list[torch.Tensor]]:
    model = _fresh(make)
    torch.manual_seed(1)
    return [_gradients(model, step(model)) for step in steps]


def _ours(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if "poochplan" in str(warning.message)]


MODELS = {"images": (Detour, _images()), "tokens": (Attention, _tokens())}
OTHER_STEPS = {
    "a smaller batch": ("images", _images(2)),
    "a larger batch": ("images", _images(6)),
    "smaller images": ("images", _images(side=12)),
    "the first layer skipped": ("images", _images(order=(1, 2))),
    "a layer skipped": ("images", _images(order=(0, 2))),
    "the last layer skipped": ("images", _images(order=(0, 1))),
    "a layer twice": ("images", _images(order=(0, 1, 1, 2))),
    "an extra layer at the end": ("images", _images(order=(0, 1, 2, 2))),
    "another dtype": ("images", _images(autocast=True)),
    "shorter sequences": ("tokens", _tokens(length=17)),
    "longer sequences": ("tokens", _tokens(length=33)),
    "one sequence": ("tokens", _tokens(1)),
}
BOTH_SHAPES = re.compile(r"\(layer \w[^)]*\): planned \w+\[[\d, ]+\].* found .*\w+\[[\d, ]+\]")


@pytest.fixture(scope="module")
def plans() -> dict[str, list[Plan]]:
    """For each model a plan that swaps all it can, and one that replays all it can."""
    weights = ((0, 1, 0), (0, 0, 1))
    profiles = {name: _profile(make, step) for name, (make, step) in MODELS.items()}
    return {name: [random_plan(profile, 1, share) for share in weights] for name, profile in profiles.items()}


@pytest.mark.parametrize("which", [0, 1], ids=["swap", "replay"])
@pytest.mark.parametrize("what", OTHER_STEPS)
def test_another_step_falls_back_with_one_warning_and_the_next_follows_the_plan_again(
    plans: dict[str, list[Plan]], what: str, which: int
) -> None:
    name, other = OTHER_STEPS[what]
    make, planned = MODELS[name]
    steps = [planned, other, other, planned]
    model, fallbacks, seen = _fresh(make), [], []
    with (
        pytest.warns(RuntimeWarning, match="diverged from the plan") as caught,
        poochplan.apply(plans[name][which], model) as session,
    ):
        torch.manual_seed(1)
        for step in steps:
            seen.append(_gradients(model, step(model)))
            fallbacks.append(session.report().last_step.fallbacks)
    assert equal(seen, _in_core(make, steps))
    assert fallbacks == [0, 1, 1, 0]
    assert session.report().total.fallback_kinds == {FallbackKind.DIVERGED: 2}
    (message,) = _ours(list(caught))
    assert BOTH_SHAPES.search(message), message


ASIDE: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a part of the model": lambda model, images: model.blocks[0](images),
    "the model": lambda model, images: model(images),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", [0, 1], ids=["swap", "replay"])
@pytest.mark.parametrize("aside", ASIDE)
def test_a_step_beside_which_something_is_kept_diverges_and_the_next_follows_the_plan_again(
    plans: dict[str, list[Plan]], aside: str, which: int, when: str
) -> None:
    """What is kept holds its saved values for good: steps begin and end all the same, and it can still be used."""
    planned = _images()
    images = torch.randn(4, WIDTH, 16, 16, generator=torch.Generator().manual_seed(7))

    def train(session: poochplan.Session | None, model: nn.Module) -> tuple[list[Any], list[bool]]:
        torch.manual_seed(1)
        seen, fallbacks, kept = [], [], None
        for number in range(4):
            if (number, when) == (1, "before"):
                kept = ASIDE[aside](model, images)
            loss = planned(model)
            if (number, when) == (1, "after"):
                kept = ASIDE[aside](model, images)
            seen.append(_gradients(model, loss))
            fallbacks.append(session is not None and session.report().last_step.fallbacks > 0)
        assert kept is not None
        return [*seen, _gradients(model, kept.square().sum())], fallbacks

    model = _fresh(Detour)
    with warnings.catch_warnings(), poochplan.apply(plans["images"][which], model) as session:
        warnings.simplefilter("ignore", RuntimeWarning)
        seen, fallbacks = train(session, model)
    assert equal(seen, train(None, _fresh(Detour))[0])
    assert fallbacks == [False, True, False, False]


def test_a_data_set_of_which_a_step_that_diverged_has_a_part_stays_where_it_is(plans: dict[str, list[Plan]]) -> None:
    """The model's inputs from the first step on; what else the step takes from the second one that saves it."""
    data = torch.randn(500, WIDTH, 16, 16)
    labels = torch.randint(0, 5, (100_000,))
    model, moved = _fresh(Detour), []
    with warnings.catch_warnings(), poochplan.apply(plans["images"][0], model) as session:
        warnings.simplefilter("ignore", RuntimeWarning)
        for number in range(3):
            first = 2 * number  # a smaller batch than planned
            nn.functional.cross_entropy(model(data[first : first + 2]), labels[first : first + 2]).backward()
            model.zero_grad()
            moved.append(session.report().last_step.out_bytes)
            assert session.report().last_step.fallback_kinds == {FallbackKind.DIVERGED: 1}
    labels_bytes = labels.untyped_storage().nbytes()
    assert moved[0] - moved[1] == labels_bytes
    assert 0 < moved[1] == moved[2] < labels_bytes


@pytest.mark.parametrize("what", OTHER_STEPS)
def test_another_step_raises_when_asked_to_and_the_next_follows_the_plan_again(
    plans: dict[str, list[Plan]], what: str
) -> None:
    name, other = OTHER_STEPS[what]
    make, planned = MODELS[name]
    model = _fresh(make)
    with poochplan.apply(plans[name][0], model, on_divergence="error") as session:
        with pytest.raises(DivergenceError, match="diverged from the plan at") as raised:
            other(model).backward()  # type: ignore[no-untyped-call]
        assert BOTH_SHAPES.search(str(raised.value)), raised.value
        del raised
        model = _restart(model)
        torch.manual_seed(1)
        seen = [_gradients(model, planned(model))]
        assert session.report().last_step.fallbacks == 0
    assert equal(seen, _in_core(make, [planned]))


def _restart(model: nn.Module) -> nn.Module:
    """With the running statistics of a fresh model; its gradients go."""
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.ones_like(buffer) if "running_var" in name else torch.zeros_like(buffer))
    return model


def test_a_plan_for_another_model_is_refused_and_names_the_first_difference(plans: dict[str, list[Plan]]) -> None:
    with pytest.raises(ModelMismatchError, match=r"expected blocks\.0\.0\.weight float32\[8, 8, 3, 3\], found .*4, 4"):
        poochplan.apply(plans["images"][0], Detour(width=4))
    two = poochplan.PlanSet([random_plan(_profile(Detour, _images(size)), 1) for size in (2, 3)])
    with pytest.raises(ModelMismatchError, match="make a new profile and plan for this model"):
        poochplan.apply(two, Detour(width=4))


# -- sets of plans ------------------------------------------------------------------------------------------------


class Loader:
    """Hands out one batch at a time and forgets it, as a data loader does, so that only the step's own is in memory."""

    def __init__(self) -> None:
        self.images = torch.empty(0)

    def load(self, batch_size: int, side: int = 16) -> None:
        self.images = torch.empty(0)
        generator = torch.Generator().manual_seed(batch_size)
        self.images = torch.randn(batch_size, WIDTH, side, side, generator=generator)

    def step(self, model: nn.Module) -> torch.Tensor:
        return model(self.images).square().mean()


def _tight_plan(batch_size: int) -> Plan:
    loader = Loader()
    loader.load(batch_size)
    profile = _profile(Detour, loader.step)
    return poochplan.plan(profile, "60%", policy="superneurons")  # it swaps and recomputes


@pytest.fixture(scope="module")
def two_plans() -> poochplan.PlanSet:
    return poochplan.PlanSet([_tight_plan(8), _tight_plan(4)])


def _train(model: nn.Module, sizes: Sequence[int], session: Any = None) -> tuple[list[list[torch.Tensor]], list[Any]]:
    loader, seen, reports = Loader(), [], []
    for batch_size in sizes:
        loader.load(batch_size)
        seen.append(_gradients(model, loader.step(model)))
        if session is not None:
            reports.append((session.report().last_step, session.report().predicted_peak_bytes))
    return seen, reports


def test_two_signatures_alternate_and_each_step_keeps_to_its_own_plan(two_plans: poochplan.PlanSet) -> None:
    by_size = dict(zip((8, 4), two_plans.plans, strict=True))
    sizes = (8, 4, 8, 4, 4, 8)
    model = _fresh(Detour)
    with warnings.catch_warnings(), poochplan.apply(two_plans, model, meter="always") as session:
        warnings.simplefilter("error", RuntimeWarning)
        torch.manual_seed(1)
        seen, reports = _train(model, sizes, session)
    model = _fresh(Detour)
    torch.manual_seed(1)
    assert equal(seen, _train(model, sizes)[0])
    for batch_size, (report, predicted) in zip(sizes, reports, strict=True):
        plan = by_size[batch_size]
        kinds = Counter(value.decision for value in plan.values)
        assert report.fallbacks == 0
        assert report.peak_bytes <= plan.prediction.peak_bytes == predicted
        assert report.out_bytes == plan.prediction.out_bytes > 0
        assert report.replayed_values == kinds[Decision.RECOMPUTE] > 0


@pytest.mark.parametrize(("batch_size", "larger"), [(7, 8), (5, 8), (3, 4), (1, 4)])
def test_unknown_smaller_inputs_take_the_decisions_of_the_nearest_larger_plan(
    two_plans: poochplan.PlanSet, batch_size: int, larger: int
) -> None:
    plan = next(plan for plan in two_plans.plans if plan.inputs == (f"0 float32[{larger}, 8, 16, 16]",))
    sizes = (batch_size, larger, batch_size)
    model = _fresh(Detour)
    with warnings.catch_warnings(), poochplan.apply(two_plans, model, meter="always") as session:
        warnings.simplefilter("error", RuntimeWarning)
        torch.manual_seed(1)
        seen, reports = _train(model, sizes, session)
    model = _fresh(Detour)
    torch.manual_seed(1)
    assert equal(seen, _train(model, sizes)[0])
    for size, (report, predicted) in zip(sizes, reports, strict=True):
        assert report.fallbacks == 0
        assert report.out_bytes == plan.prediction.out_bytes * size // larger > 0
        assert report.replayed_values == sum(value.decision is Decision.RECOMPUTE for value in plan.values) > 0
        assert report.peak_bytes <= plan.prediction.peak_bytes == predicted


def test_inputs_smaller_in_one_dimension_take_the_plan_that_is_as_large_in_all(two_plans: poochplan.PlanSet) -> None:
    model, step = _fresh(Detour), _images(3, side=12)
    with poochplan.apply(two_plans, model) as session:
        torch.manual_seed(1)
        seen = [_gradients(model, step(model))]
        report = session.report()
    assert equal(seen, _in_core(Detour, [step]))
    assert report.last_step.fallbacks == 0
    assert report.predicted_peak_bytes == two_plans.plans[1].prediction.peak_bytes


def test_inputs_larger_than_any_plan_swap_everything_with_one_warning_that_names_both(
    two_plans: poochplan.PlanSet,
) -> None:
    model, steps = _fresh(Detour), [_images(9), _images(9), _images(8)]
    seen, reports = [], []
    with (
        pytest.warns(RuntimeWarning, match=r"at most 0 float32\[8, 8, 16, 16\].* found 0 float32\[9, 8, 16") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        for step in steps:
            seen.append(_gradients(model, step(model)))
            reports.append(session.report().last_step)
    assert equal(seen, _in_core(Detour, steps))
    assert len(_ours(list(caught))) == 1
    assert [report.fallbacks for report in reports] == [1, 1, 0]
    assert session.report().total.fallback_kinds == {FallbackKind.NO_PLAN: 2}
    swappable = sum(value.size_bytes for value in two_plans.plans[0].values if not value.why) * 9 // 8
    assert reports[0].out_bytes >= swappable
    assert reports[0].replayed_values == 0


def test_inputs_larger_than_any_plan_raise_when_asked_to(two_plans: poochplan.PlanSet) -> None:
    model = _fresh(Detour)
    with poochplan.apply(two_plans, model, on_divergence="error") as session:
        with pytest.raises(DivergenceError, match=r"no plan of the set .* found 0 float32\[9, 8, 16, 16\]"):
            _images(9)(model)
        model = _restart(model)
        torch.manual_seed(1)
        seen = [_gradients(model, _images(4)(model))]
        assert session.report().last_step.fallbacks == 0
    assert equal(seen, _in_core(Detour, [_images(4)]))


def test_a_smaller_step_that_is_another_one_besides_falls_back(two_plans: poochplan.PlanSet) -> None:
    model, step = _fresh(Detour), _images(6, order=(0, 2))
    with (
        pytest.warns(RuntimeWarning, match=r"planned at most float32\[") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        seen = [_gradients(model, step(model))]
        assert session.report().last_step.fallbacks == 1
    assert equal(seen, _in_core(Detour, [step]))
    assert len(_ours(list(caught))) == 1


def test_a_save_that_is_larger_than_the_larger_plan_has_it_falls_back(two_plans: poochplan.PlanSet) -> None:
    def step(model: nn.Module) -> torch.Tensor:
        model.copies = 2
        return _images(6)(model)

    model = _fresh(Detour)
    with (
        pytest.warns(RuntimeWarning, match=r"planned at most float32\[8, 8.* found float32\[12, 8") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        seen = [_gradients(model, step(model))]
        assert session.report().last_step.fallbacks == 1
    assert equal(seen, _in_core(Detour, [step]))
    assert len(_ours(list(caught))) == 1


def _one_backward(model: nn.Module) -> torch.Tensor:
    return _images(8)(model) + _images(4)(model) + _images(3)(model) + _images(9)(model)


def test_forwards_of_several_shapes_before_one_backward(two_plans: poochplan.PlanSet) -> None:
    model = _fresh(Detour)
    with warnings.catch_warnings(), poochplan.apply(two_plans, model):
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(1)
        seen = [_gradients(model, _one_backward(model))]
    assert equal(seen, _in_core(Detour, [_one_backward]))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
@pytest.mark.parametrize("which", ["set that swaps", "set that mixes"])
def test_steps_of_other_plans_do_not_touch_what_an_earlier_one_has_on_the_host(
    two_plans: poochplan.PlanSet, which: str, order: tuple[int, ...]
) -> None:
    plans = two_plans if which == "set that mixes" else _swapping_set()
    sizes = (8, 4, 6, 9)

    def use(model: nn.Module, announce: Callable[[], None]) -> list[list[torch.Tensor]]:
        losses = []
        for size in sizes:
            announce()
            losses.append(_images(size)(model))
        return [_gradients(model, losses[index]) for index in order]

    model = _fresh(Detour)
    torch.manual_seed(1)
    reference = use(model, lambda: None)
    model = _fresh(Detour)
    with warnings.catch_warnings(), poochplan.apply(plans, model) as session:
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(1)
        assert equal(reference, use(model, session.step))
        assert session.report().total.fallbacks == 1  # the largest one alone


def _swapping_set() -> poochplan.PlanSet:
    return poochplan.PlanSet([random_plan(_profile(Detour, _images(size)), size, (0, 1, 0)) for size in (4, 8)])


def test_steps_of_plans_that_differ_in_their_saves_wait_for_each_other() -> None:
    steps = [_images(8), _images(4, order=(0,))]
    plans = poochplan.PlanSet([random_plan(_profile(Detour, step), 0, (0, 1, 1)) for step in steps])
    assert len({len(plan.values) for plan in plans.plans}) == 2

    def use(model: nn.Module, announce: Callable[[], None]) -> list[list[torch.Tensor]]:
        losses = []
        for step in steps:
            announce()
            losses.append(step(model))
        return [_gradients(model, loss) for loss in losses]

    model = _fresh(Detour)
    torch.manual_seed(1)
    reference = use(model, lambda: None)
    model = _fresh(Detour)
    with poochplan.apply(plans, model) as session:
        torch.manual_seed(1)
        assert equal(reference, use(model, session.step))
        assert session.report().total.fallbacks == 0


def test_backward_again_after_a_step_of_another_plan() -> None:
    plans = _swapping_set()

    def use(model: nn.Module) -> list[list[torch.Tensor]]:
        loss = _images(8)(model)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        return [_gradients(model, _images(4)(model)), _gradients(model, loss)]

    model = _fresh(Detour)
    torch.manual_seed(1)
    reference = use(model)
    model = _fresh(Detour)
    with poochplan.apply(plans, model) as session:
        torch.manual_seed(1)
        assert equal(reference, use(model))
        assert session.report().total.fallbacks == 0


def test_a_set_goes_to_safety_where_something_is_saved_before_the_model_is_called(two_plans: poochplan.PlanSet) -> None:
    def step(model: nn.Module) -> torch.Tensor:
        scale = torch.full((4, WIDTH, 16, 16), 0.5, requires_grad=True)
        return model(scale.exp()).square().mean()

    model = _fresh(Detour)
    with (
        pytest.warns(RuntimeWarning, match="saved before its model is called") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        seen = [_gradients(model, step(model))]
        assert session.report().last_step.fallbacks == 1
    assert equal(seen, _in_core(Detour, [step]))
    assert len(_ours(list(caught))) == 1
