"""The budget holds in bytes that torch has of the C library, the arena whole on top, as an outside hook counts them.

Each network has a process of its own, in which the hook of ``tests/allocated_bytes.py`` is there before anything else.
``benchmarks/exactness.py`` and ``benchmarks/third_party.py`` do the same at full size.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import python
from tests.runtime.served import needs_compiler

SCRIPT = """
    from tests.allocated_bytes import allocated_bytes
    allocated_bytes()  # before anything is allocated
    import gc, json, sys, torch, poochplan
    from benchmarks.hooked import train
    from poochplan.workload import Workload, load_workload
    from tests.runtime.nets import LINK, without_costs
    torch.set_num_threads(1)
    without_costs()
    network, arena = sys.argv[1:]
    is_bert = network.startswith("bert")
    if network == "bert, masks of bools":
        torch.nn.functional.dropout = lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]
    small = {"batch_size": "4", "layers": "3", "width": "64", "vocabulary": "512"}
    small |= {"sequence_length": "96", "heads": "4"} if is_bert else {"sequence_length": "64", "heads": "2"}
    config = "configs/bert.toml" if is_bert else "configs/gpt2.toml"
    def volumes():  # its convolutions take more inside than all that is live
        nn, widths = torch.nn, (1, 8, 8, 8, 1)
        model, batch = nn.Sequential(), torch.randn(1, 1, 24, 24, 24)
        for first, then in zip(widths, widths[1:]):
            model.extend([nn.Conv3d(first, then, 3, padding=1), nn.InstanceNorm3d(then), nn.PReLU()])
        return Workload(model, lambda: model(batch).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    def fresh():
        torch.manual_seed(0)
        return volumes() if network == "volumes" else load_workload(config, small).workload
    def steps(count, plan=None):
        gc.collect()
        before_bytes = allocated_bytes().live
        work = fresh()
        torch.manual_seed(1)
        given = work.model, work.step, work.optimizer, count
        if plan is None:
            return train(*given, before_bytes=before_bytes)
        with poochplan.apply(plan, work.model, arena=arena) as session:
            return train(*given, session, before_bytes)
    work = fresh()
    profile = poochplan.profile(work.step, model=work.model, optimizer=work.optimizer, iterations=1, link=LINK)
    del work
    in_core = steps(6)
    budget = max(poochplan.smallest_budget(profile, arena=arena), int(0.6 * profile.in_core_peak_bytes))
    options = {"evaluations": 50}
    if is_bert:
        budget, options = 0.75, {"evaluations": 300, "host_budget": 0}  # nothing can be swapped
    plan = poochplan.plan(profile, budget, arena=arena, **options)
    planned = steps(6, plan)
    told = planned.facts() | {"bitwise": planned.digests == in_core.digests, "budget": plan.budget_bytes}
    held = {str(decision): len(sizes) for decision, sizes in plan.sources(bits=True).items()}
    print(json.dumps(told | {"in_core": max(in_core.peaks), "arenas": planned.arenas, "held": held}))
"""


def steps_of(network: str, arena: str) -> dict[str, Any]:
    """What they tell: they are bitwise those in-core, within the budget."""
    found: dict[str, Any] = json.loads(python(SCRIPT, network, arena).splitlines()[-1])
    assert found["bitwise"]
    assert all(peak <= found["budget"] for peak in found["peaks"]), found
    assert found["budget"] < found["in_core"]
    assert found["fallbacks"] == 0
    return found


@needs_compiler
@pytest.mark.cpu_device
@pytest.mark.parametrize("network", ["volumes", "transformer"])
def test_in_no_step_torch_has_more_than_the_budget_with_the_arena_whole(network: str) -> None:
    found = steps_of(network, "on")
    assert found["arenas"][0] == 0
    assert found["arenas"][-1] > 0
    assert all(metered <= found["budget"] for metered in found["metered_peaks"]), found
    assert found["large_once_learned"] == 0


@needs_compiler
@pytest.mark.cpu_device
@pytest.mark.parametrize(
    ("arena", "masks"),
    [
        ("on", "numbers"),
        ("off", "bools"),
        pytest.param("off", "numbers", marks=pytest.mark.deep),
        pytest.param("on", "bools", marks=pytest.mark.deep),
    ],
)
def test_in_no_step_torch_has_more_than_the_budget_while_bits_stand_for_masks(arena: str, masks: str) -> None:
    assert steps_of(f"bert, masks of {masks}", arena)["held"]["keep"] > 0
