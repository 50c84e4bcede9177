"""Steps until a late write past the dispatcher is told, by network and kind of write.

    OMP_NUM_THREADS=1 python -m benchmarks.late_writes [--networks gru] [-o benchmarks/results/late-writes.json]

Each network has a block of ``tests/programs/late_writes.py`` in its middle, and a random plan that keeps no value. From
step 25 on the block writes. The loop does not learn, so that each step is right or wrong by itself; gradients are
compared bit by bit with those of the same loop in-core. Nothing is kept beside: checksums are compared. The bound is
the number of values that the plan releases; each loop has twice as many steps with writes, or ends after --calm steps
in which nothing was wrong or told, behind the first that was told, or behind the bound if there was none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import poochplan
from benchmarks.facts import Row, parser_of, taken
from poochplan.formats.plan import Decision
from tests.programs.late_writes import Late
from tests.runtime.nets import LINK
from tests.runtime.random_plans import random_plan

WIDTH, BEGINS = 16, 25
SWAP_AND_RECOMPUTE = (0, 1, 1)
KINDS = (
    *("data", "foreach", "numpy", "numpy view", "dlpack", "bytes", "undeclared"),
    *("fresh numpy", "fresh bytes", "fresh undeclared", "source", "parameter data"),
)


class First(nn.Module):
    """The first of what a recurrent layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(hidden)[0]
        return found


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


def _transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (_convolution, (8, 4, WIDTH, WIDTH)),
    "transformer": (_transformer, (8, 12, WIDTH)),
    "gru": (First, (8, 12, WIDTH)),
}


class Loop:
    """State: a network, its optimizer and its batch, the same each time."""

    def __init__(self, network: str, kind: str) -> None:
        torch.manual_seed(0)
        layer, shape = NETWORKS[network]
        self.late = Late(kind, WIDTH)
        self.model = nn.Sequential(layer(), layer(), self.late, layer(), layer())
        self.optimizer, self._batch = torch.optim.SGD(self.model.parameters(), lr=0.0), torch.randn(shape)

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(self._batch).square().mean()
        return found

    def step(self, number: int) -> list[torch.Tensor]:
        self.late.writes = number >= BEGINS
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return [one.grad.clone() for one in self.model.parameters() if one.grad is not None]


def plan_of(network: str) -> poochplan.Plan:
    """Before it writes, a block of each kind is the same."""
    made = Loop(network, KINDS[0])
    profile = poochplan.profile(made.loss, model=made.model, optimizer=made.optimizer, iterations=1, link=LINK)
    return random_plan(profile, 0, SWAP_AND_RECOMPUTE)


def measured(network: str, kind: str, plan: poochplan.Plan, calm: int) -> Row:
    released = sum(value.decision is not Decision.KEEP for value in plan.values)
    plain, loop, wrong, told = Loop(network, kind), Loop(network, kind), list[int](), list[int]()
    with warnings.catch_warnings(), poochplan.apply(plan, loop.model, meter="never") as session:
        warnings.simplefilter("ignore")
        for number in range(BEGINS + 2 * released + 2):
            before = session.report().total.audit_differences
            if not all(map(torch.equal, plain.step(number), loop.step(number))):
                wrong.append(number - BEGINS)
            if session.report().total.audit_differences > before:
                told.append(number - BEGINS)
            latest = max(*wrong, *told, -1, 0 if told else released)
            if calm and number - BEGINS >= latest + calm:
                break
    row: Row = {"network": network, "write": kind, "values": len(plan.values), "bound": released}
    row["steps"] = number + 1 - BEGINS
    return row | {"told_after": told[0] + 1 if told else None, "told": len(told), "wrong_steps": len(wrong)}


def rows_of(network: str, kinds: list[str], calm: int) -> list[Row]:
    plan = plan_of(network)
    return [measured(network, kind, plan, calm) for kind in kinds]


def main() -> None:
    parser = parser_of(__doc__, networks=list(NETWORKS), kinds=list(KINDS), calm=(0, "0: no loop ends early"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    taken(arguments, arguments.networks, lambda network: rows_of(network, arguments.kinds, arguments.calm))


if __name__ == "__main__":
    main()
