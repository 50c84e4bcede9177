"""Sessions whose steps are served from an arena: plans with room for one, and steps under them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.arena.library import library, why_unavailable
from poochplan.runtime.run_report import ArenaReport
from poochplan.runtime.session import Session
from tests.runtime import nets
from tests.runtime.nets import CASES
from tests.runtime.random_plans import decided

SETTLED = 4
"""So many steps are metered, or written down: those behind them are served."""
needs_compiler = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "there is a compiler")
NO_INDUCTOR = why_unavailable() or (" " in torch.__file__ and f"Inductor splits the path {torch.__file__} at its space")
needs_inductor = pytest.mark.skipif(bool(NO_INDUCTOR), reason=NO_INDUCTOR or "Inductor makes code")
"""Not for Inductor's other backends, which make no C++."""
WISHES = {
    "keep": (Decision.KEEP,),
    "swap": (Decision.SWAP,),
    "recompute": (Decision.RECOMPUTE,),
    "mixed": (Decision.RECOMPUTE, Decision.SWAP, Decision.KEEP),
}


@functools.cache
def plan_of(name: str, kind: str = "mixed") -> Plan:
    """For a case: values are decided so in turn, where they can be; the budget has room for any arena."""
    with torch.random.fork_rng(devices=[]):  # made by the first who asks, between steps that draw numbers
        return decided(CASES[name].profile(), WISHES[kind])


class Loop(nets.Loop):
    """One whose steps an arena may serve."""

    def steps(self, count: int = SETTLED) -> None:
        for _ in range(count):
            self.step()

    @property
    def arena(self) -> ArenaReport:
        """Of the session's last step; there is an arena."""
        assert self.session is not None
        found = self.session.report().arena
        assert found is not None
        return found

    @property
    def is_served_whole(self) -> bool:
        """Whether the last step was served, and nothing of it lay outside against the layout."""
        found = self.arena
        return found.served > 0 and not found.missed and not found.unserved


@contextmanager
def served(name: str, plan: Plan | None = None, **options: object) -> Iterator[Loop]:
    """A loop in a session, with steps behind it that have it served."""
    loop = Loop(CASES[name])
    with poochplan.apply(plan or plan_of(name), loop.model, arena="on", **options) as session:  # type: ignore[arg-type]
        loop.session = session
        loop.steps()
        yield loop


def plain(name: str, steps: int) -> Loop:
    """The same without a session."""
    loop = Loop(CASES[name])
    loop.steps(steps)
    return loop


def follow(session: Session, plan: Plan) -> None:
    """Steps follow this plan from now on."""
    session._source.replace("", plan)


def arenas_mapped() -> int:
    """Arenas of this process that have their memory."""
    return library().arenas_mapped()


def largest_output(model: nn.Module) -> tuple[list[torch.Tensor], torch.utils.hooks.RemovableHandle]:
    """A list to which each call adds what the first convolution or linear layer gives, and how to stop that."""
    kept: list[torch.Tensor] = []
    layer = next(one for one in model.modules() if isinstance(one, nn.Conv2d | nn.Linear))
    return kept, layer.register_forward_hook(lambda _, __, output: kept.append(output))
