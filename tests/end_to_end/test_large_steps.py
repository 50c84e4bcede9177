"""Steps that do not fit, as ``benchmarks/large_steps.py`` takes them: a limit ends a process; what is told of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.large_steps import judged_steps, memory_cgroup, run
from poochplan.formats.plan import Plan

MIB = 1 << 20
PLAN = Path(__file__).parents[1] / "data" / "plan-v1.json"
TAKES = "import json; print(json.dumps({'steps': ['a']}), flush=True); taken = bytearray(1 << 30)"


def test_a_process_ends_that_takes_more_addresses_than_the_limit() -> None:
    words = [sys.executable, "-c", TAKES]
    assert run(words)["printed"] == {"steps": ["a"]}
    limited = run(words, 512 * MIB)
    assert limited["exit_code"] != 0
    assert limited["error"] == "MemoryError"
    assert limited["printed"] == {}


def test_in_a_cgroup_page_cache_counts_and_a_process_that_takes_more_is_ended(tmp_path: Path) -> None:
    try:
        with memory_cgroup(512 * MIB) as folder:
            assert folder.is_dir()
    except OSError:
        pytest.skip("this process may not make a memory cgroup")
    assert not folder.exists()
    write = f"open({str(tmp_path / 'file')!r}, 'wb').write(bytes({128 * MIB}))"
    written = run([sys.executable, "-c", f"{write}; {TAKES.replace('1 << 30', '1')}"], 512 * MIB, in_cgroup=True)
    assert written["exit_code"] == 0
    assert 128 * MIB <= written["cgroup_peak_bytes"] <= 512 * MIB  # the page cache of the file
    ended = run([sys.executable, "-c", TAKES], 256 * MIB, in_cgroup=True)
    assert ended["exit_code"] == -9
    assert ended["cgroup_peak_bytes"] <= 256 * MIB


def test_planned_steps_are_judged_by_bits_budget_and_the_steps_from_an_arena() -> None:
    plan = Plan.load(PLAN)
    in_core = {"steps": ["a"] * 6, "seconds": [9.0] * 4 + [1.0, 1.2], "peak_bytes": 2 * plan.budget_bytes}
    planned = in_core | {"seconds": [9.0] * 4 + [2.0, 2.4], "peak_bytes": plan.budget_bytes}
    found = judged_steps(str(PLAN), planned, in_core)
    assert found["bitwise"]
    assert found["within_budget"]
    assert found["step_s"] == pytest.approx(2.2)
    assert found["over_in_core"] == pytest.approx(2.0)
    assert found["over_predicted"] == pytest.approx(2.2 / plan.prediction.step_s)
    other = judged_steps(str(PLAN), planned | {"steps": ["b"], "peak_bytes": plan.budget_bytes + 1}, in_core)
    assert not other["bitwise"]
    assert not other["within_budget"]
    assert judged_steps(str(PLAN), {}, in_core) == {"bitwise": False}  # they have ended
    assert "step_s" not in judged_steps(str(PLAN), planned | {"seconds": [1.0] * 4}, in_core)
