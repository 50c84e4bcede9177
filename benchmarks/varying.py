"""Loops whose steps vary, under ``poochplan.auto``: steps above the budget, and what steps take.

    OMP_NUM_THREADS=1 python -m benchmarks.varying [--loops layerdrop] [--seeds 0 1] [--steps 500] [-o FILE.json]

Each loop runs as it is, and from the same seeds with ``auto`` around it, in one process and with an empty cache. A
meter from outside (``tests/allocated_bytes.py``) gives the most bytes of each step; an arena counts as a whole. Counted
are steps since the first plan, and of these the ones above its budget. Step times are CPU seconds of the last turns: of
the longest path, and of all others; and what they are more than those of the same turns as they are. ``bitwise``:
whether losses and parameters are those of the plain loop.

Loops of ``tests/online/test_sizes_inside.py`` get no plan. They are given that share of the plain loop's peak in bytes,
and steps count once they are known to vary.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.facts import Row, parser_of, taken
from poochplan.units import parse_budget
from tests.allocated_bytes import allocated_bytes
from tests.online.runs import bytes_of, opened
from tests.online.test_sizes_inside import LOOPS as SIZES
from tests.online.trainings import Training, stepping
from tests.runtime.nets import Net

WIDTH, DEPTH, LAST = 64, 6, 100
WAITED_AT = 20
"""From this step on, a plan that is being made is waited for."""
PATIENCE_S = 60.0
Chance = random.Random
Made = tuple[Training, list[int]]
"""A loop, and how many blocks each of its steps has run so far."""


def training_of(block: Callable[[], nn.Module], batch: torch.Tensor, survives: Callable[[int], float]) -> Made:
    """A residual network of whose blocks each step leaves some out. ``survives``: by the number of the block."""
    chance, depths = Chance(torch.initial_seed()), list[int]()
    stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(its: Any, values: torch.Tensor) -> torch.Tensor:
        path = [number for number in range(DEPTH) if chance.random() < survives(number)]
        depths.append(len(path))
        values = its.stem(values)
        for number in path:
            values = values + its.blocks[number](values)
        result: torch.Tensor = its.head(values)
        return result

    model = Net(forward, stem=stem, blocks=nn.ModuleList(block() for _ in range(DEPTH)), head=head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return stepping(model, lambda _: model(batch).square().mean(), optimizer), depths


def mixing() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mix = mixing()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.norm(tokens)
        found: torch.Tensor = self.inner(values, values, values)[0]
        return self.mix(found)  # type: ignore[no-any-return]


def layerdrop() -> Made:
    """Each block is left out in one step of five."""
    return training_of(Attention, torch.randn(16, 32, WIDTH), lambda _: 0.8)


def stochastic_depth() -> Made:
    """Later blocks are left out more often, the last one in every other step."""
    return training_of(mixing, torch.randn(1024, WIDTH), lambda number: 1 - 0.5 * (number + 1) / DEPTH)


LOOPS: dict[str, Callable[[], Made]] = {"layerdrop": layerdrop, "stochastic depth": stochastic_depth}
INSIDE: dict[str, Callable[[], Made]] = {name: partial(lambda make: (make(), []), make) for name, make in SIZES.items()}
"""Sizes vary inside: no plan is made, and a share of the plain loop's peak is the budget in bytes."""


class Run:
    """State: of each turn the loss, the CPU seconds and the most bytes; and the budget, where a plan was in force."""

    def __init__(self, name: str, seed: int, limit_bytes: int = 0) -> None:
        self.meter = allocated_bytes()
        before_bytes = self.meter.live
        torch.manual_seed(seed)
        self.training, self.depths = (LOOPS | INSIDE)[name]()
        self._limit_bytes = limit_bytes
        self.training.model.register_forward_pre_hook(self._takes_peak)
        self.losses, self.seconds = list[float](), list[float]()
        self.peaks, self.budgets = list[int](), list[int]()
        self._before_bytes = before_bytes

    def turn(self, number: int, session: Any = None) -> None:
        self._peak_bytes, self._session = 0, session
        self.meter.restart()
        start_s = time.process_time()
        self.losses += self.training.turn(number)
        self.seconds.append(time.process_time() - start_s)
        self._takes_peak()
        self.peaks.append(self._peak_bytes)
        is_limited = self._limit_bytes and session is not None and session._keeper.limit_bytes
        planned_bytes = session.plan.budget_bytes if session is not None and session.plans else 0
        self.budgets.append(self._limit_bytes if is_limited else planned_bytes)

    def _takes_peak(self, *_: object) -> None:
        """The meter sees what lies outside an arena, which may be there from the model's call on."""
        arena_bytes = self._session._step_arena.arena_bytes if self._session is not None else 0
        self._peak_bytes = max(self._peak_bytes, self.meter.peak - self._before_bytes + arena_bytes)
        self.meter.restart()

    def ends(self) -> None:
        """Notes the state, and lets go of the model."""
        self.state = bytes_of(self.training.state())
        del self.training


def measured(name: str, seed: int, steps: int, budget: str) -> Row:
    plain = Run(name, seed)
    for number in range(steps):
        plain.turn(number)
    plain.ends()
    limit_bytes = int(parse_budget(budget, max(plain.peaks))) if name in INSIDE else 0
    under = Run(name, seed, limit_bytes)
    given = limit_bytes or budget
    with tempfile.TemporaryDirectory() as cache, opened(under.training, Path(cache), budget=given) as session:
        for number in range(steps):
            under.turn(number, session)
            if number >= WAITED_AT:
                session.wait_until_planned(PATIENCE_S)
        plan, total = session.plan, session.total
    under.ends()
    planned = [number for number, budget_bytes in enumerate(under.budgets) if budget_bytes]
    over = [under.peaks[number] / under.budgets[number] for number in planned]
    over = [share for share in over if share > 1]
    longest = max(plain.depths, default=0)
    costs = {
        which: [n for n in planned[-LAST:] if (not longest or plain.depths[n] == longest) is is_long]
        for which, is_long in (("longest", True), ("others", False))
    }
    return {
        "loop": name,
        "seed": seed,
        "planned_from": planned[0] if planned else None,
        "planned": len(planned),
        "above": len(over),
        "most": max((under.peaks[n] / under.budgets[n] for n in planned), default=None),
        "diverged": total.fallback_kinds.get("diverged", 0),
        "predicted": None if plan is None else plan.prediction.overhead,
        "of_plain": {
            which: median(under.seconds[n] / plain.seconds[n] for n in turns) - 1
            for which, turns in costs.items()
            if turns
        },
        "more_s": {
            which: median(under.seconds[n] - plain.seconds[n] for n in turns) for which, turns in costs.items() if turns
        },
        "step_s": {which: median(under.seconds[n] for n in turns) for which, turns in costs.items() if turns},
        "bitwise": under.losses == plain.losses and under.state == plain.state,
    }


def shown(row: Row) -> str:
    of_plain = ", ".join(
        f"{which} {row['step_s'][which] * 1e3:.1f} ms (+{row['more_s'][which] * 1e3:.1f} ms, {share:+.1%})"
        for which, share in row["of_plain"].items()
    )
    most = row["most"] or 0
    return (
        f"{row['loop']:18} seed {row['seed']}: planned from {row['planned_from']}, {row['planned']} steps, "
        f"{row['above']} above (most {most:.3f} of the budget), {row['diverged']} diverged; of plain: {of_plain} "
        f"(predicted {row['predicted'] or 0:+.1%}){'' if row['bitwise'] else '; OTHER BITS'}"
    )


def main() -> None:
    parser = parser_of(__doc__, seeds=(list(range(7)), "of loops and paths"), steps=500, budget="60%")
    parser.add_argument("--loops", nargs="+", choices=(*LOOPS, *INSIDE), default=tuple(LOOPS))
    arguments = parser.parse_args()
    allocated_bytes()
    torch.set_num_threads(1)
    runs = [(name, seed) for name in arguments.loops for seed in arguments.seeds]
    taken(arguments, runs, lambda one: measured(*one, arguments.steps, arguments.budget), shown)


if __name__ == "__main__":
    main()
