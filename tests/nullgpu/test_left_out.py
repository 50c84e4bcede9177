"""The list of tests that the null GPU leaves out is in their marks, and only shrinks."""

from __future__ import annotations

import re
from pathlib import Path

LACKS = "numerics", "cuDNN", "graphs", "Triton"
MOST = {"numerics": 4, "cuDNN": 1, "graphs": 1, "Triton": 1}
"""How many tests may be marked so. Lower a number where a mark has gone; none is to grow."""
TESTS = Path(__file__).parents[1]


def test_no_more_tests_are_left_out_than_before_and_each_says_why() -> None:
    marks = [
        (what, why)
        for path in sorted([*(TESTS / "gpu").glob("*.py"), *(TESTS / "nullgpu").glob("test_on_*.py")])
        for what, why in re.findall(r'mark\.needs\("(\w+)", "([^"]+)"\)', path.read_text(encoding="utf-8"))
    ]
    counts = {what: sum(one == what for one, _ in marks) for what in LACKS}
    assert counts == {what: MOST.get(what, 0) for what in LACKS}
    assert all(len(why.split()) >= 3 for _, why in marks)
