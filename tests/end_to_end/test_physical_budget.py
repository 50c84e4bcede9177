"""The budget holds in bytes that torch has of the C library, the arena whole on top, as an outside hook counts them.

Each network has a process of its own, forked from one that has imported and has the hook of
``tests/allocated_bytes.py``, and has done nothing else.
``benchmarks/exactness.py`` and ``benchmarks/third_party.py`` do the same at full size.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import python
from tests.runtime.served import needs_compiler

SCRIPT = """
    import gc, json, sys, torch, poochplan, transformers
    from benchmarks.hooked import train
    from benchmarks.processes import in_a_process
    from poochplan.workload import Workload, load_workload
    from tests.allocated_bytes import allocated_bytes
    from tests.runtime.nets import LINK, without_costs
    transformers.GPT2LMHeadModel  # imported here
    torch.set_num_threads(1)
    without_costs()
    allocated_bytes()  # before anything is allocated
    def told(network):
        small = {"batch_size": "4", "layers": "3", "width": "64", "vocabulary": "512"}
        small |= {"sequence_length": "64", "heads": "2"}
        def volumes():  # its convolutions take more inside than all that is live
            nn, widths = torch.nn, (1, 8, 8, 8, 1)
            model, batch = nn.Sequential(), torch.randn(1, 1, 24, 24, 24)
            for first, then in zip(widths, widths[1:]):
                model.extend([nn.Conv3d(first, then, 3, padding=1), nn.InstanceNorm3d(then), nn.PReLU()])
            return Workload(model, lambda: model(batch).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
        def fresh():
            torch.manual_seed(0)
            return volumes() if network == "volumes" else load_workload("configs/gpt2.toml", small).workload
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
        profile = poochplan.profile(work.step, model=work.model, optimizer=work.optimizer, iterations=1, link=LINK)
        del work
        in_core = steps(6)
        budget = max(poochplan.smallest_budget(profile, arena="on"), int(0.6 * profile.in_core_peak_bytes))
        plan = poochplan.plan(profile, budget, arena="on", evaluations=50)
        planned = steps(6, plan)
        told = planned.facts() | {"bitwise": planned.digests == in_core.digests, "budget": plan.budget_bytes}
        return told | {"in_core": max(in_core.peaks), "arenas": planned.arenas}
    print(json.dumps([in_a_process(told, one) for one in sys.argv[1:]]))
"""


@needs_compiler
@pytest.mark.cpu_device
def test_in_no_step_torch_has_more_than_the_budget_with_the_arena_whole() -> None:
    asked = ("volumes", "transformer")
    found: list[dict[str, Any]] = json.loads(python(SCRIPT, *asked).splitlines()[-1])
    for name, told in zip(asked, found, strict=True):
        assert told["bitwise"], name
        assert all(peak <= told["budget"] for peak in told["peaks"]), (name, told)
        assert told["budget"] < told["in_core"], name
        assert told["fallbacks"] == 0, name
        assert told["arenas"][0] == 0, name
        assert told["arenas"][-1] > 0, name
        assert all(metered <= told["budget"] for metered in told["metered_peaks"]), (name, told)
        assert told["large_once_learned"] == 0, name
