"""On CUDA too a plan holds indices and casts in fewer bytes, which one op of torch makes: the bits and bytes are those
of the plan, and the host waits for nothing.
"""

from __future__ import annotations

import pytest
import torch

from poochplan.formats.narrow import masks_of
from poochplan.formats.plan import Decision
from poochplan.runtime.replays.fewer_bytes import DTYPES, narrow, widen
from poochplan.tensors.storages import on_whole
from tests.cuda_rules.machine import WHERE, Machine
from tests.cuda_rules.streams import Stream
from tests.planner.checker import check
from tests.runtime.narrow_nets import NAMES, forms_on
from tests.runtime.nets import followed, metered_peaks, train
from tests.runtime.random_plans import held, planned, problem_of

KEEP, SWAP, _ = Decision
CASES = forms_on(WHERE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_what_is_held_in_fewer_bytes_comes_back_as_it_was(gpu: Machine, name: str, decision: Decision) -> None:
    case = CASES[name]
    assert len(masks_of(case.profile())) == len(NAMES[name])
    plan, found = planned(case, held(problem_of(case), decision))
    assert [value.dtype for value in plan.values if value.bits] == NAMES[name]
    assert followed(case, plan, 3, wanted=train(case, 3)[0]).last_step.replayed_values >= len(NAMES[name])
    assert metered_peaks(case, plan)[1] <= found.simulation.peak_bytes
    assert check(case.profile(), plan).peak_bytes == found.simulation.peak_bytes


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("count", [1, 1023, 70000])
def test_narrowing_and_widening_take_no_memory_besides_and_wait_for_nothing(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, form: str, count: int
) -> None:
    patterns = torch.arange(count).to(torch.int16)
    most = {"uint8": 1 << 8, "uint16": 1 << 16, "int32": 1 << 31}.get(form, 1)
    whole = (torch.arange(count) * 46337 % most).to(WHERE)
    if form == "bfloat16":
        whole = patterns.view(torch.bfloat16).to(WHERE).float()
    waits = list[Stream]()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "synchronise", waits.append)
        before_bytes = gpu.memory.now["requested_bytes"]
        gpu.memory.begin_peaks()
        made = narrow(whole.untyped_storage(), form)
        assert made is not None
        assert gpu.memory.peaks["requested_bytes"] - before_bytes <= -(-made.nbytes() // 512) * 512
        before_bytes = gpu.memory.now["requested_bytes"]
        gpu.memory.begin_peaks()
        back = widen(on_whole(made, torch.uint8), count, form)
        assert gpu.memory.peaks["requested_bytes"] - before_bytes <= -(-whole.nbytes // 512) * 512
    assert waits == []
    integer = torch.int32 if form == "bfloat16" else torch.int64
    assert torch.equal(back.view(integer), whole.view(integer))
