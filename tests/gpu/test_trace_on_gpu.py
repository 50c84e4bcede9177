"""A traced step on CUDA: copies on their own streams, waits and replays on the compute stream, one axis of time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from poochplan.formats.plan import Decision
from poochplan.report.timeline import write_trace
from poochplan.tracing import traced_step
from poochplan.workload import Workload
from tests.cli.trace_reader import read_trace
from tests.gpu.cases import ABOUT_CUDA, CASES
from tests.runtime.random_plans import random_plan

pytestmark = ABOUT_CUDA


def build() -> Workload:
    return Workload(*CASES["residual"].fresh())


def test_the_trace_has_each_planned_copy_on_its_link_and_replays_beside_them(tmp_path: Path) -> None:
    plan = random_plan(CASES["residual"].profile(), 3, (1, 1, 1))
    traced = traced_step(build, plan)
    trace = read_trace(write_trace(traced, tmp_path / "trace.json"))
    swapped = Counter(value.name for value in plan.values if value.decision is Decision.SWAP)
    assert swapped
    assert Counter(one.of for one in trace.tracks["out-link"]) == swapped
    assert {one.of for one in trace.tracks["in-link"]} <= set(swapped)
    assert [one.name for one in trace.tracks["step"]] == ["forward", "backward", "optimizer"]
    assert {"stall", "replay"} <= {one.name for one in trace.tracks["compute"]}
    assert max(size for _, size in trace.counters["live bytes"]) == traced.memory.peak_bytes > 0
    assert trace.other["fallbacks"] == 0
