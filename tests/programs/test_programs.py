"""Whatever a random training program does, it trains bitwise as in-core, and within the bytes that were predicted.

``python -m benchmarks.programs`` tries a thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.depth import seeds
from tests.runtime.served import needs_compiler

from .cast_trial import cast_trial
from .drawing import EVENTS, PLAIN, Feature, draw
from .mask_trial import mask_trial
from .mutated import all_mutants, caught_by, ready
from .served_trial import served_trial
from .trial import trial
from .windowed_trial import windowed_trial

SEEDS = seeds(day=10, deep=100)
LEAST_CAUGHT = 12
"""Of the waits and releases of the runtime, by the programs alone."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_each_feature_is_in_at_least_a_hundred_of_a_thousand_programs() -> None:
    programs = [draw(seed) for seed in range(1000)]
    counts = Counter(feature for program in programs for feature in program.features)
    assert {feature: count for feature, count in counts.items() if count < 100} == {}
    assert set(counts) == set(Feature)


def test_what_a_program_is_said_to_have_it_does() -> None:
    for program in map(draw, range(200)):
        for feature, events in EVENTS.items():
            assert (feature in program.features) == any(event in events for event in program.events), program
        assert program.events[0] == program.events[-1] == PLAIN
        assert (Feature.CHECKPOINT in program.features) == any(b.wrapper == "checkpoint" for b in program.blocks)


def test_those_of_every_day_have_every_feature() -> None:
    assert set().union(*(draw(seed).features for seed in SEEDS)) == set(Feature)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_trains_bitwise_as_in_core_within_the_bytes_predicted(seed: int) -> None:
    outcome = trial(draw(seed))
    assert outcome.problems == []
    assert outcome.counts["steps that followed"] > 0


@needs_compiler
@pytest.mark.parametrize("seed", seeds(day=2, deep=50))
def test_served_from_an_arena_it_trains_bitwise_as_in_core(seed: int) -> None:
    outcome = served_trial(draw(seed))
    assert outcome.problems == []
    assert outcome.counts["blocks served"] > 0


@needs_compiler
@pytest.mark.parametrize("seed", [63, 82, 85, *seeds(day=0, deep=50)])  # the first three once ended with an error
def test_recorded_in_short_windows_it_trains_bitwise_as_in_core(seed: int) -> None:
    assert windowed_trial(draw(seed)).problems == []


@pytest.mark.parametrize("seed", seeds(day=4, deep=500))
def test_with_sources_held_in_place_of_their_copies_it_trains_bitwise_as_in_core(seed: int) -> None:
    outcome = cast_trial(draw(seed))
    assert outcome.problems == []
    assert outcome.counts["steps that followed"] > 0


@pytest.mark.parametrize("seed", seeds(day=4, deep=500))
def test_with_bits_held_in_place_of_masks_it_trains_bitwise_as_in_core(seed: int) -> None:
    outcome = mask_trial(draw(seed))
    assert outcome.problems == []
    assert outcome.counts["steps that followed"] > 0


def test_a_program_notices_a_wait_that_is_left_out_and_a_release() -> None:
    program = ready(draw(0))
    mutants = all_mutants()["waits and releases"]
    for what in ("Copy.wait: no wait", "Copy.wait: nothing let go"):
        (mutant,) = (mutant for label, mutant in mutants.items() if label.startswith(what))
        assert caught_by(mutant, [program])[0] == 0


@pytest.mark.deep
def test_programs_alone_notice_most_of_what_can_be_left_out() -> None:
    programs = [ready(draw(seed)) for seed in range(40)]
    mutants = all_mutants()["waits and releases"]
    unnoticed = [label for label, mutant in mutants.items() if caught_by(mutant, programs)[0] is None]
    assert len(mutants) - len(unnoticed) >= LEAST_CAUGHT, unnoticed
