"""Timed steps that say nothing are timed again, and then refused; ordinary noise and tiny steps are left alone."""

from __future__ import annotations

import time

import pytest
import torch

import poochplan
from poochplan.errors import StepError
from poochplan.formats.profile import Phase
from poochplan.profiler.assembly.reconcile import PhaseSeconds, contradicted, is_doubted, steady
from tests.runtime.nets import LINK

F, B, OPT = Phase


def steps(*milliseconds: float) -> list[PhaseSeconds]:
    """Steps of that many milliseconds, half of each in backward."""
    return [{F: 0.0004 * ms, B: 0.0005 * ms, OPT: 0.0001 * ms} for ms in milliseconds]


QUIET = steps(70, 71, 69, 70, 72)


@pytest.mark.parametrize(
    "noisy",
    [
        pytest.param((67, 70, 66, 68, 67), id="quiet"),
        pytest.param((67, 90, 66, 75, 95), id="ordinary noise"),
        pytest.param((67, 66, 979, 68, 67), id="one step that stumbled"),
        pytest.param((104, 100, 99, 101, 98), id="all of it slower by less than half"),
    ],
)
def test_steps_that_agree_are_taken_as_they_are(noisy: tuple[float, ...]) -> None:
    assert not is_doubted(steps(*noisy), QUIET)


def test_tiny_steps_are_never_doubted() -> None:
    assert not is_doubted(steps(0.5, 400, 0.6, 300, 0.4), steps(0.7))
    assert not is_doubted(steps(90), steps(19))


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(steps(979, 980, 975, 985, 979), id="steadily slow while nothing else was"),
        pytest.param(steps(67, 979, 68, 990, 985), id="now this, now that"),
        pytest.param(steps(979), id="one step"),
    ],
)
def test_a_doubted_round_is_replaced_by_a_steady_one(first: list[PhaseSeconds]) -> None:
    second = steps(67, 68, 67, 66, 70)
    assert is_doubted(first, QUIET)
    timed, notes = steady(first, second, QUIET)
    assert timed is second
    assert "those of the second round count" in notes[0]


def test_two_rounds_that_say_the_same_count_together_and_are_noted() -> None:
    first, second = steps(60, 130, 61, 140, 100), steps(62, 150, 60, 120, 110)
    assert is_doubted(first, QUIET)
    timed, notes = steady(first, second, QUIET)
    assert timed == [*first, *second]
    assert "times are uncertain" in notes[0]


def test_rounds_of_one_step_are_noted_and_never_refused() -> None:
    timed, notes = steady(steps(979), steps(300), QUIET)
    assert timed == steps(979, 300)
    assert "times are uncertain" in notes[0]


def test_two_rounds_that_contradict_each_other_are_refused_in_one_line() -> None:
    with pytest.raises(StepError) as caught:
        steady(steps(979, 980, 979), steps(400, 300, 390), QUIET)
    assert str(caught.value) == (
        "timed steps: expected steps of about one length, found medians of 390 ms and 979 ms in two rounds of 3, and "
        "70 ms with each op timed; the machine is busy with something else: profile again when it is quieter, or with "
        "more iterations"
    )


def test_later_steps_that_took_much_less_contradict_the_timed_ones() -> None:
    assert contradicted(steps(979, 980, 975), steps(70, 68)).startswith(
        "the timed steps took 979 ms, and later ones 68"
    )
    assert contradicted(steps(100, 99, 101), steps(70, 90)) == ""  # by less than half
    assert contradicted(steps(70, 71, 69), steps(979, 990)) == ""  # later ones do more, and may take any time
    assert contradicted(steps(29, 30, 29), steps(2, 3)) == ""  # tiny
    assert contradicted(steps(979), []) == ""


class Disturbed:
    """A step of 60 ms but where ``slow`` says otherwise, in seconds by the number of the call: something else ran."""

    def __init__(self, slow: dict[int, float]) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.calls = 0
        self._slow = slow

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        time.sleep(self._slow.get(self.calls, 0.06))
        loss: torch.Tensor = self.model(torch.ones(4, 8)).square().mean()
        return loss


def test_a_profile_of_a_machine_that_was_busy_for_a_while_is_timed_again() -> None:
    step = Disturbed({9: 0.6, 10: 0.7, 11: 0.6})  # all that are timed as planned steps run
    said: list[str] = []
    profile = poochplan.profile(step, model=step.model, iterations=3, link=LINK, progress=said.append)
    assert "timed steps spread too much; timing 3 more" in said
    assert any("those of the second round count" in note for note in profile.notes)


def test_a_machine_that_was_busy_as_long_as_steps_were_timed_is_warned_about_and_noted() -> None:
    step = Disturbed({7: 0.5, 8: 0.5})  # the timed step, and the one with instruments
    with pytest.warns(UserWarning, match="later ones .* the machine was busy with something else"):
        profile = poochplan.profile(step, model=step.model, iterations=1, link=LINK)
    assert any("all times are uncertain" in note for note in profile.notes)


def test_a_refused_profile_leaves_the_model_as_it_was() -> None:
    rounds = {9: 0.2, 10: 0.2, 11: 0.2, 15: 0.6, 16: 0.6, 17: 0.6}  # those with instruments are between them
    step = Disturbed(rounds)
    step.model.weight.grad = torch.ones_like(step.model.weight)
    before = step.model.weight.clone()
    with pytest.raises(StepError, match="expected steps of about one length"):
        poochplan.profile(step, model=step.model, iterations=3, link=LINK)
    assert torch.equal(step.model.weight, before)
    assert torch.equal(step.model.weight.grad, torch.ones_like(before))
