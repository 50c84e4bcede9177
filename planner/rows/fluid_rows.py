"""The rows of the fluid models, one group a file. docs/planner.md lists the rows and argues for them."""

from __future__ import annotations

import numpy as np

from poochplan.planner.model.fluid import FluidModel, Request
from poochplan.planner.model.slots import slots_of
from poochplan.planner.problem.problem import Problem

from .decision_rows import add_decisions
from .link_rows import add_link
from .memory_rows import add_memory
from .return_rows import add_early_returns
from .time_rows import add_time


def build_fluid_model(problem: Problem, request: Request) -> FluidModel:
    """The model that ``request`` asks for, complete."""
    sizes = problem.rounded_bytes[list(request.candidates)]
    unit = max(1.0, float(np.mean(sizes)) / 10) if len(sizes) else 1.0
    model = FluidModel(problem, request, slots_of(problem), unit, problem.step_s / 1000 or 1.0)
    add_decisions(model)
    add_early_returns(model)
    add_link(model)
    add_time(model)
    add_memory(model)
    return model
