"""Steps of a compiled model with a plan inside, in bytes that torch has of the C library, as an outside hook counts.

The process is one of its own, in which the hook of ``tests/allocated_bytes.py`` is there before anything else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.runtime.served import needs_compiler

ROOT = Path(__file__).parents[2]
SCRIPT = """
    from tests.allocated_bytes import allocated_bytes
    allocated_bytes()  # before anything is allocated
    import gc, json, torch, poochplan
    from tests.compiling.small_nets import SLOW_LINK, fresh
    from tests.runtime.nets import LINK
    torch.set_num_threads(1)
    found = []
    for link in (LINK, SLOW_LINK):
        model, step, optimizer = fresh()
        plan = poochplan.compile(model, step, optimizer=optimizer, budget="85%", link=link, time_limit_s=2).plan
        peaks = []
        with poochplan.apply(plan, model, arena="off", meter="never") as session:
            for _ in range(4):
                optimizer.zero_grad(set_to_none=True)
                gc.collect()
                kinds = ("parameter", "buffer", "input", *(("optimizer_state",) if optimizer.state else ()))
                there = allocated_bytes().live - sum(plan.static_bytes[kind] for kind in kinds)
                allocated_bytes().restart()
                loss = step()
                loss.backward()
                optimizer.step()
                peaks.append(allocated_bytes().peak - there)
                del loss
        found.append({"peaks": peaks, "budget": plan.budget_bytes, "replays": len(plan.replays),
                      "in_core": plan.prediction.in_core_peak_bytes, "predicted": plan.prediction.peak_bytes,
                      "fallbacks": session.report().total.fallbacks})
        del model, step, optimizer, session
    print(json.dumps(found))
"""


@needs_compiler
@pytest.mark.cpu_device
def test_no_step_of_a_compiled_model_takes_more_than_its_budget() -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    swapping, recomputing = json.loads(done.stdout.splitlines()[-1])
    assert (swapping["replays"], recomputing["replays"] > 0) == (0, True)
    for found in (swapping, recomputing):
        assert all(peak <= found["budget"] for peak in found["peaks"]), found
        assert found["budget"] < found["in_core"] == swapping["in_core"]
        assert max(found["peaks"]) == pytest.approx(found["predicted"], rel=0.02)
        assert found["fallbacks"] == 0
