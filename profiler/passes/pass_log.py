"""The log of one pass: its blocks by the part of the model that took them, and its tensors alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from poochplan.formats.occupancy import occupancy
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, rounded_up
from poochplan.runtime.allocator.allocation_log import MARK, AllocationLog, Table, lifetimes
from poochplan.runtime.allocator.scope import ThreadScope
from poochplan.runtime.inference.model_calls import around_calls, around_parts
from poochplan.tensors.modes import ToggledMode

_BEGINS, _ENDS = 1, 2
"""Marks before and behind an op."""


class LoggedBlock(NamedTuple):
    """A block that a pass has taken; see ``PassBlock``."""

    size_bytes: int
    start: int
    end: int
    layer: str


def logged_pass(step: Callable[[], object], model: torch.nn.Module) -> tuple[list[LoggedBlock], int]:
    """The blocks of the first call of ``model`` in ``step()``, and how many events its log has.

    Raises ``AllocatorError`` where there is no compiled allocator.
    """
    with _FirstCall(model) as call:
        layers: list[str] = [""]

        def called(path: str) -> None:
            if call.log is not None:
                call.log.mark(len(layers))
                layers.append(path)

        with around_parts(model, called):
            step()
    found = lifetimes(call.events, LEAST_COUNTED_BYTES)
    ends = np.where(found["death"] < 0, len(call.events), found["death"])
    rows = zip(
        found["size_bytes"].tolist(), found["birth"].tolist(), ends.tolist(), found["point"].tolist(), strict=True
    )
    return [LoggedBlock(size, start, end, layers[point]) for size, start, end, point in rows], len(call.events)


def live_tensors_peak(step: Callable[[], object], model: torch.nn.Module) -> int:
    """Most bytes of tensors that the first call of ``model`` in ``step()`` makes and that live at once: of its blocks
    without those that an op takes and gives back inside.
    """
    with _FirstCall(model) as call:
        mode = _Marking(call)
        mode.switch_on()
        try:
            step()
        finally:
            mode.switch_off()
    found = lifetimes(call.events, LEAST_COUNTED_BYTES)
    marks = np.flatnonzero(call.events["kind"] == MARK)
    closing = marks[call.events["value"][marks] == _ENDS]
    following = np.append(closing, len(call.events))[np.searchsorted(closing, found["birth"])]
    is_inside = (found["point"] == _BEGINS) & (found["death"] >= 0) & (found["death"] < following)
    blocks = [
        LoggedBlock(size, birth, death if death >= 0 else len(call.events), "")
        for size, _, birth, death in found[~is_inside].tolist()
    ]
    return allocated_peak(blocks, len(call.events))


def allocated_peak(blocks: list[LoggedBlock], events: int) -> int:
    """Most bytes of blocks that live at once, each rounded up."""
    table = np.array([(start, end - 1, rounded_up(size)) for size, start, end, _ in blocks], np.int64).reshape(-1, 3)
    return int(occupancy(events, (table[:, 0], table[:, 1], table[:, 2])).max(initial=0))


@functools.cache
def _scope() -> ThreadScope:
    return ThreadScope()


class _FirstCall:
    """A block that logs the first call of a model on this thread, once it has begun. State: the log while it runs, and
    then its events.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._depth = 0
        self._stack = ExitStack()
        self.log: AllocationLog | None = None
        self.events: Table = np.empty(0)
        self._is_over = False

    def __enter__(self) -> _FirstCall:
        self._stack.enter_context(around_calls(self._model, self._begins, self._ends))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1 and not self._is_over:
            self.log = AllocationLog(_scope())
            self.log.__enter__()

    def _ends(self, _: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self.log is not None:
            self.log.__exit__(None, None, None)
            self.events, self.log = self.log.events, None
            self._is_over = True


class _Marking(ToggledMode):
    """Marks before and behind each op of the call."""

    def __init__(self, call: _FirstCall) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = self._call.log
        if log is None:
            return func(*args, **(kwargs or {}))
        log.mark(_BEGINS)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            log.mark(_ENDS)
