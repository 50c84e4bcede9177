"""Steps under several plans: each follows the plan of its own model and for its inputs, or the next larger one; never
other bits. Inputs are the same text from a profile and from a running session.
"""

from __future__ import annotations

import functools
import re
from collections import namedtuple
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import poochplan
from poochplan.errors import DivergenceError, InfeasibleError, UsageError
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.runtime.run_report import FallbackKind
from poochplan.tensors.signatures import input_signature
from tests.runtime import besides
from tests.runtime.detours import (
    WIDTH,
    Detour,
    Step,
    fresh_model,
    gradients_of,
    images_step,
    in_core_steps,
    profile_of,
    restarted,
    under,
    under_announced,
)
from tests.runtime.nets import CASES, LINK, equal, snapshot, taken
from tests.runtime.random_plans import random_plan


class Loader:
    """Hands out one batch at a time and forgets it, as a data loader does, so that only the step's own is in memory."""

    def __init__(self) -> None:
        self.images = torch.empty(0)

    def load(self, batch_size: int) -> None:
        self.images = torch.empty(0)
        self.images = torch.randn(batch_size, WIDTH, 16, 16, generator=torch.Generator().manual_seed(batch_size))

    def step(self, model: nn.Module) -> torch.Tensor:
        return model(self.images).square().mean()

    def steps(self, sizes: Sequence[int]) -> list[Step]:
        return [lambda model, size=size: [self.load(size), self.step(model)][1] for size in sizes]  # type: ignore[misc]


def _tight_plan(batch_size: int) -> Plan:
    loader = Loader()
    loader.load(batch_size)
    profile = profile_of(Detour, loader.step)
    return poochplan.plan(profile, "60%", policy="superneurons")  # it swaps and recomputes


@pytest.fixture(scope="module")
def two_plans() -> PlanSet:
    return PlanSet([_tight_plan(8), _tight_plan(4)])


@pytest.mark.parametrize("sizes", [(8, 4, 8, 4, 4, 8), (7, 8, 7), (5, 8, 5), (3, 4, 3), (1, 4, 1)])
def test_each_step_keeps_to_its_own_plan_and_smaller_ones_to_the_decisions_of_the_nearest_larger(
    two_plans: PlanSet, sizes: tuple[int, ...]
) -> None:
    by_size = dict(zip((8, 4), two_plans.plans, strict=True))
    reports, told = under(two_plans, Detour, Loader().steps(sizes), meter="always")
    assert told == []
    for size, report in zip(sizes, reports, strict=True):
        planned_size = 8 if size > 4 else 4
        plan, found = by_size[planned_size], report.last_step
        assert found.fallbacks == 0
        assert found.out_bytes == plan.prediction.out_bytes * size // planned_size > 0
        assert found.replayed_values == sum(value.decision is Decision.RECOMPUTE for value in plan.values) > 0
        assert found.peak_bytes <= plan.prediction.peak_bytes == report.predicted_peak_bytes


def test_inputs_smaller_in_one_dimension_take_the_plan_that_is_as_large_in_all(two_plans: PlanSet) -> None:
    ((report,), _) = under(two_plans, Detour, [images_step(3, side=12)])
    assert report.last_step.fallbacks == 0
    assert report.predicted_peak_bytes == two_plans.plans[1].prediction.peak_bytes


def test_inputs_larger_than_any_plan_swap_everything_with_one_warning_that_names_both(two_plans: PlanSet) -> None:
    reports, told = under(two_plans, Detour, [images_step(9), images_step(9), images_step(8)])
    (named,) = [text for text in told if "more than its budget" not in text and "has left its plan took" not in text]
    # the others are true: the larger inputs live beside the last step, and what fits no plan may exceed the budget
    assert re.search(r"at most 0 float32\[8, 8, 16, 16\].* found 0 float32\[9, 8, 16", named)
    assert [report.last_step.fallbacks for report in reports] == [1, 1, 0]
    assert reports[-1].total.fallback_kinds == {FallbackKind.NO_PLAN: 2}
    swappable = sum(value.size_bytes for value in two_plans.plans[0].values if not value.why) * 9 // 8
    assert reports[0].last_step.out_bytes >= swappable
    assert reports[0].last_step.replayed_values == 0


def test_inputs_larger_than_any_plan_raise_when_asked_to(two_plans: PlanSet) -> None:
    model = fresh_model(Detour)
    with poochplan.apply(two_plans, model, on_divergence="error") as session:
        with pytest.raises(DivergenceError, match=r"no plan of the set .* found 0 float32\[9, 8, 16, 16\]"):
            images_step(9)(model)
        model = restarted(model)
        torch.manual_seed(1)
        seen = [gradients_of(model, images_step(4)(model))]
        assert session.report().last_step.fallbacks == 0
    assert equal(seen, in_core_steps(Detour, [images_step(4)]))


def _twice_the_batch(model: nn.Module) -> torch.Tensor:
    model.copies = 2
    return images_step(6)(model)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (images_step(6, order=(0, 1, 1, 2)), r"planned at most float32\["),
        (_twice_the_batch, r"planned at most float32\[8, 8.* found float32\[12, 8"),
    ],
    ids=["another one besides", "a save that is larger than the larger plan has it"],
)
def test_a_smaller_step_that_is_no_part_of_the_larger_plans_falls_back(
    two_plans: PlanSet, step: Step, said: str
) -> None:
    ((report,), told) = under(two_plans, Detour, [step])
    assert report.last_step.fallbacks == 1
    assert len([text for text in told if "has left its plan took" not in text]) == 1
    assert re.search(said, told[0])


def _one_backward(model: nn.Module) -> torch.Tensor:
    return images_step(8)(model) + images_step(4)(model) + images_step(3)(model) + images_step(9)(model)


def test_forwards_of_several_shapes_before_one_backward(two_plans: PlanSet) -> None:
    under(two_plans, Detour, [_one_backward])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
@pytest.mark.parametrize("which", ["set that swaps", "set that mixes"])
def test_steps_of_other_plans_do_not_touch_what_an_earlier_one_has_on_the_host(
    two_plans: PlanSet, which: str, order: tuple[int, ...]
) -> None:
    plans = two_plans if which == "set that mixes" else _swapping_set()
    report = under_announced(plans, _forwards([images_step(size) for size in (8, 4, 6, 9)], order))
    assert report.total.fallbacks == 1  # the largest one alone


def _forwards(steps: list[Step], order: Sequence[int]) -> Callable[..., list[list[torch.Tensor]]]:
    """All forwards, and then the backwards in that order."""

    def use(model: nn.Module, announce: Callable[[], object]) -> list[list[torch.Tensor]]:
        losses = []
        for step in steps:
            announce()
            losses.append(step(model))
        return [gradients_of(model, losses[index]) for index in order]

    return use


def _swapping_set() -> PlanSet:
    return PlanSet([random_plan(profile_of(Detour, images_step(size)), size, (0, 1, 0)) for size in (4, 8)])


def test_steps_of_plans_that_differ_in_their_saves_wait_for_each_other() -> None:
    steps = [images_step(8), images_step(4, order=(0,))]
    plans = PlanSet([random_plan(profile_of(Detour, step), 0, (0, 1, 1)) for step in steps])
    assert len({len(plan.values) for plan in plans.plans}) == 2
    assert under_announced(plans, _forwards(steps, (0, 1))).total.fallbacks == 0


def test_backward_again_after_a_step_of_another_plan() -> None:
    def use(model: nn.Module, _: Callable[[], object]) -> list[list[torch.Tensor]]:
        loss = images_step(8)(model)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        return [gradients_of(model, images_step(4)(model)), gradients_of(model, loss)]

    assert under_announced(_swapping_set(), use).total.fallbacks == 0


def test_a_set_keeps_what_is_saved_before_the_model_is_called_and_picks_its_plan_there(two_plans: PlanSet) -> None:
    def step(model: nn.Module) -> torch.Tensor:
        scale = torch.full((4, WIDTH, 16, 16), 0.5, requires_grad=True)
        return model(scale.exp()).square().mean()

    ((report,), told) = under(two_plans, Detour, [step])
    assert len(told) == 1
    assert re.search("more than its budget of .* what earlier steps saved", told[0])
    assert report.last_step.fallbacks == 0
    assert report.steps_followed == 1


def step_for(model: nn.Module) -> Callable[[int], Callable[[], torch.Tensor]]:
    def step_of(rows: int) -> Callable[[], torch.Tensor]:
        batch = torch.ones(rows, besides.WIDTH)
        return lambda: model(batch).square().mean()

    return step_of


def planned(model: nn.Module, shapes: list[int], budget: str) -> PlanSet:
    return poochplan.plan_set(
        step_for(model), shapes, model=model, budget=budget, evaluations=100, iterations=1, link=LINK
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.cpu_device
def test_each_step_follows_the_plan_of_its_shape_or_the_next_larger_one() -> None:
    model = besides.fresh()
    plans = planned(model, [128, 256], "90%")
    assert len({plan.budget_bytes for plan in plans.plans}) == 1
    assert plans.plans[0].budget_bytes == int(0.9 * plans.plans[1].prediction.in_core_peak_bytes)
    followed = []
    with poochplan.apply(plans, model) as session:
        for rows in (128, 256, 200):
            step_for(model)(rows)().backward()
            followed.append(plans.plans.index(session.plan))
            model.zero_grad(set_to_none=True)
    assert followed == [0, 1, 1]
    assert session.report().steps_followed == 3


@pytest.mark.cpu_device
def test_what_cannot_be_planned_is_one_clear_line() -> None:
    model = besides.fresh()
    with pytest.raises(UsageError, match="expected at least one shape, found none"):
        planned(model, [], "60%")
    with pytest.raises(UsageError, match=r"expected step_for\(3\) to give a function .*, found Tensor"):
        poochplan.plan_set(lambda rows: torch.ones(rows), [3], model=model, budget="60%")  # type: ignore[arg-type,return-value]
    with pytest.raises(InfeasibleError, match="shape 256: no plan fits a budget of") as raised:
        planned(model, [16, 256], "30%")
    assert raised.value.smallest_budget_bytes > 0


# -- several models in one session: each step follows the plan of its own ----------------------------------------------


NOISE, FEATURES, BATCH = 8, 24, 32
SWAP, REPLAY = (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def _halves() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES), nn.Tanh())
    critic = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Dropout(0.1), nn.Linear(FEATURES, 1))
    return {"g": generator, "d": critic}


def _batch(models: dict[str, nn.Module], name: str) -> list[torch.Tensor]:
    """What a step of that half is about: noise; or fakes and originals, which D is called with one after the other."""
    noise = torch.randn(BATCH, NOISE)
    if name == "g":
        return [noise]
    with torch.no_grad():
        return [models["g"](noise), torch.randn(BATCH, FEATURES)]


def _loss(models: dict[str, nn.Module], name: str, batch: list[torch.Tensor]) -> torch.Tensor:
    if name == "g":
        return -models["d"](models["g"](batch[0])).mean()
    fakes, originals = (models["d"](one) for one in batch)
    return fakes.square().mean() + (originals - 1).square().mean()


@pytest.fixture(scope="module")
def plans() -> dict[str, list[Plan]]:
    """For each half one that swaps all it can, and one that replays all it can."""
    models = _halves()
    profiles = {}
    for name, model in models.items():
        step = functools.partial(_loss, models, name, _batch(models, name))
        profiles[name] = taken(step, model)
    return {name: [random_plan(one, 1, shares) for shares in (SWAP, REPLAY)] for name, one in profiles.items()}


def _train(
    models: dict[str, nn.Module], steps: int, begin: Callable[[str], object] = lambda _: None
) -> list[list[torch.Tensor]]:
    """Each step of D, then each of G; the gradients of the other half are thrown away."""
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    seen = []
    torch.manual_seed(1)
    for _ in range(steps):
        for name in ("d", "g"):
            for model in models.values():
                model.zero_grad(set_to_none=True)
            batch = _batch(models, name)
            begin(name)
            loss = _loss(models, name, batch)
            loss.backward()
            seen.append(snapshot(models[name], loss))
            optimizers[name].step()
    return seen


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("which", [0, 1], ids=["swap", "replay"])
@pytest.mark.parametrize("said", [True, False], ids=["announced", "by the model that is called"])
def test_both_halves_of_a_gan_follow_their_plans_bitwise(plans: dict[str, list[Plan]], which: int, said: bool) -> None:
    models = _halves()
    chosen = {name: plans[name][which] for name in models}
    with poochplan.apply(chosen, models) as session:
        seen = _train(models, 3, session.step if said else lambda _: None)
        assert session.plan is chosen["g"]
    report = session.report()
    assert equal(seen, _train(_halves(), 3))
    assert (report.status, report.steps_followed, report.total.steps) == ("followed", 6, 6)
    assert report.total.fallbacks == 0
    assert report.total.out_bytes + report.total.replayed_values > 0


def test_a_step_that_calls_another_model_first_is_of_the_one_that_was_announced(plans: dict[str, list[Plan]]) -> None:
    models = _halves()
    with poochplan.apply({name: both[0] for name, both in plans.items()}, models) as session:
        session.step("d")
        assert session.plan is plans["d"][0]
        session.step("g")
        assert session.plan is plans["g"][0]
        with pytest.raises(UsageError, match=r"expected the name of a model of this session \('g', 'd'\), found 'x'"):
            session.step("x")
        _loss(models, "g", _batch(models, "g")).backward()


def test_keys_that_differ_are_one_clear_line(plans: dict[str, list[Plan]]) -> None:
    models, chosen = _halves(), {name: both[0] for name, both in plans.items()}
    with pytest.raises(UsageError, match=r"same keys, found plans \['d', 'g'\] and models \['g'\]; give each model"):
        poochplan.apply(chosen, {"g": models["g"]})
    with pytest.raises(UsageError, match="found plans as one Plan and models \\['d', 'g'\\]"):
        poochplan.apply(chosen["d"], models)


def test_a_half_that_is_never_called_is_told_of_at_the_end(plans: dict[str, list[Plan]]) -> None:
    models = _halves()
    with (
        pytest.warns(RuntimeWarning, match=r"Sequential \('g'\) was not called with gradients inside the session"),
        poochplan.apply({name: both[0] for name, both in plans.items()}, models) as session,
    ):
        _loss(models, "d", _batch(models, "d")).backward()
    assert session.report().steps_followed == 1


# -- the inputs of a step, as text -------------------------------------------------------------------------------------


Pair = namedtuple("Pair", "left right")


@pytest.mark.cpu_device
def test_every_tensor_is_named_by_its_path() -> None:
    one, two = torch.zeros(2, 3), torch.zeros(4, dtype=torch.bool)
    assert input_signature((one, [two, {"mask": two}], 7, None), {"ids": one.long(), "flag": True}) == (
        "0 float32[2, 3]",
        "1.0 bool[4]",
        "1.1.mask bool[4]",
        "ids int64[2, 3]",
    )
    assert input_signature((Pair(one, two),), {}) == ("0.left float32[2, 3]", "0.right bool[4]")
    assert input_signature((), {"batch": BatchEncoding({"ids": one})}) == ("batch.ids float32[2, 3]",)
    assert input_signature((), {}) == ()


@pytest.mark.cpu_device
@pytest.mark.parametrize("options", [{}, {"mode": "fake", "roofline": "v100"}], ids=["run", "fake"])
def test_the_profile_and_the_plan_say_what_the_model_is_called_with(options: dict[str, str]) -> None:
    profile = CASES["attention"].profile(**options)
    assert profile.inputs == ("0 int64[3, 24]",)
    assert poochplan.plan(profile, "100%").inputs == profile.inputs


@pytest.mark.cpu_device
def test_of_several_calls_the_first_counts_and_keywords_go_by_name() -> None:
    class Scaled(nn.Linear):
        def forward(self, batch: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(batch) * scale

    model, scale = Scaled(8, 8), torch.ones(())
    profile = taken(lambda: (model(torch.ones(4, 8), scale=scale) + model(torch.ones(1, 8), scale=scale)).sum(), model)
    assert profile.inputs == ("0 float32[4, 8]", "scale float32[]")


@pytest.mark.cpu_device
def test_a_model_that_is_never_called_has_no_inputs() -> None:
    model = nn.Linear(8, 8)
    profile = taken(lambda: model.forward(torch.ones(4, 8)).sum(), model)
    assert profile.inputs == ()
