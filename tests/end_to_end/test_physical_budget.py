"""The budget holds in bytes that torch has of the C library, the arena whole on top, as an outside hook counts them.

Each network has a process of its own, in which the hook of ``tests/allocated_bytes.py`` is there before anything else.
``benchmarks/exactness.py`` and ``benchmarks/third_party.py`` do the same at full size.
"""

from __future__ import annotations

import json

import pytest

from tests.processes import python
from tests.runtime.served import needs_compiler

SCRIPT = """
    from tests.allocated_bytes import allocated_bytes
    allocated_bytes()  # before anything is allocated
    import gc, json, sys, torch, poochplan
    from benchmarks.arena import small_unet
    from benchmarks.hooked import train
    from poochplan.workload import load_workload
    torch.set_num_threads(1)
    small = {"batch_size": "4", "sequence_length": "64", "layers": "3", "width": "64"}
    small |= {"heads": "2", "vocabulary": "512"}
    def fresh():
        torch.manual_seed(0)
        return small_unet() if sys.argv[1] == "unet" else load_workload("configs/gpt2.toml", small).workload
    def steps(count, plan=None):
        gc.collect()
        before_bytes = allocated_bytes().live
        work = fresh()
        torch.manual_seed(1)
        given = work.model, work.step, work.optimizer, count
        if plan is None:
            return train(*given, before_bytes=before_bytes)
        with poochplan.apply(plan, work.model, arena="on") as session:
            return train(*given, session, before_bytes)
    work = fresh()
    profile = poochplan.profile(work.step, model=work.model, optimizer=work.optimizer, iterations=1)
    del work
    in_core = steps(6)
    budget = max(poochplan.smallest_budget(profile, arena="on"), int(0.6 * profile.in_core_peak_bytes))
    plan = poochplan.plan(profile, budget, arena="on", evaluations=50)
    planned = steps(6, plan)
    told = planned.facts() | {"bitwise": planned.digests == in_core.digests, "budget": plan.budget_bytes}
    print(json.dumps(told | {"in_core": max(in_core.peaks), "arenas": planned.arenas}))
"""


@needs_compiler
@pytest.mark.cpu_device
@pytest.mark.parametrize("network", ["unet", "transformer"])
def test_in_no_step_torch_has_more_than_the_budget_with_the_arena_whole(network: str) -> None:
    found = json.loads(python(SCRIPT, network).splitlines()[-1])
    assert found["bitwise"]
    assert found["arenas"][0] == 0
    assert found["arenas"][-1] > 0
    assert all(peak <= found["budget"] for peak in found["peaks"]), found
    assert all(metered <= found["budget"] for metered in found["metered_peaks"]), found
    assert found["budget"] < found["in_core"]
    assert found["large_once_learned"] == found["fallbacks"] == 0
