"""Course: instructions, ready to be followed point by point, and what tells a step that is not the planned one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import Instructions, PlannedValue, PointActions


@dataclass(frozen=True, eq=False)
class Course:
    """Instructions with their actions by point.

    ``exact``: whether each save has to have the planned shape and bytes. Otherwise it may be smaller, so that a plan
    for larger inputs serves: no storage takes more than was planned, on the device and on the host.
    """

    instructions: Instructions
    at_save: tuple[PointActions | None, ...]
    at_use: tuple[PointActions | None, ...]
    dtypes: tuple[torch.dtype, ...]
    """Of the values."""
    last_handles: tuple[int, ...]
    """Of each value the handle that is made last, or -1 where it has but one."""
    exact: bool = True

    @classmethod
    def of(cls, instructions: Instructions, *, exact: bool = True) -> Course:
        """Raises ``UsageError`` where torch has no such dtype as a value is said to have."""
        at_save = {actions.index: actions for actions in instructions.schedule if actions.at == "save"}
        at_use = {actions.index: actions for actions in instructions.schedule if actions.at == "use"}
        return cls(
            instructions,
            tuple(map(at_save.get, range(len(instructions.values)))),
            tuple(map(at_use.get, range(len(instructions.uses)))),
            tuple(_dtype(number, value) for number, value in enumerate(instructions.values)),
            _last_handles(instructions),
            exact,
        )

    def why_not_save(self, index: int, tensor: torch.Tensor) -> str:
        """Why the tensor cannot be the planned value of this save point; empty when it can."""
        if index >= len(self.instructions.values):
            return self._beyond(tensor)
        planned = self.instructions.values[index]
        size_bytes = tensor.untyped_storage().nbytes()
        fits = tensor.dtype is self.dtypes[index] and (
            size_bytes == planned.size_bytes and tensor.shape == planned.shape
            if self.exact
            else tensor.ndim == len(planned.shape) and size_bytes <= planned.size_bytes
        )
        return "" if fits else self._instead(index, _found(tensor))

    def why_not_handle(self, ordinal: int, index: int | None, tensor: torch.Tensor) -> str:
        """Why the ``ordinal``-th pack cannot be one of save point ``index`` (None: of none)."""
        planned = self.instructions.handles[ordinal] if ordinal < len(self.instructions.handles) else None
        if index is not None and planned == index:
            return ""
        if planned is None:
            return self._beyond(tensor)
        which = "no save point" if index is None else f"save point {index}, {_named(self.instructions.values[index])}"
        return self._instead(planned, f"{_found(tensor)} of {which}", f" of save point {planned}")

    def why_not_use(self, number: int, ordinal: int, saves: int) -> str:
        """Why the unpack of handle ``ordinal`` after ``saves`` save points cannot be use point ``number``."""
        if saves < len(self.instructions.values):
            return self._instead(saves, f"that backward has begun, with {self._of_handle(ordinal)}")
        planned = self.instructions.uses[number] if number < len(self.instructions.uses) else None
        if planned == ordinal:
            return ""
        wanted = "its end" if planned is None else self._of_handle(planned)
        return f"backward: planned {wanted}, found {self._of_handle(ordinal)}"

    def planned_at(self, index: int) -> PlannedValue | None:
        """The value of this save point; None behind the last one."""
        return self.instructions.values[index] if index < len(self.instructions.values) else None

    def layers_from(self, index: int) -> bool:
        """Whether a layer of the model saves something from this save point on."""
        return any(value.layer for value in self.instructions.values[index:])

    def _instead(self, index: int, found: str, also: str = "") -> str:
        value = self.instructions.values[index]
        most = "" if self.exact else "at most "
        return f"{_named(value)}: planned {most}{_shape(value)} of {value.size_bytes} bytes{also}, found {found}"

    def _beyond(self, tensor: torch.Tensor) -> str:
        last = f"what comes after {_named(self.instructions.values[-1])}" if self.instructions.values else "its begin"
        return f"{last}: planned backward, found that {_found(tensor)} is saved"

    def _of_handle(self, ordinal: int) -> str:
        if ordinal >= len(self.instructions.handles):
            return "nothing that was planned"
        value = self.instructions.values[self.instructions.handles[ordinal]]
        return f"{_named(value)} {_shape(value)} by handle {ordinal}"


def _last_handles(instructions: Instructions) -> tuple[int, ...]:
    last, again = {}, set()
    for ordinal, value in enumerate(instructions.handles):
        if value in last:
            again.add(value)
        last[value] = ordinal
    return tuple(last[value] if value in again else -1 for value in range(len(instructions.values)))


def _dtype(number: int, value: PlannedValue) -> torch.dtype:
    found = getattr(torch, value.dtype, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(
            f"plan: values[{number}].dtype: expected a dtype of torch {torch.__version__}, such as float32, found "
            f"{value.dtype[:40]!r}; make a new plan here"
        )
    return found


def _found(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} of {tensor.untyped_storage().nbytes()} bytes"


def _shape(value: PlannedValue) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _named(value: PlannedValue) -> str:
    where = f"(layer {value.layer})" if value.layer else "(of no layer)"
    what = value.name.rpartition("/")[2].partition("#")[0]
    if value.name.startswith("before/"):
        return f"what was there before the step, as {what} {where}"
    return f"{value.name if value.layer else what} {where}"
