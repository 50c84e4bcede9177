"""Course: what the engine follows in one step, the actions by point. Courses: which one a step takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poochplan.formats.plan import Instructions, PlannedValue, PointActions
from poochplan.formats.plan_set import PlanSet, Signature, describe

_NOTHING = PointActions(at="save", index=-1)


@dataclass(frozen=True, eq=False)
class Course:
    """Instructions, ready to be followed. Changing the course is assigning another one.

    ``exact``: whether each save has to have the planned shape and bytes. Otherwise it may be smaller, so that a plan
    for larger inputs serves: no storage takes more than was planned, on the device and on the host.
    """

    instructions: Instructions
    at_save: dict[int, PointActions]
    at_use: dict[int, PointActions]
    exact: bool = True

    @classmethod
    def of(cls, instructions: Instructions, *, exact: bool = True) -> Course:
        at_save = {actions.index: actions for actions in instructions.schedule if actions.at == "save"}
        at_use = {actions.index: actions for actions in instructions.schedule if actions.at == "use"}
        return cls(instructions, at_save, at_use, exact)

    def actions_at_save(self, index: int) -> PointActions:
        return self.at_save.get(index, _NOTHING)

    def actions_at_use(self, index: int) -> PointActions:
        return self.at_use.get(index, _NOTHING)

    def why_not_save(self, index: int, tensor: torch.Tensor) -> str:
        """Why the tensor cannot be the planned value of this save point; empty when it can."""
        if index >= len(self.instructions.values):
            return f"{self._end()}: planned no further save, found {_found(tensor)}"
        planned = self.instructions.values[index]
        size_bytes = tensor.untyped_storage().nbytes()
        fits = str(tensor.dtype).removeprefix("torch.") == planned.dtype and (
            (tuple(tensor.shape), size_bytes) == (planned.shape, planned.size_bytes)
            if self.exact
            else tensor.ndim == len(planned.shape) and size_bytes <= planned.size_bytes
        )
        return "" if fits else self._instead(index, _found(tensor))

    def why_not_handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> str:
        """Why the ``ordinal``-th pack cannot be one of the value ``index`` (None: of no planned value)."""
        planned = self.instructions.handles[ordinal] if ordinal < len(self.instructions.handles) else None
        if index is not None and planned == index:
            return ""
        if planned is None:
            return f"{self._end()}: planned no further save, found {_found(tensor)}"
        also = "" if index is None else f", another save of {_named(self.instructions.values[index])}"
        return self._instead(planned, _found(tensor) + also)

    def why_not_use(self, number: int, ordinal: int, saves: int) -> str:
        """Why the unpack of handle ``ordinal`` after ``saves`` save points cannot be use point ``number``."""
        if saves < len(self.instructions.values):
            return self._instead(saves, f"that backward begins with {self._of_handle(ordinal)}")
        planned = self.instructions.uses[number] if number < len(self.instructions.uses) else None
        if planned == ordinal:
            return ""
        wanted = "none" if planned is None else self._of_handle(planned)
        return f"use point {number}: planned {wanted}, found {self._of_handle(ordinal)}"

    def _instead(self, index: int, found: str) -> str:
        value = self.instructions.values[index]
        most = "" if self.exact else "at most "
        return f"{_named(value)}: planned {most}{_shape(value)} of {value.size_bytes} bytes, found {found}"

    def _end(self) -> str:
        return (
            f"the save after {_named(self.instructions.values[-1])}" if self.instructions.values else "the first save"
        )

    def _of_handle(self, ordinal: int) -> str:
        if ordinal >= len(self.instructions.handles):
            return "nothing that was planned"
        value = self.instructions.values[self.instructions.handles[ordinal]]
        return f"{_named(value)} {_shape(value)}"


class Courses:
    """The courses of a step, or of a set of plans. Lone instructions are followed exactly, whatever the inputs are."""

    def __init__(self, given: Instructions | PlanSet) -> None:
        self._set = given if isinstance(given, PlanSet) else None
        self.instructions = tuple(plan.instructions for plan in given.plans) if isinstance(given, PlanSet) else (given,)
        self._courses = {
            (id(one), exact): Course.of(one, exact=exact) for one in self.instructions for exact in (True, False)
        }

    @property
    def first(self) -> Course:
        return self._courses[id(self.instructions[0]), True]

    @property
    def by_inputs(self) -> bool:
        """Whether the inputs of a step have to be known before its course is."""
        return self._set is not None

    def choose(self, signature: Signature) -> Course | None:
        """The course of a step with these inputs; None when no plan is large enough."""
        if self._set is None:
            return self.first
        plan = self._set.choose(signature)
        if plan is None:
            return None
        return self._courses[id(plan.instructions), sorted(plan.inputs) == sorted(signature)]

    def why_none(self, signature: Signature) -> str:
        """Why no plan of the set is for these inputs."""
        assert self._set is not None, "lone instructions are for any inputs"
        return (
            f"its inputs: expected at most {describe(self._set.largest.inputs)} "
            f"(the largest plan of {len(self._set.plans)}), "
            f"found {describe(signature)}"
        )


def _found(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} of {tensor.untyped_storage().nbytes()} bytes"


def _shape(value: PlannedValue) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _named(value: PlannedValue) -> str:
    return f"{value.name} (layer {value.layer or 'outside the model'})"
