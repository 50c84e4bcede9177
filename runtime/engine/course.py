"""Course: what the engine follows in one step, a plan with its actions by point. Courses: which one a step takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poochplan.formats.plan import Plan, PlannedValue, PointActions
from poochplan.formats.plan_set import PlanSet, Signature, describe

_NOTHING = PointActions(at="save", index=-1)


@dataclass(frozen=True, eq=False)
class Course:
    """A plan, ready to be followed. Changing the course is assigning another one.

    ``exact``: whether each save has to have the planned shape and bytes. Otherwise it may be smaller, so that a plan
    for larger inputs serves: no storage takes more than was planned, on the device and on the host.
    """

    plan: Plan
    at_save: dict[int, PointActions]
    at_use: dict[int, PointActions]
    exact: bool = True

    @classmethod
    def of(cls, plan: Plan, *, exact: bool = True) -> Course:
        at_save = {actions.index: actions for actions in plan.schedule if actions.at == "save"}
        at_use = {actions.index: actions for actions in plan.schedule if actions.at == "use"}
        return cls(plan, at_save, at_use, exact)

    def actions_at_save(self, index: int) -> PointActions:
        return self.at_save.get(index, _NOTHING)

    def actions_at_use(self, index: int) -> PointActions:
        return self.at_use.get(index, _NOTHING)

    def why_not_save(self, index: int, tensor: torch.Tensor) -> str:
        """Why the tensor cannot be the planned value of this save point; empty when it can."""
        if index >= len(self.plan.values):
            return f"{self._end()}: planned no further save, found {_found(tensor)}"
        planned = self.plan.values[index]
        size_bytes = tensor.untyped_storage().nbytes()
        fits = str(tensor.dtype).removeprefix("torch.") == planned.dtype and (
            (tuple(tensor.shape), size_bytes) == (planned.shape, planned.size_bytes)
            if self.exact
            else tensor.ndim == len(planned.shape) and size_bytes <= planned.size_bytes
        )
        return "" if fits else self._instead(index, _found(tensor))

    def why_not_handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> str:
        """Why the ``ordinal``-th pack cannot be one of the value ``index`` (None: of no planned value)."""
        planned = self.plan.handles[ordinal] if ordinal < len(self.plan.handles) else None
        if index is not None and planned == index:
            return ""
        if planned is None:
            return f"{self._end()}: planned no further save, found {_found(tensor)}"
        also = "" if index is None else f", another save of {_named(self.plan.values[index])}"
        return self._instead(planned, _found(tensor) + also)

    def why_not_use(self, number: int, ordinal: int, saves: int) -> str:
        """Why the unpack of handle ``ordinal`` after ``saves`` save points cannot be use point ``number``."""
        if saves < len(self.plan.values):
            return self._instead(saves, f"that backward begins with {self._of_handle(ordinal)}")
        planned = self.plan.uses[number] if number < len(self.plan.uses) else None
        if planned == ordinal:
            return ""
        wanted = "none" if planned is None else self._of_handle(planned)
        return f"use point {number}: planned {wanted}, found {self._of_handle(ordinal)}"

    def _instead(self, index: int, found: str) -> str:
        value = self.plan.values[index]
        most = "" if self.exact else "at most "
        return f"{_named(value)}: planned {most}{_shape(value)} of {value.size_bytes} bytes, found {found}"

    def _end(self) -> str:
        return f"the save after {_named(self.plan.values[-1])}" if self.plan.values else "the first save"

    def _of_handle(self, ordinal: int) -> str:
        if ordinal >= len(self.plan.handles):
            return "nothing that was planned"
        value = self.plan.values[self.plan.handles[ordinal]]
        return f"{_named(value)} {_shape(value)}"


class Courses:
    """The courses of one plan, or of a set of plans. A lone plan is followed exactly, whatever the inputs are."""

    def __init__(self, plans: Plan | PlanSet) -> None:
        self._set = plans if isinstance(plans, PlanSet) else None
        self.plans = plans.plans if isinstance(plans, PlanSet) else (plans,)
        self._courses = {
            (id(plan), exact): Course.of(plan, exact=exact) for plan in self.plans for exact in (True, False)
        }

    @property
    def first(self) -> Course:
        return self._courses[id(self.plans[0]), True]

    @property
    def by_inputs(self) -> bool:
        """Whether the inputs of a step have to be known before its course is."""
        return self._set is not None

    def choose(self, signature: Signature) -> Course | None:
        """The course of a step with these inputs; None when no plan is large enough."""
        if self._set is None:
            return self.first
        plan = self._set.choose(signature)
        return None if plan is None else self._courses[id(plan), sorted(plan.inputs) == sorted(signature)]

    def why_none(self, signature: Signature) -> str:
        """Why there is no course for these inputs."""
        largest = self._set.largest if self._set is not None else self.plans[0]
        return (
            f"its inputs: expected at most {describe(largest.inputs)} (the largest plan of {len(self.plans)}), "
            f"found {describe(signature)}"
        )


def _found(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} of {tensor.untyped_storage().nbytes()} bytes"


def _shape(value: PlannedValue) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _named(value: PlannedValue) -> str:
    return f"{value.name} (layer {value.layer or 'outside the model'})"
