"""What lives beside the step and grows: foreseen or noticed, planned for seldom, and within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poochplan.formats.profile import Profile
from poochplan.online.background import BackgroundPlan, PlanRequest
from tests.online.runs import run_auto, run_plain
from tests.online.trainings import Losses, Training, Turn, batch, blocks, plain, with_lbfgs

KEPT_BYTES = 16384


def long_history() -> Training:
    """LBFGS whose history grows for seven turns, in ten segments a turn."""
    return with_lbfgs(batch(4096), max_iter=10, history_size=60)


def hoarding() -> Training:
    """Keeps something of each turn, as a buffer of replays or of metrics does."""
    kept: list[torch.Tensor] = []

    def turn(inner: Turn, number: int) -> Losses:
        kept.append(torch.full((KEPT_BYTES // 4,), float(number)))
        return inner(number)

    return plain(blocks(6)).each(turn)


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
    kinds = found.session._source.loop.kinds
    assert len(plannings) == len(kinds) <= 2  # of a turn's first segment, and of the nine others


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
