"""Timing: the ops of the step one by one, over several steps that dispatch the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from poochplan.formats.occupancy import Floats
from poochplan.formats.profile import Phase
from poochplan.formats.queries import COMPILED_REGION
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.profiler.capture.node_hooks import (
    Gradients,
    NodeClock,
    NodeListener,
    Stretches,
    around_backward,
    name_of,
)
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.tensors.modes import ToggledMode
from poochplan.tensors.operators import traits
from poochplan.torch_private.tensor_internals import last_sequence_number

from .captured import CapturedOp, Shapes, shapes_of
from .clock import Clock


@dataclass(frozen=True)
class DispatchedOp:
    """The facts that identify an op of one step in another step."""

    name: str
    layer: str
    """Empty in backward, because hooks of the capture influence it there."""
    shapes: Shapes

    def __str__(self) -> str:
        shapes = f" {list(self.shapes)}".replace("(", "[").replace(")", "]")
        return f"{self.name}{f' in {self.layer}' if self.layer else ''}{shapes if self.shapes else ''}"


class OpTimer(ToggledMode):
    """Seconds of each op (pure views left out, as in the capture), in order of dispatch. State: the phase."""

    def __init__(self, clock: Clock, tracker: LayerTracker) -> None:
        super().__init__()
        self.ops: list[DispatchedOp] = []
        self.phase = Phase.FORWARD
        self.clock, self._tracker = clock, tracker
        self.marks: list[Stretches] = []
        self.nodes = NodeTimes(self)
        self._part_began: Any = None
        self._in_compiled_backward = False
        self._forward_path: str | None = None
        """Path of the running compiled callable; None outside one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view or self._in_compiled_backward:
            return func(*args, **(kwargs or {}))
        layer = "" if self.phase is Phase.BACKWARD else self._tracker.current()
        begin = self.clock.begin()
        outputs = func(*args, **(kwargs or {}))
        self.marks.append([(begin, self.clock.end())])
        self.ops.append(DispatchedOp(facts.name, layer, shapes_of(outputs)))
        return outputs

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            if self.nodes.is_inside:
                return call(*args, **kwargs)
            node_before = last_sequence_number()
            outer, self._forward_path = self._forward_path, "" if self.phase is Phase.BACKWARD else path
            self._part_began = self.clock.begin()
            try:
                with self.away():
                    outputs = call(*args, **kwargs)
                self._part_ends(self._forward_path)
            finally:
                self._forward_path = outer
            around_backward(outputs, node_before, self._compiled_backward_begins, self._compiled_backward_ends)
            return outputs

        return compiled

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        """The result of ``run()``, a backward from the outputs that is observed node by node."""
        with self.away(), self.nodes.told_of(outputs):
            return run()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return self.nodes.clock.paused()

    def switch_off(self) -> None:
        super().switch_off()
        self.nodes.leave()

    def _part_ends(self, path: str) -> None:
        self.marks.append([(self._part_began, self.clock.end())])
        self.ops.append(DispatchedOp(COMPILED_REGION, path, ()))

    def _compiled_backward_begins(self, _: list[torch.Tensor]) -> None:
        self.nodes.clock.stops()
        self._part_began, self._in_compiled_backward = self.clock.begin(), True

    def _compiled_backward_ends(self, _: list[torch.Tensor]) -> None:
        self._in_compiled_backward = False
        self._part_ends("")

    @contextlib.contextmanager
    def point(self) -> Iterator[None]:
        """A block in which compiled code saves or gets a tensor. One part ends before it, and the next begins."""
        path = self._forward_path if self._forward_path is not None else "" if self._in_compiled_backward else None
        if path is None:
            yield
            return
        in_backward, self._in_compiled_backward = self._in_compiled_backward, False
        self._part_ends(path)
        yield
        self._in_compiled_backward = in_backward
        self._part_began = self.clock.begin()

    def durations_s(self) -> list[float]:
        self.clock.synchronize()
        return [sum(self.clock.seconds(*stretch) for stretch in stretches) for stretches in self.marks]


class NodeTimes(NodeListener):
    """Reports name, gradient shapes and time of each node."""

    def __init__(self, timer: OpTimer) -> None:
        super().__init__()
        self._timer, self.clock = timer, NodeClock(timer.clock)

    def node_begins(self, node: Any, gradients: Gradients) -> None:
        self.clock.stops()
        self.clock.begins()

    def node_ends(self, node: Any, gradients: Gradients) -> None:
        self.clock.stops()
        self._timer.marks.append(self.clock.stretches)
        self._timer.ops.append(DispatchedOp(name_of(node), "", shapes_of(gradients)))
        self.clock.goes_on()

    def leave(self) -> None:
        self.clock.forget()
        super().leave()


class OpRuns:
    """Times of the captured step's ops from the timed steps so far. ``steps``: their seconds, with the instruments."""

    def __init__(self, captured: list[CapturedOp]) -> None:
        self.steps: list[PhaseSeconds] = []
        self._wanted = _dispatched(captured)
        self._runs: list[list[float]] = []
        self._differences: dict[str, str] = {}

    def add(self, timer: OpTimer, seconds: PhaseSeconds) -> None:
        """Adds a step with its times. It is used if it dispatched the same ops, even if their shapes differ."""
        self.steps.append(seconds)
        what, difference = _first_difference(self._wanted, timer.ops)
        if what:
            self._differences.setdefault(what, difference)
        if what != "ops":
            self._runs.append(timer.durations_s())

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
    what, difference = _first_difference(_dispatched(captured), timer.ops)
    return [f"steps differ in {_DIFFER_IN[what]}, first at {difference}; this is one of them"] if what else []


_DIFFER_IN = {"ops": "the ops they dispatch", "shapes": "shapes"}


def _dispatched(captured: list[CapturedOp]) -> list[DispatchedOp]:
    return [DispatchedOp(op.name, "" if op.phase is Phase.BACKWARD else op.layer, op.shapes) for op in captured]


def _first_difference(wanted: list[DispatchedOp], found: list[DispatchedOp]) -> tuple[str, str]:
    """``"ops"``, ``"shapes"`` or nothing, and the first op that differs in it."""
    for index, (one, other) in enumerate(zip_longest(wanted, found)):
        if one is None or other is None or (one.name, one.layer) != (other.name, other.layer):
            return "ops", f"op {index}: {one or 'no op'}, then {other or 'no op'}"
    for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if one != other:
            return "shapes", f"op {index}: {one}, then {other}"
    return "", ""
