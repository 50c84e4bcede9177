"""Steps that get no plan under ``poochplan.auto``, beside those of the same loop as it is: what a rest costs.

    OMP_NUM_THREADS=1 python -m benchmarks.at_rest [--loops "packed sequences"] [--pairs 60] [-o FILE.json]

Loops are those of ``tests/online/test_resting.py``. Of each there are two in one process, one of them in a session.
First come as many turns as make a session rest; what these take more than the plain ones is told in CPU seconds. Then
turns of both are compared in pairs (``benchmarks/pairs.py``), and plain ones with plain ones.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import facts_of_run, parser_of, write_results
from benchmarks.pairs import Seconds, compared, in_pairs
from tests.online.runs import opened
from tests.online.test_resting import LOOPS
from tests.online.trainings import Training

FIRST = 60
"""Turns before the pairs."""


def timed(training: Training) -> Seconds:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    training.turn(0)
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def measured(name: str, pairs: int) -> dict[str, Any]:
    make, budget = LOOPS[name]
    torch.manual_seed(0)
    plain, again, under = make(), make(), make()
    plain_s = sum(timed(plain)[1] for _ in range(FIRST))
    with tempfile.TemporaryDirectory() as cache, opened(under, Path(cache), budget=budget, link=None) as session:
        under_s = sum(timed(under)[1] for _ in range(FIRST))
        session.wait_until_planned()
        for _ in range(FIRST):
            timed(under)
        order = random.Random(0)
        found = compared(in_pairs(lambda: timed(plain), lambda: timed(under), pairs, order))
        noise = compared(in_pairs(lambda: timed(plain), lambda: timed(again), pairs, order))
        rests = session._attachment.is_resting
    return {"rests": rests, "first_s": under_s - plain_s, "under_over_plain": found, "plain_over_plain": noise}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--loops", nargs="+", choices=tuple(LOOPS), default=tuple(LOOPS))
    parser.add_argument("--pairs", type=int, default=60)
    arguments = parser.parse_args()
    rows = {name: measured(name, arguments.pairs) for name in arguments.loops}
    for name, row in rows.items():
        ratio, noise = (row[one]["cpu"] for one in ("under_over_plain", "plain_over_plain"))
        print(
            f"{name:32}  {'rests' if row['rests'] else 'DOES NOT REST'}  first {FIRST} turns +{row['first_s']:.2f} s, "
            f"then {ratio['median_ratio']:.3f} {ratio['interval_95']} of plain (noise {noise['median_ratio']:.3f}), "
            f"{ratio['median_s'][0] * 1e3:.2f} ms"
        )
    write_results(arguments.output, facts_of_run(arguments) | {"rows": rows})


if __name__ == "__main__":
    main()
