"""plan_set: a profile and a plan for each of several shapes, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from poochplan.errors import InfeasibleError, UsageError
from poochplan.formats.plan_set import PlanSet
from poochplan.planner.arena.reserved import On, budget_bytes_of
from poochplan.planner.planning import plan
from poochplan.profiler.profiling import profile


def plan_set(
    step_for: Callable[[Any], Callable[[], torch.Tensor]],
    shapes: Iterable[Any],
    *,
    model: torch.nn.Module,
    budget: str | int | float,
    optimizer: torch.optim.Optimizer | None = None,
    time_limit_s: float = 20.0,
    evaluations: int | None = None,
    on: On | None = None,
    **options: Any,
) -> PlanSet:
    """Plans for steps of several shapes: with :func:`poochplan.apply` each step follows the plan for its inputs.

    A step with inputs of another shape follows the nearest larger plan, so include the largest shape.

    Parameters
    ----------
    step_for: called with each of ``shapes``; returns the step for it, as for :func:`poochplan.profile`: a function
        that runs forward on inputs of that shape and returns the loss.
    shapes: arguments for ``step_for``: batch sizes, lengths, tuples.
    model, optimizer: as for :func:`poochplan.profile`, which also takes ``options``. The link is measured once.
    budget: one for all shapes. A share such as ``"60%"`` is relative to the largest in-core peak.
    time_limit_s, evaluations, on: for each plan, as for :func:`poochplan.plan`.

    Raises
    ------
    UsageError
        There are no shapes, ``step_for`` returns no function, or two shapes give the same inputs of the model.
    InfeasibleError
        A shape has no plan within the budget; it names the shape.
    """
    asked = list(shapes)
    if not asked:
        raise UsageError("plan_set: expected at least one shape, found none; name those that steps come in")
    profiles = []
    for shape in asked:
        step = step_for(shape)
        if not callable(step):
            raise UsageError(
                f"plan_set: expected step_for({shape!r}) to give a function that returns the loss, found "
                f"{type(step).__name__}; return it without calling it"
            )
        profiles.append(profile(step, model=model, optimizer=optimizer, **options))
        options = {"link": profiles[0].link} | options
    budget_bytes = max(budget_bytes_of(one, budget, on) for one in profiles)
    plans = []
    for shape, one in zip(asked, profiles, strict=True):
        try:
            plans.append(plan(one, budget_bytes, time_limit_s=time_limit_s, evaluations=evaluations, on=on))
        except InfeasibleError as error:
            raise InfeasibleError(
                f"shape {shape!r}: {error}", smallest_budget_bytes=error.smallest_budget_bytes
            ) from error
    return PlanSet(plans)
