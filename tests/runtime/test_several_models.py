"""One session for several models: each step follows the plan of its own, with the gradients of in-core training."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from tests.runtime.nets import equal, snapshot, taken
from tests.runtime.random_plans import random_plan

NOISE, WIDTH, BATCH = 8, 24, 32
SWAP, REPLAY = (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def _halves() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    return {"g": generator, "d": critic}


def _batch(models: dict[str, nn.Module], name: str) -> list[torch.Tensor]:
    """What a step of that half is about: noise; or fakes and originals, which D is called with one after the other."""
    noise = torch.randn(BATCH, NOISE)
    if name == "g":
        return [noise]
    with torch.no_grad():
        return [models["g"](noise), torch.randn(BATCH, WIDTH)]


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
