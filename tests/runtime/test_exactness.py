"""Whatever a plan decides, gradients are bitwise those of in-core training, and bytes really leave."""

from __future__ import annotations

import pytest

from tests.depth import seeds
from tests.runtime.nets import CASES, followed, metered_peaks
from tests.runtime.random_plans import random_plan

MIXED, KEEP, SWAP, REPLAY, MOST = (1, 2, 2), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", [MIXED, SWAP, REPLAY, MOST], ids=["mixed", "swap", "replay", "most"])
def test_any_decisions_give_the_gradients_of_in_core_training(name: str, weights: tuple[float, float, float]) -> None:
    for seed in seeds(deep=20):
        assert followed(CASES[name], random_plan(CASES[name].profile(), seed, weights), 3).total.steps == 3


def test_decisions_are_carried_out() -> None:
    case = CASES["residual"]
    swapped, replayed = (followed(case, random_plan(case.profile(), 0, one)).last_step for one in (SWAP, REPLAY))
    assert swapped.out_bytes == swapped.in_bytes > 0
    assert swapped.replayed_values == 0
    assert replayed.replayed_values > 5
    assert replayed.out_bytes == 0


def test_the_metered_peak_is_the_profiles_in_core_peak_when_all_is_kept_and_falls_when_all_is_swapped() -> None:
    case = CASES["residual"]
    profile = case.profile()
    kept, swapped = (metered_peaks(case, random_plan(profile, 0, weights)) for weights in (KEEP, SWAP))
    assert kept[1] == profile.in_core_peak_bytes
    assert kept[0] < kept[1]  # the first step has no optimizer state yet
    assert swapped[1] < 0.8 * kept[1]
