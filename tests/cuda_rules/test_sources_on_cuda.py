"""On CUDA too a plan holds sources in place of their larger copies, with the bits and bytes that it says."""

from __future__ import annotations

import pytest

from poochplan.formats.plan import Decision
from poochplan.formats.sources import sources_of
from tests.cuda_rules.machine import WHERE, Machine
from tests.runtime.narrow_nets import casts_on
from tests.runtime.nets import followed, metered_peaks, train
from tests.runtime.random_plans import held, planned, problem_of


@pytest.mark.parametrize("decision", Decision)
@pytest.mark.parametrize("name", casts_on(WHERE))
def test_a_source_is_held_swapped_or_replayed_in_place_of_its_copy(gpu: Machine, name: str, decision: Decision) -> None:
    case = casts_on(WHERE)[name]
    assert len(sources_of(case.profile())) >= 4
    plan, found = planned(case, held(problem_of(case), decision))
    followed(case, plan, 3, wanted=train(case, 3)[0])
    assert metered_peaks(case, plan)[1] <= found.simulation.peak_bytes
