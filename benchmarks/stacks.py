"""Training stacks under ``auto``: lines that a user adds, bits, and the budget by a meter from outside.

    python -m benchmarks.stacks [--only NAME ...] [--share 0.6] [-o FILE.json]

Each stack trains for 20 turns as it is, and again with ``auto`` around it at a share of the in-core peak that was
measured first, data sets and copies of the model included. Where no plan fits, the smallest budget that is named is
tried in its place, and the row says so.
"""

from __future__ import annotations

import gc
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.facts import parser_of, taken
from benchmarks.stack_frameworks import LIBRARIES, run_library
from tests.online.networks import NETWORKS
from tests.online.runs import Run, run_auto, run_plain
from tests.online.trainings import TRAININGS
from tests.torchrun import TORCHRUN, torchrun

LOOPS = {**TRAININGS, **NETWORKS}
RANKS = "data_parallel"
STACKS = (*LOOPS, *LIBRARIES, RANKS)
LINES = dict.fromkeys(STACKS, 2)
"""Of poochplan: the import, and ``with auto(...)`` or the callback."""


@dataclass(frozen=True)
class Row:
    """One stack. ``verdict``: ``kept``; ``refused`` at the share, but kept at the smallest budget named; ``over``."""

    stack: str
    lines: int
    bitwise: bool
    in_core_bytes: int
    budget_bytes: int
    peak_bytes: int
    is_planned: bool
    followed: int
    """So many segments began under a plan."""
    fallbacks: int
    verdict: str
    said: str


def measured(name: str, share: float) -> Row:
    if name == RANKS:
        return ranks_row()
    plain = run_plain(LOOPS[name]) if name in LOOPS else run_library(name, None)
    budget_bytes, refused = int(plain.peak_bytes * share), ""
    found, said = _tried(name, budget_bytes)
    smallest = [int(number) for text in said for number in re.findall(r"smallest possible is (\d+) bytes", text)]
    if smallest:
        budget_bytes, refused = int(max(smallest) * 1.02), f"smallest possible {max(smallest)}"
        found, said = _tried(name, budget_bytes)
    assert found.session is not None
    return Row(
        stack=name,
        lines=LINES[name],
        bitwise=found.equals(plain),
        in_core_bytes=plain.peak_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        is_planned=found.session.plan is not None,
        followed=found.session.report().steps_followed,
        fallbacks=found.session.total.fallbacks,
        verdict="over" if found.peak_bytes > budget_bytes else "refused" if refused else "kept",
        said="; ".join(filter(None, [refused, *said])),
    )


def _tried(name: str, budget_bytes: int) -> tuple[Run, list[str]]:
    gc.collect()
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        if name in LOOPS:
            run = run_auto(LOOPS[name], budget_bytes, Path(cache), time_limit_s=2)
        else:
            run = run_library(name, {"budget": budget_bytes, "cache": cache, "time_limit_s": 2, "quiet": True})
    return run, [str(one.message) for one in caught if "poochplan" in str(one.message)]


def ranks_row() -> Row:
    """Two processes; the budget is that of the test, 70%. Bytes are those of the rank that took the most."""
    with tempfile.TemporaryDirectory() as folder:
        found = torchrun("tests.examples.ranks", Path(folder), "ddp", launcher=TORCHRUN)
    worst = max(found, key=lambda facts: facts["peak_bytes"])
    return Row(
        stack=RANKS,
        lines=LINES[RANKS],
        bitwise=all(one["planned"] == one["plain"] for one in found),
        in_core_bytes=worst["plain_bytes"],
        budget_bytes=worst["budget_bytes"],
        peak_bytes=worst["peak_bytes"],
        is_planned=all(one["plan"] == found[0]["plan"] and one["plan"] for one in found),
        followed=min(one["followed"] for one in found),
        fallbacks=sum(one["fallbacks"] for one in found),
        verdict="over" if worst["peak_bytes"] > worst["budget_bytes"] else "kept",
        said="",
    )


def main() -> None:
    parser = parser_of(__doc__, share=0.6)
    parser.add_argument("--only", nargs="*", choices=STACKS)
    asked = parser.parse_args()
    packages = ("torch", "transformers", "peft", "accelerate", "lightning", "monai")
    taken(asked, asked.only or STACKS, lambda name: asdict(measured(name, asked.share)), packages=packages)


if __name__ == "__main__":
    main()
