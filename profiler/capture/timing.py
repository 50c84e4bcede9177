"""Timing: the ops of the step one by one, over several steps that dispatch the same."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from poochplan.formats.occupancy import Floats
from poochplan.formats.profile import Phase
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.tensors.operators import traits

from .capture import Capture
from .captured import CapturedOp, shapes_of
from .workspace import Workspace


class OpTimer(Capture):
    """Seconds of each op (pure views left out), in the order of a capture, which knows no values and no memory."""

    sees_values = False

    def __init__(self, model: torch.nn.Module, where: torch.device) -> None:
        super().__init__(model, where, Workspace())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view or self._paused:
            return func(*args, **(kwargs or {}))
        op = CapturedOp(facts.name, "" if self.phase is Phase.BACKWARD else self.tracker.current(), self.phase)
        begin = self.clock.begin()
        outputs = func(*args, **(kwargs or {}))
        self.took(op, [(begin, self.clock.end())])
        op.shapes = shapes_of(outputs)
        self.ops.append(op)
        return outputs

    def ordinary(self, leaves: list[Any]) -> list[torch.Tensor]:
        return []

    def resized(self, storage: torch.UntypedStorage, before_bytes: int) -> None:
        pass


class OpRuns:
    """Times of the captured step's ops from the timed steps so far. ``steps``: their seconds, with the instruments."""

    def __init__(self, captured: list[CapturedOp]) -> None:
        self.steps: list[PhaseSeconds] = []
        self._captured = captured
        self._runs: list[Floats] = []
        self._differences: dict[str, str] = {}

    def add(self, timer: OpTimer, seconds: PhaseSeconds) -> None:
        """Adds a step with its times. It is used if it dispatched the same ops, even if their shapes differ."""
        self.steps.append(seconds)
        what, difference = _first_difference(self._captured, timer.ops)
        if what:
            self._differences.setdefault(what, difference)
        if what != "ops":
            self._runs.append(timer.durations()[0])

    @property
    def seconds(self) -> Floats | None:
        """Seconds of each op in each step that dispatched the same ops, (steps, ops); None if none did."""
        return np.array(self._runs) if self._runs else None

    @property
    def notes(self) -> list[str]:
        """Where and how steps differ, and what the durations then are; empty if they do not differ."""
        if "ops" in self._differences:
            used, first = len(self._runs), self._differences["ops"]
            of = f"of {used} of {len(self.steps)} timed steps" if used else "of the captured step alone"
            return [f"steps differ in the ops they dispatch, first at {first}; op durations are {of}"]
        if "shapes" in self._differences:
            first = self._differences["shapes"]
            return [f"steps differ in shapes, first at {first}; op durations are medians over such steps"]
        return []


def difference_note(captured: list[CapturedOp], timer: OpTimer) -> list[str]:
    """A note, if that step dispatched other ops than the captured one, or ops of other shapes."""
    what, difference = _first_difference(captured, timer.ops)
    return [f"steps differ in {_DIFFER_IN[what]}, first at {difference}; this is one of them"] if what else []


_DIFFER_IN = {"ops": "the ops they dispatch", "shapes": "shapes"}


def _first_difference(captured: list[CapturedOp], found: list[CapturedOp]) -> tuple[str, str]:
    """``"ops"``, ``"shapes"`` or nothing, and the first op that differs in it."""
    for index, (one, other) in enumerate(zip_longest(captured, found)):
        if one is None or other is None or (one.name, _layer(one)) != (other.name, _layer(other)):
            return "ops", f"op {index}: {_said(one)}, then {_said(other)}"
    for index, (one, other) in enumerate(zip(captured, found, strict=True)):
        if one.shapes != other.shapes:
            return "shapes", f"op {index}: {_said(one)}, then {_said(other)}"
    return "", ""


def _layer(op: CapturedOp) -> str:
    """Empty in backward, because hooks of the capture influence it there."""
    return "" if op.phase is Phase.BACKWARD else op.layer


def _said(op: CapturedOp | None) -> str:
    if op is None:
        return "no op"
    shapes = f" {list(op.shapes)}".replace("(", "[").replace(")", "]") if op.shapes else ""
    return f"{op.name}{f' in {_layer(op)}' if _layer(op) else ''}{shapes}"
