"""Steps under a set of plans: each follows the plan for its inputs, or the next larger one; never other bits."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import DivergenceError
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.run_report import FallbackKind
from tests.runtime.detours import (
    WIDTH,
    Detour,
    fresh_model,
    gradients_of,
    images_step,
    in_core_steps,
    our_warnings,
    profile_of,
    restarted,
)
from tests.runtime.nets import equal
from tests.runtime.random_plans import random_plan


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
    profile = profile_of(Detour, loader.step)
    return poochplan.plan(profile, "60%", policy="superneurons")  # it swaps and recomputes


@pytest.fixture(scope="module")
def two_plans() -> poochplan.PlanSet:
    return poochplan.PlanSet([_tight_plan(8), _tight_plan(4)])


def _train(model: nn.Module, sizes: Sequence[int], session: Any = None) -> tuple[list[list[torch.Tensor]], list[Any]]:
    loader, seen, reports = Loader(), [], []
    for batch_size in sizes:
        loader.load(batch_size)
        seen.append(gradients_of(model, loader.step(model)))
        if session is not None:
            reports.append((session.report().last_step, session.report().predicted_peak_bytes))
    return seen, reports


def test_two_signatures_alternate_and_each_step_keeps_to_its_own_plan(two_plans: poochplan.PlanSet) -> None:
    by_size = dict(zip((8, 4), two_plans.plans, strict=True))
    sizes = (8, 4, 8, 4, 4, 8)
    model = fresh_model(Detour)
    with warnings.catch_warnings(), poochplan.apply(two_plans, model, meter="always") as session:
        warnings.simplefilter("error", RuntimeWarning)
        torch.manual_seed(1)
        seen, reports = _train(model, sizes, session)
    model = fresh_model(Detour)
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
    model = fresh_model(Detour)
    with warnings.catch_warnings(), poochplan.apply(two_plans, model, meter="always") as session:
        warnings.simplefilter("error", RuntimeWarning)
        torch.manual_seed(1)
        seen, reports = _train(model, sizes, session)
    model = fresh_model(Detour)
    torch.manual_seed(1)
    assert equal(seen, _train(model, sizes)[0])
    for size, (report, predicted) in zip(sizes, reports, strict=True):
        assert report.fallbacks == 0
        assert report.out_bytes == plan.prediction.out_bytes * size // larger > 0
        assert report.replayed_values == sum(value.decision is Decision.RECOMPUTE for value in plan.values) > 0
        assert report.peak_bytes <= plan.prediction.peak_bytes == predicted


def test_inputs_smaller_in_one_dimension_take_the_plan_that_is_as_large_in_all(two_plans: poochplan.PlanSet) -> None:
    model, step = fresh_model(Detour), images_step(3, side=12)
    with poochplan.apply(two_plans, model) as session:
        torch.manual_seed(1)
        seen = [gradients_of(model, step(model))]
        report = session.report()
    assert equal(seen, in_core_steps(Detour, [step]))
    assert report.last_step.fallbacks == 0
    assert report.predicted_peak_bytes == two_plans.plans[1].prediction.peak_bytes


def test_inputs_larger_than_any_plan_swap_everything_with_one_warning_that_names_both(
    two_plans: poochplan.PlanSet,
) -> None:
    model, steps = fresh_model(Detour), [images_step(9), images_step(9), images_step(8)]
    seen, reports = [], []
    with (
        pytest.warns(RuntimeWarning, match=r"at most 0 float32\[8, 8, 16, 16\].* found 0 float32\[9, 8, 16") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        for step in steps:
            seen.append(gradients_of(model, step(model)))
            reports.append(session.report().last_step)
    assert equal(seen, in_core_steps(Detour, steps))
    named = [text for text in our_warnings(list(caught)) if "more than its budget" not in text]
    assert len(named) == 1  # the other is true: the larger inputs live beside the last step
    assert [report.fallbacks for report in reports] == [1, 1, 0]
    assert session.report().total.fallback_kinds == {FallbackKind.NO_PLAN: 2}
    swappable = sum(value.size_bytes for value in two_plans.plans[0].values if not value.why) * 9 // 8
    assert reports[0].out_bytes >= swappable
    assert reports[0].replayed_values == 0


def test_inputs_larger_than_any_plan_raise_when_asked_to(two_plans: poochplan.PlanSet) -> None:
    model = fresh_model(Detour)
    with poochplan.apply(two_plans, model, on_divergence="error") as session:
        with pytest.raises(DivergenceError, match=r"no plan of the set .* found 0 float32\[9, 8, 16, 16\]"):
            images_step(9)(model)
        model = restarted(model)
        torch.manual_seed(1)
        seen = [gradients_of(model, images_step(4)(model))]
        assert session.report().last_step.fallbacks == 0
    assert equal(seen, in_core_steps(Detour, [images_step(4)]))


def test_a_smaller_step_that_is_another_one_besides_falls_back(two_plans: poochplan.PlanSet) -> None:
    model, step = fresh_model(Detour), images_step(6, order=(0, 2))
    with (
        pytest.warns(RuntimeWarning, match=r"planned at most float32\[") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        seen = [gradients_of(model, step(model))]
        assert session.report().last_step.fallbacks == 1
    assert equal(seen, in_core_steps(Detour, [step]))
    assert len(our_warnings(list(caught))) == 1


def test_a_save_that_is_larger_than_the_larger_plan_has_it_falls_back(two_plans: poochplan.PlanSet) -> None:
    def step(model: nn.Module) -> torch.Tensor:
        model.copies = 2
        return images_step(6)(model)

    model = fresh_model(Detour)
    with (
        pytest.warns(RuntimeWarning, match=r"planned at most float32\[8, 8.* found float32\[12, 8") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        seen = [gradients_of(model, step(model))]
        assert session.report().last_step.fallbacks == 1
    assert equal(seen, in_core_steps(Detour, [step]))
    assert len(our_warnings(list(caught))) == 1


def _one_backward(model: nn.Module) -> torch.Tensor:
    return images_step(8)(model) + images_step(4)(model) + images_step(3)(model) + images_step(9)(model)


def test_forwards_of_several_shapes_before_one_backward(two_plans: poochplan.PlanSet) -> None:
    model = fresh_model(Detour)
    with warnings.catch_warnings(), poochplan.apply(two_plans, model):
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(1)
        seen = [gradients_of(model, _one_backward(model))]
    assert equal(seen, in_core_steps(Detour, [_one_backward]))


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
            losses.append(images_step(size)(model))
        return [gradients_of(model, losses[index]) for index in order]

    model = fresh_model(Detour)
    torch.manual_seed(1)
    reference = use(model, lambda: None)
    model = fresh_model(Detour)
    with warnings.catch_warnings(), poochplan.apply(plans, model) as session:
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(1)
        assert equal(reference, use(model, session.step))
        assert session.report().total.fallbacks == 1  # the largest one alone


def _swapping_set() -> poochplan.PlanSet:
    return poochplan.PlanSet([random_plan(profile_of(Detour, images_step(size)), size, (0, 1, 0)) for size in (4, 8)])


def test_steps_of_plans_that_differ_in_their_saves_wait_for_each_other() -> None:
    steps = [images_step(8), images_step(4, order=(0,))]
    plans = poochplan.PlanSet([random_plan(profile_of(Detour, step), 0, (0, 1, 1)) for step in steps])
    assert len({len(plan.values) for plan in plans.plans}) == 2

    def use(model: nn.Module, announce: Callable[[], None]) -> list[list[torch.Tensor]]:
        losses = []
        for step in steps:
            announce()
            losses.append(step(model))
        return [gradients_of(model, loss) for loss in losses]

    model = fresh_model(Detour)
    torch.manual_seed(1)
    reference = use(model, lambda: None)
    model = fresh_model(Detour)
    with poochplan.apply(plans, model) as session:
        torch.manual_seed(1)
        assert equal(reference, use(model, session.step))
        assert session.report().total.fallbacks == 0


def test_backward_again_after_a_step_of_another_plan() -> None:
    plans = _swapping_set()

    def use(model: nn.Module) -> list[list[torch.Tensor]]:
        loss = images_step(8)(model)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        return [gradients_of(model, images_step(4)(model)), gradients_of(model, loss)]

    model = fresh_model(Detour)
    torch.manual_seed(1)
    reference = use(model)
    model = fresh_model(Detour)
    with poochplan.apply(plans, model) as session:
        torch.manual_seed(1)
        assert equal(reference, use(model))
        assert session.report().total.fallbacks == 0


def test_a_set_keeps_what_is_saved_before_the_model_is_called_and_picks_its_plan_there(
    two_plans: poochplan.PlanSet,
) -> None:
    def step(model: nn.Module) -> torch.Tensor:
        scale = torch.full((4, WIDTH, 16, 16), 0.5, requires_grad=True)
        return model(scale.exp()).square().mean()

    model = fresh_model(Detour)
    with (
        pytest.warns(RuntimeWarning, match="more than its budget of .* what earlier steps saved") as caught,
        poochplan.apply(two_plans, model) as session,
    ):
        torch.manual_seed(1)
        seen = [gradients_of(model, step(model))]
        assert session.report().last_step.fallbacks == 0
        assert session.report().steps_followed == 1
    assert equal(seen, in_core_steps(Detour, [step]))
    assert len(our_warnings(list(caught))) == 1
