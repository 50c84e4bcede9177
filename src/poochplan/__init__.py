"""poochplan: train a network that does not fit, by a measured plan of what to keep, swap and recompute.

>>> profile = poochplan.profile(step, model=model, optimizer=optimizer)
>>> plan = poochplan.plan(profile, budget="60%")
>>> with poochplan.apply(plan, model) as session:
...     loss = step(); loss.backward(); optimizer.step()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    AllocatorError,
    AuditError,
    BudgetExceededError,
    DivergenceError,
    GapError,
    InfeasibleError,
    InputFileError,
    ModelMismatchError,
    NativeError,
    OutputExistsError,
    PoochError,
    SolverError,
    SpillError,
    StepError,
    UsageError,
)

if TYPE_CHECKING:
    from poochplan.formats.plan import Plan
    from poochplan.formats.plan_set import PlanSet
    from poochplan.formats.profile import Profile
    from poochplan.planner.planning import plan, smallest_budget
    from poochplan.profiler.profiling import profile
    from poochplan.runtime.applying import apply
    from poochplan.runtime.session import Session

    from .compiling.compile import compile
    from .fitting.fit import fit
    from .online.auto import auto
    from .peak import explain_peak
    from .plan_sets import plan_set
    from .sessions import arena
    from .workload import Workload

__version__ = "0.2.0"
__all__ = [
    "AllocatorError",
    "AuditError",
    "BudgetExceededError",
    "DivergenceError",
    "GapError",
    "InfeasibleError",
    "InputFileError",
    "ModelMismatchError",
    "NativeError",
    "OutputExistsError",
    "Plan",
    "PlanSet",
    "PoochError",
    "Profile",
    "Session",
    "SolverError",
    "SpillError",
    "StepError",
    "UsageError",
    "Workload",
    "apply",
    "arena",
    "auto",
    "compile",
    "explain_peak",
    "fit",
    "plan",
    "plan_set",
    "profile",
    "smallest_budget",
]

# Loaded on first use: planning needs no torch, and torch takes seconds to import.
_HOMES = {
    "Plan": ".formats.plan",
    "PlanSet": ".formats.plan_set",
    "Profile": ".formats.profile",
    "Session": ".runtime.session",
    "Workload": ".workload",
    "apply": ".runtime.applying",
    "compile": ".compiling.compile",
    "arena": ".sessions",
    "auto": ".online.auto",
    "explain_peak": ".peak",
    "fit": ".fitting.fit",
    "plan": ".planner.planning",
    "plan_set": ".plan_sets",
    "profile": ".profiler.profiling",
    "smallest_budget": ".planner.planning",
}


_WIRED = {"apply": ".sessions"}
"""Names that another module wraps, because the runtime does not know the planner."""
_CALLBACKS = {"LightningCallback": ".integrations.lightning", "TransformersCallback": ".integrations.hf"}
"""Each module's ``PlanCallback``. Their libraries may not be installed, so ``import *`` leaves them out."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_WIRED.get(name, _HOMES[name]), __name__), name)
    if name in _CALLBACKS:
        return importlib.import_module(_CALLBACKS[name], __name__).PlanCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
