"""Faults: each of our functions that a session calls while a step runs raises once, and the loop has to go on.

Of each function, in forward, backward and between them, the first, second and fiftieth call raises. A row is one loop:
under a plan, with copies by threads too; while auto studies it; under a plan of an earlier run; and passes without
gradients from an arena. A place holds if the loop goes on with the bits of the plain one, and one line of ours tells of
the fault.

    OMP_NUM_THREADS=1 python -m benchmarks.fault_injection [--loops "planned;studied"] [--part 3/10] [-o FILE.json]

A part is one place in so many, from that one on. A file that is there gets its rows beside those that it has.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

import poochplan
from benchmarks.facts import Row, known_rows, parser_of, table_row, taken
from poochplan.formats.plan import Decision
from tests.runtime.inference.passes import KINDS
from tests.runtime.injecting import Loop, automatic, filled_cache, passes, places, plainly, planned, run
from tests.runtime.nets import CASES
from tests.runtime.random_plans import decided

LOOPS = ("planned", "planned, copies by threads", "studied", "planned by an earlier run", "passes from an arena")
CASE = CASES["residual"]
TIMES = 3
"""A place in another thread may not come in each run."""


def loops_of(name: str, folder: Path) -> tuple[Loop, Loop]:
    """The loop, and the plain one."""
    if name == "passes from an arena":
        kind = KINDS["convolutions"]
        return passes(kind, 6, poochplan.arena), passes(kind, 6, lambda _: contextlib.nullcontext())
    if name == "studied":
        return automatic(CASE, 13, None), plainly(CASE, 13)
    if name == "planned by an earlier run":
        filled_cache(CASE, folder, "75%")
        return automatic(CASE, 5, folder, "75%"), plainly(CASE, 5)
    keep, swap, recompute = Decision
    plan = decided(CASE.profile(), [swap, recompute, keep, recompute])
    if name.endswith("threads"):
        plan = msgspec.structs.replace(plan, link=msgspec.structs.replace(plan.link, throttle_bytes_per_s=1e12))
    return planned(CASE, 4, plan), plainly(CASE, 4)


def row_of(name: str, part: str) -> Row:
    first, of = map(int, part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        loop, without = loops_of(name, Path(folder))
        gc.collect()
        gc.freeze()
        plain, _ = run(without)
        run(loop)  # what is done once in a process
        seen, watch = run(loop)
        assert not plain.error
        assert not seen.why_not(plain)
        wrong, unreached = dict[str, str](), list[str]()
        every = places(watch)[first - 1 :: of]
        for place in every:
            found = next((one for _ in range(TIMES) if (one := run(loop, place)[0]).was_reached), None)
            if found is None:
                unreached.append(str(place))
            elif why := found.why_not(plain):
                wrong[str(place)] = why
                print(place, why, file=sys.stderr, flush=True)
        functions = len({(file, function) for file, function, _ in watch.calls})
    held = len(every) - len(wrong) - len(unreached)
    counted = {"functions": functions, "places": len(every), "held": held}
    return {"loop": name, "part": part, **counted, "unreached": unreached, "wrong": wrong}


def line(row: Row) -> str:
    counts = len(row["unreached"]), len(row["wrong"])
    return table_row(row["loop"], row["part"], row["functions"], row["places"], row["held"], *counts)


def main() -> int:
    torch.set_num_threads(1)
    asked = parser_of(__doc__, loops=";".join(LOOPS), part="1/1").parse_args()
    known = known_rows(asked.output)
    names = [None, *asked.loops.split(";")]
    rows = taken(asked, names, lambda name: known if name is None else [row_of(name, asked.part)], line)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
