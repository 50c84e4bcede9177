"""The planner: makes a Plan from a Profile and a budget. It never imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from poochplan.formats.plan import Decision, Plan

if TYPE_CHECKING:
    from .planning import plan, smallest_budget
    from .whatif import for_machine

__all__ = ["Decision", "Plan", "for_machine", "plan", "smallest_budget"]


def __getattr__(name: str) -> Any:
    # Lazy, because the runtime reads plans and should not wait for a solver to load.
    home = {"plan": "planning", "smallest_budget": "planning", "for_machine": "whatif"}.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
