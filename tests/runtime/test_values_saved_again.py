"""Profile and session take the same for one value: let go of and saved again, written meanwhile, seen by a mode."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import poochplan
from poochplan.formats.plan import Departure
from poochplan.planner.planning import smallest_budget
from tests.runtime.nets import Net, followed, of, taken
from tests.runtime.random_plans import random_plan

WIDTH = 64
Layer = Callable[[torch.Tensor], torch.Tensor]


def watched(hidden: torch.Tensor) -> torch.Tensor:
    """Saved for a figure that nobody takes the gradient of, and again twice."""
    hidden.square().sum().item()
    return hidden.square() + hidden.sin()


def watched_by_parts(hidden: torch.Tensor) -> torch.Tensor:
    """The same by another part of it, each time let go of."""
    for part in hidden.chunk(4):
        part.square().sum().item()
    return hidden[1:].square().sum() + hidden.sin() + hidden.cos()


def watched_and_written(hidden: torch.Tensor) -> torch.Tensor:
    """What is saved again is another content of the same storage."""
    hidden.square().sum().item()
    hidden.mul_(0.5)
    return hidden.square() + hidden.sin()


LAYERS = [watched, watched_by_parts, watched_and_written]


def around(layer: Layer) -> Net:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        return net.last(layer(net.first(batch).tanh() * 2)).square().mean()  # type: ignore[no-any-return]

    return Net(body, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH))


def speech(net: Net, frames: torch.Tensor) -> torch.Tensor:
    """Its lengths are tensors, which autograd saves only where ``ctc_loss`` meets a dispatch mode."""
    labels = torch.randint(1, 6, (4, 5), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((4,), len(frames)), torch.tensor([5, 4, 3, 2], dtype=torch.int32)
    found = net.last(net.first(frames).sigmoid().square()).log_softmax(-1)
    return nn.functional.ctc_loss(found, labels, *lengths, zero_infinity=True)


CASES = {layer.__name__: of(functools.partial(around, layer), 32, WIDTH) for layer in LAYERS}
CASES["ctc_loss"] = of(lambda: Net(speech, first=nn.Linear(8, WIDTH), last=nn.Linear(WIDTH, 6)), 20, 4, 8)


@pytest.mark.parametrize("weights", [(0, 1, 0), (0, 0, 1), (1, 2, 2)], ids=["swap", "recompute", "all three"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_whose_profile_saw_it_follows_its_plan(name: str, weights: tuple[int, int, int]) -> None:
    followed(CASES[name], random_plan(CASES[name].profile(), 0, weights), 3, meter="always")


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_it_follows_what_was_solved_and_takes_no_more_than_was_predicted(name: str, share: float) -> None:
    profile = CASES[name].profile()
    smallest = smallest_budget(profile)
    budget = smallest + int(share * (profile.in_core_peak_bytes - smallest))
    plan = poochplan.plan(profile, budget, evaluations=50, arena="off")
    found = followed(CASES[name], plan, 3, meter="always").last_step
    assert found.peak_bytes <= plan.prediction.peak_bytes


@pytest.mark.parametrize("is_watched", [False, True], ids=["nobody", "a FLOP counter"])
@pytest.mark.parametrize("name", CASES)
def test_whether_somebody_looks_at_a_step_makes_no_difference_to_what_it_saves(name: str, is_watched: bool) -> None:
    counter = FlopCounterMode(display=False)

    def at(place: str) -> None:
        if is_watched and place == "opened":
            counter.__enter__()
        if is_watched and place == "closing":
            counter.__exit__(None, None, None)

    followed(CASES[name], random_plan(CASES[name].profile(), 0, (0, 1, 0)), 3, at, meter="never")


def test_what_is_let_go_of_between_two_saves_can_still_be_moved() -> None:
    planned = random_plan(CASES["watched"].profile(), 0, (0, 1, 0))
    (value,) = [index for index, one in enumerate(planned.values) if planned.handles.count(index) == 3]
    assert planned.values[value].decision == "swap"
    assert followed(CASES["watched"], planned).last_step.out_bytes >= planned.values[value].size_bytes


def pairs(net: Net, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A loss for each letter: the square of one of several values of one shape."""
    names = sorted(set(net.order))
    values = dict(zip(names, [net.weight * batch for _ in names], strict=True))
    return tuple(values[name].square().sum() for name in net.order)


def left(planned: str, found: str, *, in_parts: bool = False) -> tuple[str, Departure]:
    """What is said where a step of one order is run under the plan of another, with one backward or one for each."""
    model, batch = Net(pairs, weight=nn.Parameter(torch.ones(8)), order=planned), torch.ones(8)
    profile = taken(lambda: sum(model(batch)), model)
    model.order = found
    with (
        pytest.warns(RuntimeWarning, match="diverged") as caught,
        poochplan.apply(random_plan(profile, 0, (1, 0, 0)), model) as session,
    ):
        losses = model(batch)
        for loss in losses if in_parts else [sum(losses)]:
            loss.backward(retain_graph=in_parts)
    (departure,) = session.report().total.departures
    return str(caught[0].message), departure


@pytest.mark.parametrize(
    ("planned", "found", "in_parts"),
    [("aab", "aba", False), ("aba", "aab", False), ("abab", "abba", False), ("abc", "aabc", False), ("ab", "ab", True)],
)
def test_a_message_tells_values_of_one_shape_apart(planned: str, found: str, in_parts: bool) -> None:
    message, departure = left(planned, found, in_parts=in_parts)
    one, _, other = message.partition("planned ")[2].partition("; ")[0].partition(", found ")
    assert one != other.partition(": ")[0]
    assert departure.planned != departure.found
