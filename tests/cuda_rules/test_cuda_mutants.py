"""No wait and no release of the CUDA device can go: on the stand-in, without any single one something fails."""

from __future__ import annotations

import pytest

from poochplan.runtime.devices import cuda, pinned, pinned_tier, transfers
from tests.cuda_rules.scenarios import complaints
from tests.runtime.mutants import CUDA_WAITS, GIVE_BACK, Mutant, mutants_of

MUTANTS = mutants_of(cuda, pinned, pinned_tier, transfers, calls=(*CUDA_WAITS, *GIVE_BACK))


def test_nothing_is_wrong_with_the_device_as_it_is() -> None:
    assert list(complaints()) == []


def test_its_waits_and_releases_are_found() -> None:
    labels = [mutant.label for mutant in MUTANTS]
    for call in (*CUDA_WAITS[1:], *GIVE_BACK):
        assert any(f"no {call}" in label for label in labels), call
    assert any("nothing let go" in label for label in labels)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_without_it_something_fails(mutant: Mutant) -> None:
    with mutant.in_place():
        assert next(complaints(), None) is not None
