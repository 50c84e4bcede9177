"""Loops under ``poochplan.auto`` beside the same loops as they are: steps while a session rests, and whole short loops.

    OMP_NUM_THREADS=1 python -m benchmarks.at_rest [--loops "packed sequences"] [--pairs 60] [--wholes 3] [-o FILE.json]

Loops are those of ``tests/online/test_resting.py``, a small GAN that no plan fits, and one of short steps that gets a
plan. *Steps*: two of the same loop in one process, one of them in a session that rests, compared in pairs
(``benchmarks/pairs.py``), and plain ones with plain ones. *Whole loops*: 100 steps in a process of their own, plain and
under ``auto`` at its defaults with empty caches, in pairs. Their seconds are those of the wall, from before the session
to behind it, without imports and the making of the model. The loop with a plan has no steps at rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import poochplan
from benchmarks.facts import parser_of, taken
from benchmarks.pairs import Seconds, compared, in_pairs
from benchmarks.processes import answer_of
from poochplan.tensors.operators import past_first_calls
from tests.online.runs import opened
from tests.online.test_resting import LOOPS, trained
from tests.online.trainings import Training, gan

FIRST = 60
"""Turns before the pairs of steps."""
WHOLE = 100
"""Turns of a whole loop."""
PLANNED = "short steps with a plan"


def short() -> Training:
    """Steps of some 90 ms on one thread, which a budget of 70% has planned."""
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())))
    data = torch.randn(1536, 256)
    return trained(model, lambda _: model(data).square().mean())


HERE: dict[str, tuple[Callable[[], Training], str | int]] = {
    **LOOPS,
    "a GAN that nothing fits": (gan, 1000),
    PLANNED: (short, "70%"),
}
ASKED = ["packed sequences", "routed tokens", "graphs of several sizes", "a GAN that nothing fits", PLANNED]


def timed(training: Training) -> Seconds:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    training.turn(0)
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def steps_of(name: str, pairs: int) -> dict[str, Any]:
    make, budget = HERE[name]
    torch.manual_seed(0)
    plain, again, under = make(), make(), make()
    with tempfile.TemporaryDirectory() as cache, opened(under, Path(cache), budget=budget, link=None) as session:
        for turn in range(2 * FIRST):
            timed(plain)
            timed(under)
            if turn == FIRST:
                session.wait_until_planned()
        order = random.Random(0)
        found = compared(in_pairs(lambda: timed(plain), lambda: timed(under), pairs, order))
        noise = compared(in_pairs(lambda: timed(plain), lambda: timed(again), pairs, order))
        rests = session._attachment.is_resting
    return {"rests": rests, "under_over_plain": found, "plain_over_plain": noise}


def whole(name: str, *, is_under: bool) -> dict[str, Any]:
    """A whole loop in this process."""
    make, budget = HERE[name]
    past_first_calls()
    torch.manual_seed(0)
    training = make()
    start_s = time.perf_counter()
    auto = poochplan.auto(training.models, training.optimizers, budget=budget, quiet=True) if is_under else None
    with auto or contextlib.nullcontext():
        for number in range(WHOLE):
            training.turn(number)
    return {"s": time.perf_counter() - start_s, "plans": len(auto.plans) if auto else 0}


def of_a_process(name: str, *, is_under: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        return answer_of(
            "benchmarks.at_rest", ["--one", name, *(["--under"] if is_under else [])], {"XDG_CACHE_HOME": cache}
        )


def row_of(name: str, pairs: int, wholes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"loop": name}
    if pairs and name != PLANNED:
        row["steps"] = steps_of(name, pairs)
    if wholes:
        found = in_pairs(lambda: of_a_process(name, is_under=False), lambda: of_a_process(name, is_under=True), wholes)
        row["plans"] = [under["plans"] for _, under in found]
        row["whole_s"] = [[round(plain["s"], 3), round(under["s"], 3)] for plain, under in found]
    return row


def shown(row: dict[str, Any]) -> str:
    line = f"{row['loop']:32}"
    if "steps" in row:
        ratio, noise = (row["steps"][one]["cpu"] for one in ("under_over_plain", "plain_over_plain"))
        line += (
            f"  {'rests' if row['steps']['rests'] else 'DOES NOT REST'}, a step of {ratio['median_s'][0] * 1e3:.2f} ms "
        )
        line += f"takes {ratio['median_ratio']:.3f} {ratio['interval_95']} of plain (noise {noise['median_ratio']:.3f})"
    if "whole_s" in row:
        more = sorted(under - plain for plain, under in row["whole_s"])
        ratios = [under / plain for plain, under in row["whole_s"]]
        line += f"  {WHOLE} steps: plain {median(plain for plain, _ in row['whole_s']):.2f} s, "
        line += f"{median(more):+.2f} s ({more[0]:+.2f} to {more[-1]:+.2f}; {median(ratios):.2f} of plain)"
    return line


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--loops", nargs="+", choices=tuple(HERE), default=ASKED)
    parser.add_argument("--pairs", type=int, default=60, help="of steps (default: %(default)s)")
    parser.add_argument("--wholes", type=int, default=3, help="pairs of whole loops (default: %(default)s)")
    parser.add_argument("--one", choices=tuple(HERE), help=argparse.SUPPRESS)
    parser.add_argument("--under", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(whole(asked.one, is_under=asked.under)))
        return
    taken(asked, asked.loops, lambda name: row_of(name, asked.pairs, asked.wholes), shown)


if __name__ == "__main__":
    main()
