"""What a meter from outside sees of served passes: what lies outside the arena, and no more."""

from __future__ import annotations

import functools
import json

import pytest

from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from tests.processes import python
from tests.runtime.inference.passes import KINDS
from tests.runtime.served import needs_compiler

pytestmark = [pytest.mark.cpu_device, needs_compiler]
_METERED = """
import json
import torch
from tests.allocated_bytes import allocated_bytes
meter = allocated_bytes()  # before the package's allocator, which asks it for what lies in no arena
import poochplan
from tests.runtime.inference.passes import KINDS, SETTLED, leaves
torch.set_num_threads(1)
def peak(model, batch):
    before = meter.live
    meter.restart()
    result = leaves(model(batch))
    return meter.peak - before, sum(one.untyped_storage().nbytes() for one in result.values())
found = {}
for name, kind in KINDS.items():
    model, batch = kind.fresh()
    with torch.no_grad():
        plain, result = [peak(model, batch) for _ in range(3)][-1]
        with poochplan.arena(model) as arena:
            served = max([peak(model, batch)[0] for _ in range(SETTLED + 3)][SETTLED:])
        report = arena.report()
    found[name] = {"plain": plain, "result": result, "outside": served, "arena": report.size_bytes}
    found[name]["live"] = report.live_bytes
print(json.dumps(found))
"""


@functools.cache
def _metered() -> dict[str, dict[str, int]]:
    """Peaks of passes of each kind, in a process of its own."""
    return dict(json.loads(python(_METERED).splitlines()[-1]))


@pytest.mark.parametrize("name", KINDS)
def test_a_served_pass_takes_its_arena_its_result_and_small_blocks(name: str) -> None:
    found = _metered()[name]
    small_bytes = 16 * LEAST_PLACED_BYTES
    assert found["outside"] <= found["result"] + small_bytes < found["plain"]
    above_bytes = found["arena"] - found["live"]
    assert found["arena"] + found["outside"] <= found["plain"] + above_bytes + found["result"] + small_bytes
