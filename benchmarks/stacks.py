"""Training stacks under ``auto``: lines that a user adds, bits, and the budget by a meter from outside.

    python -m benchmarks.stacks -o benchmarks/results/stacks.json [--only NAME ...] [--share 0.6]

Each stack trains for 20 turns as it is, and again with ``auto`` around it at a share of the in-core peak that was
measured first, data sets and copies of the model included. Where no plan fits, the smallest budget that is named is
tried in its place, and the row says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.online.frameworks import FRAMEWORKS

from benchmarks.facts import facts
from tests.online.networks import NETWORKS
from tests.online.runs import Run, run_auto, run_plain
from tests.online.trainings import TRAININGS, Training

STACKS: dict[str, tuple[Callable[[], Training], int]] = {
    **{name: (make, 1) for name, make in TRAININGS.items()},
    **{name: (make, 1) for name, make in NETWORKS.items()},
    **{name: (make, 1) for name, make in FRAMEWORKS.items()},
}
"""What is trained, and the lines that are added: ``with auto(...)``, or a callback in a list and its import."""


@dataclass(frozen=True)
class Row:
    """One stack. ``verdict``: ``kept``; ``refused`` at the share, and the smallest budget that was named kept; ``over``."""

    stack: str
    lines: int
    bitwise: bool
    in_core_bytes: int
    budget_bytes: int
    peak_bytes: int
    planned_at: int | None
    fallbacks: int
    verdict: str
    said: str


def measured(name: str, share: float) -> Row:
    """The row of one stack."""
    make, lines = STACKS[name]
    plain = run_plain(make)
    budget_bytes, refused = int(plain.peak_bytes * share), ""
    found, said = _tried(make, budget_bytes)
    smallest = [int(number) for text in said for number in re.findall(r"smallest possible is (\d+) bytes", text)]
    if smallest:
        budget_bytes, refused = int(max(smallest) * 1.02), f"smallest possible {max(smallest)}"
        found, said = _tried(make, budget_bytes)
    verdict = "over" if found.peak_bytes > budget_bytes else "refused" if refused else "kept"
    assert found.session is not None
    return Row(
        stack=name,
        lines=lines,
        bitwise=found.equals(plain),
        in_core_bytes=plain.peak_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        planned_at=found.planned_at,
        fallbacks=found.session.total.fallbacks,
        verdict=verdict,
        said="; ".join(filter(None, [refused, *said])),
    )


def _tried(make: Callable[[], Training], budget_bytes: int) -> tuple[Run, list[str]]:
    gc.collect()
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        run = run_auto(make, budget_bytes, Path(cache), time_limit_s=2)
    return run, [str(one.message) for one in caught if "poochplan" in str(one.message)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(STACKS), default=list(STACKS))
    parser.add_argument("--share", type=float, default=0.6)
    asked = parser.parse_args()
    rows = []
    for name in asked.only:
        rows.append(measured(name, asked.share))
        print(json.dumps(asdict(rows[-1])), flush=True)
    asked.o.write_text(json.dumps({**facts(), "share": asked.share, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
