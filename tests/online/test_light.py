"""A training loop under ``auto`` loads no solver, no tables and no compiler: planning is another process's."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import python

HEAVY = ("highspy", "matplotlib", "numba", "pandas", "pulp", "scipy", "sympy", "torch._dynamo", "torch._inductor")
LOOP = """
import json, sys
import torch
from torch import nn
import poochplan
from poochplan.formats.profile import preset_link

class Descent(torch.optim.Optimizer):
    # Without add_param_group and zero_grad of torch's own, which load the compiler to hide from it.
    def add_param_group(self, group):
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=1e-3)
            parameter.grad = None

def loads():
    return [name for name in json.loads(sys.argv[1]) if name in sys.modules]

layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.1, batch_first=True)
model, rows = nn.TransformerEncoder(layer, 2), torch.randn(16, 32, 64)
optimizer = Descent([{"params": list(model.parameters())}], {})

def turn():
    model(rows).square().mean().backward()
    optimizer.step()

turn()
before, found = loads(), {}
options = {"cache": sys.argv[2], "link": preset_link("pcie3"), "time_limit_s": 0.5, "quiet": True}
with poochplan.auto(model, optimizer, budget="70%", **options) as session:
    found["entered"] = loads()
    for _ in range(30):
        turn()
        if session.plan is None:
            session.wait_until_planned(120)
    found["followed"] = loads()
found["ended"] = loads()
print(json.dumps({"before": before, "found": found, "followed": session.report().steps_followed}))
"""


def test_a_loop_loads_nothing_heavy_from_its_first_step_through_its_plan(tmp_path: Path) -> None:
    told = json.loads(python(LOOP, json.dumps(HEAVY), tmp_path))
    assert not {"torch._dynamo", "torch._inductor"} & set(told["before"])  # else the rest says nothing of them
    assert told["followed"] > 0
    assert told["found"] == dict.fromkeys(("entered", "followed", "ended"), told["before"])
