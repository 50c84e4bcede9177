"""Whatever a plan decides, gradients are bitwise those of in-core training, and bytes really leave."""

from __future__ import annotations

import pytest

from tests.depth import seeds
from tests.runtime.nets import CASES, equal, in_core, metered_peaks, train
from tests.runtime.random_plans import random_plan


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "weights", [(1, 2, 2), (0, 1, 0), (0, 0, 1), (1, 1, 3)], ids=["mixed", "swap", "replay", "most"]
)
def test_any_decisions_give_the_gradients_of_in_core_training(name: str, weights: tuple[float, float, float]) -> None:
    case = CASES[name]
    profile = case.profile()
    reference = in_core(case, 3)
    for seed in seeds(deep=20):
        planned, report = train(case, 3, random_plan(profile, seed, weights))
        assert equal(reference, planned)
        assert report is not None
        assert report.total.steps == 3
        assert report.total.fallbacks == 0, report.total.fallback_reasons


def test_decisions_are_carried_out() -> None:
    case = CASES["residual"]
    profile = case.profile()
    _, swapped = train(case, 2, random_plan(profile, 0, (0, 1, 0)))
    _, replayed = train(case, 2, random_plan(profile, 0, (0, 0, 1)))
    assert swapped is not None
    assert replayed is not None
    assert swapped.last_step.out_bytes == swapped.last_step.in_bytes > 0
    assert swapped.last_step.replayed_values == 0
    assert replayed.last_step.replayed_values > 5
    assert replayed.last_step.out_bytes == 0


def test_the_metered_peak_is_the_profiles_in_core_peak_when_all_is_kept_and_falls_when_all_is_swapped() -> None:
    case = CASES["residual"]
    profile = case.profile()
    kept = metered_peaks(case, random_plan(profile, 0, (1, 0, 0)))
    swapped = metered_peaks(case, random_plan(profile, 0, (0, 1, 0)))
    assert kept[1] == profile.in_core_peak_bytes
    assert kept[0] < kept[1]  # the first step has no optimizer state yet
    assert swapped[1] < 0.8 * kept[1]
