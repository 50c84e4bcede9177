"""What lives beside the step and grows: foreseen or noticed, planned for seldom, and within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poochplan.formats.profile import Profile
from poochplan.online.background import BackgroundPlan, PlanRequest
from poochplan.runtime.metering.census import Growth, census_bytes, foreseen_bytes, left_free
from tests.online.runs import run_auto, run_plain
from tests.online.trainings import Losses, Training, batch, blocks, loss_of, plain, with_lbfgs

KEPT_BYTES = 16384


def test_what_is_foreseen_of_lbfgs_is_what_its_history_comes_to_take() -> None:
    model, data = blocks(4), batch(64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=9)

    def evaluated() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        return loss

    together: set[int] = set()
    for _ in range(6):
        optimizer.step(evaluated)
        foreseen = foreseen_bytes([optimizer], "cpu")
        assert foreseen > 0 or len(together) > 0
        together.add(census_bytes("cpu") + foreseen)
    assert foreseen == 0
    assert max(together) - min(together) <= 512 * 9  # numbers of which some are not there yet
    assert foreseen_bytes([torch.optim.Adam(model.parameters())], "cpu") == 0


def test_only_what_has_become_more_twice_in_a_row_grows() -> None:
    growth = Growth()
    for number, size_bytes in ((1, 1000), (2, 1000), (10, 9000)):
        growth.saw(number, size_bytes)
    assert growth.steady_bytes_per_segment == 0
    assert growth.latest_bytes_per_segment == 1000
    growth.saw(12, 10000)
    assert growth.steady_bytes_per_segment == 500
    growth.saw(13, 10000)
    assert growth.steady_bytes_per_segment == growth.latest_bytes_per_segment == 0


@pytest.mark.parametrize(("ahead_bytes", "room_bytes", "left_bytes"), [(0, 100, 0), (100, 100, 100), (101, 100, 50)])
def test_growth_is_left_all_that_it_takes_or_half_of_the_room(
    ahead_bytes: int, room_bytes: int, left_bytes: int
) -> None:
    assert left_free(ahead_bytes, room_bytes) == left_bytes


def long_history() -> Training:
    """LBFGS whose history grows for seven turns, in ten segments a turn."""
    return with_lbfgs(batch(4096), max_iter=10, history_size=60)


def hoarding() -> Training:
    """Keeps something of each turn, as a buffer of replays or of metrics does."""
    training, kept = plain(blocks(6)), []
    inner = training.turn

    def turn(number: int) -> Losses:
        kept.append(torch.full((KEPT_BYTES // 4,), float(number)))
        return inner(number)

    training.turn = turn
    return training


@pytest.fixture
def plannings(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """Each plan that is asked for."""
    every: list[PlanRequest] = []

    class Counted(BackgroundPlan):
        def __init__(self, profile: Profile, request: PlanRequest) -> None:
            every.append(request)
            super().__init__(profile, request)

    monkeypatch.setattr("poochplan.online.known_plans.BackgroundPlan", Counted)
    return every


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_optimizer_whose_state_grows_is_planned_for_once_with_room_for_all_of_it(
    tmp_path: Path, plannings: list[PlanRequest]
) -> None:
    expected = run_plain(long_history)
    budget_bytes = int(expected.peak_bytes * 0.75)
    found = run_auto(long_history, budget_bytes, tmp_path, before_plan="swap")
    assert found.equals(expected)
    assert found.peak_bytes <= budget_bytes
    assert found.session.report().steps_followed > 0
    assert len(plannings) == len(found.session._source.kinds) <= 2  # of a turn's first segment, and of the nine others


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_loop_that_keeps_more_and_more_is_within_its_budget_and_seldom_planned_anew(
    tmp_path: Path, plannings: list[PlanRequest]
) -> None:
    expected = run_plain(hoarding, 60)
    budget_bytes = int(expected.peak_bytes * 0.7)
    found = run_auto(hoarding, budget_bytes, tmp_path, 60, before_plan="swap")
    assert found.equals(expected)
    assert found.peak_bytes <= budget_bytes
    assert found.session.report().steps_followed > 20
    assert len(plannings) <= 4
