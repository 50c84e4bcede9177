"""Whatever a random training program does, it trains bitwise as in-core, and within the bytes that were predicted.

``python -m benchmarks.programs`` tries a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.depth import seeds
from tests.runtime.served import needs_compiler

from .drawing import Feature, Program, draw
from .late_trial import late_trial
from .mutated import all_mutants, caught_by, ready
from .other_trials import cast_trial, served_trial, windowed_trial
from .state_trial import state_trial
from .trial import Outcome, trial

SEEDS = seeds(day=10, deep=100)
pytestmark = pytest.mark.usefixtures("one_thread")


def test_those_of_every_day_have_every_feature() -> None:
    assert set().union(*(draw(seed).features for seed in SEEDS)) == set(Feature)


TRIALS: dict[str, tuple[Callable[[Program], Outcome], Iterable[int], str]] = {
    "plans of all kinds": (trial, SEEDS, "steps that followed"),
    "served from an arena": (served_trial, [82, *seeds(day=2, deep=50)], "blocks served"),
    "recorded in short windows": (windowed_trial, [63, 82, 85, *seeds(day=0, deep=50)], "steps"),
    "sources in place of their copies": (cast_trial, seeds(day=4, deep=500), "steps that followed"),
    "optimizers whose state is streamed": (
        lambda program: state_trial(program.seed),
        [0, 2, 3, *seeds(day=0, deep=50)],
        "steps",
    ),
    "writes past the dispatcher that begin late": (late_trial, [2, 46, *seeds(day=0, deep=100)], "steps told"),
}
"""How programs are tried, the seeds, and what is counted. The first three in short windows once ended with an
error, and casts of 82 write below autograd. Programs 2 and 46 once stayed wrong in steps that left layers out."""
COUNTED_LIVE = ("writes past the dispatcher that begin late",)
"""The others are compared with bytes that the allocator counts. Live bytes have the tensors of numbers and generators'
states, some kilobytes that no profile sees.
"""


@pytest.mark.parametrize(
    ("how", "seed"),
    [
        pytest.param(how, seed, marks=() if how in COUNTED_LIVE else needs_compiler)
        for how, (_, some, _) in TRIALS.items()
        for seed in some
    ],
)
def test_it_trains_bitwise_as_in_core_within_the_bytes_predicted(how: str, seed: int) -> None:
    tried, _, counted = TRIALS[how]
    outcome = tried(draw(seed))
    assert outcome.problems == []
    assert outcome.counts[counted] > 0


def test_a_program_notices_a_wait_that_is_left_out_and_a_release() -> None:
    program = ready(draw(0))
    mutants = all_mutants()["waits and releases"]
    for what in ("Copy.wait: no wait", "Copy.wait: nothing let go"):
        (mutant,) = (mutant for label, mutant in mutants.items() if label.startswith(what))
        assert caught_by(mutant, [program])[0] == 0
