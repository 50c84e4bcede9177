"""A BERT whose plan holds the bits of dropout masks is within its budget, as a hook outside the package counts."""

from __future__ import annotations

import json

import pytest

from tests.processes import python
from tests.runtime.served import needs_compiler

SCRIPT = """
    from tests.allocated_bytes import allocated_bytes
    allocated_bytes()  # before anything is allocated
    import gc, json, sys, torch, poochplan
    from benchmarks.hooked import train
    from poochplan.workload import load_workload
    torch.set_num_threads(1)
    if sys.argv[2] == "bools":
        torch.nn.functional.dropout = lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]
    small = {"batch_size": "4", "sequence_length": "96", "layers": "3", "width": "64"}
    small |= {"heads": "4", "vocabulary": "512"}
    def fresh():
        torch.manual_seed(0)
        return load_workload("configs/bert.toml", small).workload
    def steps(count, plan=None):
        gc.collect()
        before_bytes = allocated_bytes().live
        work = fresh()
        torch.manual_seed(1)
        given = work.model, work.step, work.optimizer, count
        if plan is None:
            return train(*given, before_bytes=before_bytes)
        with poochplan.apply(plan, work.model, arena=sys.argv[1]) as session:
            return train(*given, session, before_bytes)
    work = fresh()
    profile = poochplan.profile(work.step, model=work.model, optimizer=work.optimizer, iterations=1)
    del work
    in_core = steps(6)
    options = {"arena": sys.argv[1], "evaluations": 300, "host_budget": 0}  # nothing can be swapped
    plan = poochplan.plan(profile, 0.75, **options)
    planned = steps(6, plan)
    told = planned.facts() | {"bitwise": planned.digests == in_core.digests, "budget": plan.budget_bytes}
    held = {str(decision): len(sizes) for decision, sizes in plan.sources(bits=True).items()}
    print(json.dumps(told | {"in_core": max(in_core.peaks), "held": held}))
"""


@needs_compiler
@pytest.mark.cpu_device
@pytest.mark.parametrize("arena", ["on", "off"])
@pytest.mark.parametrize("masks", ["numbers", "bools"])
def test_in_no_step_torch_has_more_than_the_budget_while_bits_stand_for_masks(arena: str, masks: str) -> None:
    found = json.loads(python(SCRIPT, arena, masks).splitlines()[-1])
    assert found["held"]["keep"] > 0
    assert found["bitwise"]
    assert all(peak <= found["budget"] for peak in found["peaks"]), found
    assert found["budget"] < found["in_core"]
    assert found["fallbacks"] == 0
