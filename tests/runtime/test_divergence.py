"""A step that is not the planned one: back to safety within the step, or another plan of the set; never other bits.

What is replayed is what ran in this step, whatever ran in those before: they share nothing but geometries of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import poochplan
from poochplan.errors import DivergenceError, ModelMismatchError
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.run_report import FallbackKind
from tests.runtime import besides
from tests.runtime.besides import BATCH, Layers, fresh, profiled
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
)
from tests.runtime.nets import Attention, Net, equal
from tests.runtime.random_plans import random_plan


def _tokens(batch_size: int = 3, length: int = 24) -> Step:
    tokens = torch.randint(0, 50, (batch_size, length), generator=torch.Generator().manual_seed(length))
    return lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


MODELS = {"images": (Detour, images_step()), "tokens": (Attention, _tokens())}
OTHER_STEPS = {
    "a smaller batch": ("images", images_step(2)),
    "a larger batch": ("images", images_step(6)),
    "smaller images": ("images", images_step(side=12)),
    "the first layer skipped": ("images", images_step(order=(1, 2))),
    "a layer skipped": ("images", images_step(order=(0, 2))),
    "the last layer skipped": ("images", images_step(order=(0, 1))),
    "a layer twice": ("images", images_step(order=(0, 1, 1, 2))),
    "an extra layer at the end": ("images", images_step(order=(0, 1, 2, 2))),
    "another dtype": ("images", images_step(autocast=True)),
    "shorter sequences": ("tokens", _tokens(length=17)),
    "longer sequences": ("tokens", _tokens(length=33)),
    "one sequence": ("tokens", _tokens(1)),
}
FOLLOWED = ("the first layer skipped", "a layer skipped", "the last layer skipped")
"""Steps that follow the plan unless that is to be an error: ``test_left_out.py``."""
BOTH_SHAPES = re.compile(r"\((layer \w[^)]*|of no layer)\): planned \w+\[[\d, ]+\].* found .*\w+\[[\d, ]+\]")


@pytest.fixture(scope="module")
def plans() -> dict[str, list[Plan]]:
    """For each model a plan that swaps all it can, and one that replays all it can."""
    weights = ((0, 1, 0), (0, 0, 1))
    profiles = {name: profile_of(make, step) for name, (make, step) in MODELS.items()}
    return {name: [random_plan(profile, 1, share) for share in weights] for name, profile in profiles.items()}


@pytest.mark.parametrize("which", [0, 1], ids=["swap", "replay"])
@pytest.mark.parametrize("what", [one for one in OTHER_STEPS if one not in FOLLOWED])
def test_another_step_falls_back_with_one_warning_and_the_next_follows_the_plan_again(
    plans: dict[str, list[Plan]], what: str, which: int
) -> None:
    """And a report says where each step left the plan, and what was planned there."""
    name, other = OTHER_STEPS[what]
    make, planned = MODELS[name]
    plan = plans[name][which]
    reports, told = under(plan, make, [planned, other, other, planned])
    assert [one.last_step.fallbacks for one in reports] == [0, 1, 1, 0]
    assert reports[-1].total.fallback_kinds == {FallbackKind.DIVERGED: 2}
    (message,) = told
    assert "diverged from the plan" in message
    assert BOTH_SHAPES.search(message), message
    first, second = reports[-1].total.departures
    assert (first.step, second.step) == (2, 3)
    assert msgspec.structs.replace(first, step=3) == second
    assert first.planned != first.found
    if first.value:
        values = {"save": range(len(plan.values)), "pack": plan.handles, "use": [plan.handles[at] for at in plan.uses]}
        value = plan.values[values[first.at][first.index]]
        assert (first.value, first.layer) == (value.name, value.layer)


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
    """What is kept holds its saved values for good: steps begin and end all the same, and it can still be used.

    A part that runs before the model is called is no part of the step.
    """
    planned = images_step()
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
            seen.append(gradients_of(model, loss))
            fallbacks.append(session is not None and session.report().last_step.fallbacks > 0)
        assert kept is not None
        return [*seen, gradients_of(model, kept.square().sum())], fallbacks

    model = fresh_model(Detour)
    with poochplan.apply(plans["images"][which], model) as session:
        seen, fallbacks = train(session, model)
    assert equal(seen, train(None, fresh_model(Detour))[0])
    assert fallbacks == [False, (aside, when) != ("a part of the model", "before"), False, False]


def test_a_data_set_of_which_a_step_that_diverged_has_a_part_stays_where_it_is(plans: dict[str, list[Plan]]) -> None:
    """The model's inputs, and its labels, which it is never called with."""
    data = torch.randn(500, WIDTH, 16, 16)
    labels = torch.randint(0, 5, (100_000,))
    model, moved = fresh_model(Detour), []
    with poochplan.apply(plans["images"][0], model) as session:
        for number in range(3):
            first = 2 * number  # a smaller batch than planned
            nn.functional.cross_entropy(model(data[first : first + 2]), labels[first : first + 2]).backward()
            model.zero_grad()
            moved.append(session.report().last_step.out_bytes)
            assert session.report().last_step.fallback_kinds == {FallbackKind.DIVERGED: 1}
    assert 0 < moved[0] == moved[1] == moved[2] < labels.untyped_storage().nbytes()


@pytest.mark.parametrize("what", OTHER_STEPS)
def test_another_step_raises_when_asked_to_and_the_next_follows_the_plan_again(
    plans: dict[str, list[Plan]], what: str
) -> None:
    name, other = OTHER_STEPS[what]
    make, planned = MODELS[name]
    model = fresh_model(make)
    with poochplan.apply(plans[name][0], model, on_divergence="error") as session:
        with pytest.raises(DivergenceError, match="diverged from the plan at") as raised:
            other(model).backward()  # type: ignore[no-untyped-call]
        assert BOTH_SHAPES.search(str(raised.value)), raised.value
        assert ("another batch size" in str(raised.value)) == (
            what in ("a smaller batch", "a larger batch", "one sequence")
        )
        del raised
        model = restarted(model)
        torch.manual_seed(1)
        seen = [gradients_of(model, planned(model))]
        assert session.report().last_step.fallbacks == 0
    assert equal(seen, in_core_steps(make, [planned]))


def test_a_plan_for_another_model_is_refused_and_names_the_first_difference(plans: dict[str, list[Plan]]) -> None:
    with pytest.raises(ModelMismatchError, match=r"expected blocks\.0\.0\.weight float32\[8, 8, 3, 3\], found .*4, 4"):
        poochplan.apply(plans["images"][0], Detour(width=4))
    two = poochplan.PlanSet([random_plan(profile_of(Detour, images_step(size)), 1) for size in (2, 3)])
    with pytest.raises(ModelMismatchError, match="make a new profile and plan for this model"):
        poochplan.apply(two, Detour(width=4))


class MakesItsPositions(nn.Module):
    """A buffer that no state dict has is made anew in the first forward, in the shape that the input needs."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("positions", torch.zeros(1, 1), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if len(self.positions) != len(rows):
            self.positions = torch.arange(len(rows), dtype=rows.dtype).unsqueeze(1)
        return self.mix(rows.tanh() + self.embed(self.positions).exp()).sin()


def _rows(model: nn.Module) -> torch.Tensor:
    rows = torch.ones(6, WIDTH, requires_grad=True)
    return model(rows).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("weights", [(0, 1, 0), (0, 0, 1)], ids=["swap", "recompute"])
def test_a_fresh_model_that_makes_a_buffer_in_its_first_forward_follows_the_plan_from_its_second_step_on(
    weights: tuple[int, int, int],
) -> None:
    plan = random_plan(profile_of(MakesItsPositions, _rows), 0, weights)
    reports, _ = under(plan, MakesItsPositions, [_rows] * 3)
    assert [bool(one.last_step.fallbacks) for one in reports] == [True, False, False]


INTERNAL = re.compile(r"outside the model\)|another save|no further save|use point|said once|before/")


class Dropped(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.drop(self.layers[:2](batch)))


def _batch(rows: int = BATCH, width: int = besides.WIDTH) -> torch.Tensor:
    return torch.ones(rows, width)


def _replaced(model: nn.Module) -> None:
    model.layers[1][1] = nn.SiLU()
    model(_batch()).square().mean().backward()


def _kept_output(model: nn.Module) -> None:
    first = model(_batch())
    model(_batch()).square().mean().backward()
    del first


def _eval(model: nn.Module) -> None:
    model.eval()
    model(_batch()).square().mean().backward()


def _autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(_batch()).square().mean()
    loss.backward()


def _narrower(model: nn.Module) -> None:
    model.layers[3][0] = nn.Linear(besides.WIDTH, 32)
    model(_batch()).square().mean().backward()


def _parametrized(model: nn.Module) -> None:
    weight_norm(model.layers[3][0])
    model(_batch()).square().mean().backward()


def _assigned(model: nn.Module) -> None:
    def assign(layer: nn.Module, _: object) -> None:
        layer.weight.data = layer.weight.data * 1.0

    model.layers[3][0].register_forward_pre_hook(assign)
    model(_batch()).square().mean().backward()


class Noisy(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight + torch.rand_like(self.weight), self.bias)


def _noisy_head(model: nn.Module) -> None:
    model.layers.append(Noisy(besides.WIDTH, besides.WIDTH))
    model(_batch()).square().mean().backward()


def _called_alone(model: nn.Module) -> None:
    loss = model(_batch()).square().mean() + model.layers[0](_batch()).mean()
    loss.backward()


CHANGED: dict[str, tuple[Step, str]] = {
    "another batch size": (
        lambda model: model(_batch(17)).square().mean().backward(),
        r"another batch size, input 0 is \[17, 64\], planned \[256, 64\]; .* poochplan\.plan_set\(step_for, shapes=",
    ),
    "another loss function": (
        lambda model: model(_batch()).exp().sigmoid().sum().backward(),
        r"with another loss function or one more term; make a new profile",
    ),
    "one more term": (
        lambda model: (lambda out: (out.square().mean() + out.exp().mean()).backward())(model(_batch())),
        r"with another loss function or one more term; make a new profile",
    ),
    "a narrower layer": (
        _narrower,
        r"other parameters than when it was profiled: planned layers\.3\.0\.weight float32\[64, 64\], found "
        r"layers\.3\.0\.weight float32\[32, 64\]; make a new profile",
    ),
    "another parametrization": (
        _parametrized,
        r"planned layers\.3\.0\.weight float32\[64, 64\], found layers\.3\.0\.bias",
    ),
    "a layer more": (_noisy_head, r"planned nothing more, found layers\.4\.weight float32\[64, 64\]; make"),
    "an assignment in forward": (_assigned, r"another tensor stands for parameter layers\.3\.0\.weight than when"),
    "a layer once more": (_called_alone, r"layer layers\.0\.0 saves more than when it was profiled"),
    "a layer replaced": (_replaced, r"layer layers\.1\.\d was replaced, left out or runs another way"),
    "an output kept alive": (_kept_output, r"called again while the output of its call before is held; let go of that"),
    "eval mode": (_eval, r"the model is in eval mode; call model\.train\(\) before the step"),
    "autocast": (_autocast, r"another precision, bfloat16 in place of float32; profile under the same autocast"),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(profiled(fresh(), None), 1, (0, 1, 0))


@pytest.mark.cpu_device
@pytest.mark.parametrize("what", CHANGED)
def test_the_message_says_what_has_changed_and_what_to_do(plan: Plan, what: str) -> None:
    step, said = CHANGED[what]
    if what == "eval mode":
        model: nn.Module = Dropped()
        plan = random_plan(profiled(model, None), 1, (0, 1, 0))
    else:
        model = fresh()
    with warnings.catch_warnings(record=True) as caught, poochplan.apply(plan, model):
        warnings.simplefilter("always")
        step(model)
    told = [one for one in caught if "diverged from the plan" in str(one.message)]
    assert len(told) == 1, [str(one.message) for one in caught]
    message = str(told[0].message)
    assert re.search(said, message), message
    assert "its gradients are right" in message
    assert not INTERNAL.search(message), message
    assert told[0].filename in (__file__, besides.__file__)  # the step's, or in the model's forward


# -- steps whose ops change, though what they save does not: a replay is of what ran in this step ----------------------


PLANNED = "as planned"


def _zeroed_head(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[:5].zero_()
    return x


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    PLANNED: lambda h: h + 1,
    "another op": lambda h: h * 2,
    "another number": lambda h: h + 3,
    "one op more": lambda h: (h + 1) * 0.5,
    "a write in place": lambda h: (h + 1).mul_(0.5),
    "a write to a part": lambda h: _zeroed_head(h + 1),
    "a write to what was read": lambda h: h.add_(1),
    "other strides": lambda h: (h + 1).t().contiguous().t(),
    "the first rows": lambda h: h + h[:4].repeat(2, 1),
    "the last rows": lambda h: h + h[4:].repeat(2, 1),
    "random numbers": lambda h: h + torch.rand_like(h),
    "more random numbers": lambda h: h + torch.rand(3).sum() + torch.rand_like(h),
    "without gradients in between": lambda h: h + h.detach().mul(2).sigmoid_(),
}
"""What runs between two saves, of which the plan knows nothing: shapes and bytes of what is saved are the same."""


def square() -> Net:
    """Saves the same in every step; ``between`` is what it computes from."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        low = torch.tanh(net.between(net.linear(batch)))
        high = torch.sigmoid(torch.tanh(low * 3 + net.scale) * 2)
        return (high @ high.t()).sum()

    scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    return Net(body, linear=nn.Linear(8, 8), scale=scale, between=BETWEEN[PLANNED])


@functools.cache
def _square_batch(rows: int) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 8).view(rows, 8)


def _step(name: str, rows: int = 8) -> Step:
    def step(model: nn.Module) -> torch.Tensor:
        model.between = BETWEEN[name]
        return model(_square_batch(rows))

    return step


@functools.cache
def _plan() -> Plan:
    plan = random_plan(profile_of(square, _step(PLANNED)), 0, (0, 0, 1))
    assert [value.decision for value in plan.values].count(Decision.RECOMPUTE) >= 3
    return plan


def _replayed(steps: list[Step]) -> tuple[list[int], list[str]]:
    """How many values each step has replayed, and what was told."""
    reports, told = under(_plan(), square, steps)
    return [one.last_step.replayed_values for one in reports], told


@pytest.mark.parametrize("name", [name for name in BETWEEN if name != PLANNED])
def test_replays_follow_what_ran_now(name: str) -> None:
    steps = [PLANNED, PLANNED, name, PLANNED, name, name, PLANNED]
    replayed, told = _replayed([_step(one) for one in steps])
    assert told == []
    assert len(set(replayed)) == 1
    assert replayed[0] >= 3


def test_a_step_of_another_shape_between_is_exact_and_the_next_follows_again() -> None:
    replayed, told = _replayed([_step(PLANNED), _step(PLANNED, rows=4), _step(PLANNED), _step("another op")])
    assert "diverged from the plan" in told[0]
    assert replayed[1] == 0
    assert replayed[0] == replayed[2] == replayed[3] >= 3


def _swapped(model: Net) -> None:
    """Another tensor behind the same object."""
    torch.utils.swap_tensors(model.scale, nn.Parameter(model.scale.detach() * 2))


def _another(model: Net) -> None:
    model.scale = nn.Parameter(model.scale.detach() * 2)


def _reseated(model: Net) -> None:
    """The same tensor in another memory."""
    model.scale.data = model.scale.detach() * 2


def _stepped(model: Net) -> None:
    with torch.no_grad():
        model.scale.add_(1)


CHANGES = [lambda model: None, _swapped, _another, _reseated, _stepped]


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_changes_is_read_as_it_was_in_the_step(
    change: Callable[[Net], None],
) -> None:
    model, step = fresh_model(square), _step(PLANNED)
    with poochplan.apply(_plan(), model) as session:
        for _ in range(3):
            gradients_of(model, step(model))
        change(model)
        found = gradients_of(model, step(model))
        with session.away():
            assert equal([gradients_of(model, step(model))], [found])
        assert session.report().total.fallbacks == 0
        assert equal([_written_before_backward(model, step)], [_written_before_backward(model, step, session.away())])


def _written_before_backward(
    model: Net, step: Callable[[Net], torch.Tensor], block: contextlib.AbstractContextManager[None] | None = None
) -> list[torch.Tensor]:
    """In-core nothing needs what the parameter was."""
    before = model.scale.detach().clone()
    with block or contextlib.nullcontext():
        loss = step(model)
        with torch.no_grad():
            model.scale.mul_(2)
        found = gradients_of(model, loss)
        with torch.no_grad():
            model.scale.copy_(before)
    return found


def averaging() -> Net:
    """Replaces a buffer in its forward. The next storage that torch makes may get the identity of the old one's."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        low = (net.linear(batch) * net.mean.cos()).exp()
        net.mean = net.mean * 0.9 + low.detach().mean(0)
        return (low * net.mean.cos() * net.scale).sigmoid().sum()

    net = Net(body, linear=nn.Linear(8, 8), scale=nn.Parameter(torch.linspace(0.5, 1.5, 8)))
    net.register_buffer("mean", torch.zeros(8))
    return net


@pytest.mark.parametrize("weights", [(0, 1, 0), (0, 0, 1)])
def test_a_step_whose_forward_replaces_a_buffer_follows_its_plan(weights: tuple[float, float, float]) -> None:
    step: Step = lambda model: model(_square_batch(8))  # noqa: E731
    profile = profile_of(averaging, step)
    assert not [note for note in profile.notes if "steps differ" in note]
    reports, told = under(random_plan(profile, 0, weights), averaging, [step] * 5)
    assert [told, [one.last_step.fallbacks for one in reports]] == [[], [0] * 5]
