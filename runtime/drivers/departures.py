"""Departures: the place at which a step left its instructions, for those who set it beside the plan."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch

from poochplan.formats.plan import Departure, Instructions, PlannedValue

NOTHING_PLANNED = "nothing"
T = TypeVar("T")


def departed_at_save(instructions: Instructions, index: int, tensor: torch.Tensor) -> Departure:
    """The tensor is not what was to be saved at this save point."""
    value = _at(instructions.values, index)
    return _departure("save", index, value, _described(value), _found(tensor))


def departed_at_pack(instructions: Instructions, ordinal: int, index: int | None, tensor: torch.Tensor) -> Departure:
    """The ``ordinal``-th handle is not of the value that was planned; it is of save point ``index`` (None: of none)."""
    planned = _at(instructions.handles, ordinal)
    value = None if planned is None else instructions.values[planned]
    which = "no save point" if index is None else f"save point {index}, {_name(instructions.values[index])}"
    return _departure("pack", ordinal, value, _described(value), f"{_found(tensor)} of {which}")


def departed_at_use(instructions: Instructions, number: int, ordinal: int, saves: int) -> Departure:
    """Backward asks for handle ``ordinal``, after ``saves`` save points, where another use or save was planned."""
    found = f"{_name(_of_handle(instructions, ordinal))} by handle {ordinal}"
    if saves < len(instructions.values):
        value = instructions.values[saves]
        return _departure("save", saves, value, _described(value), f"backward, which begins with {found}")
    planned = _at(instructions.uses, number)
    if planned is None:
        return _departure("use", number, None, NOTHING_PLANNED, found)
    wanted = _of_handle(instructions, planned)
    return _departure("use", number, wanted, f"{_name(wanted)} by handle {planned}", found)


def _departure(
    at: Literal["save", "pack", "use"], index: int, value: PlannedValue | None, planned: str, found: str
) -> Departure:
    layer, name = ("", "") if value is None else (value.layer, value.name)
    return Departure(at=at, index=index, layer=layer, value=name, planned=planned, found=found)


def _of_handle(instructions: Instructions, ordinal: int) -> PlannedValue | None:
    index = _at(instructions.handles, ordinal)
    return None if index is None else instructions.values[index]


def _at(entries: tuple[T, ...], index: int) -> T | None:
    return entries[index] if index < len(entries) else None


def _described(value: PlannedValue | None) -> str:
    return NOTHING_PLANNED if value is None else f"{value.dtype}{list(value.shape)} of {value.size_bytes} bytes"


def _name(value: PlannedValue | None) -> str:
    return NOTHING_PLANNED if value is None else value.name


def _found(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} of {tensor.untyped_storage().nbytes()} bytes"
