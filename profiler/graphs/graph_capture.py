"""GraphCapture: the capture of a step without memory that sees into compiled callables, node by node."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from poochplan.errors import StepError
from poochplan.formats.profile import Profile, Value
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.captured import CapturedOp
from poochplan.profiler.fake.fake import FakeCapture, StepMode
from poochplan.profiler.fake.roofline import Roofline, function_seconds
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.torch_private.compiler_internals import forget_compiled

from .fusion import never_in_memory
from .open_graphs import open_graphs

ELSEWHERE = "it is saved outside of compiled graphs, where graph mode recomputes nothing"
SEVERAL = "more than one compiled graph holds it, or its graph runs more than once in a step"
_MODULE = re.compile(r"_modules\['(\w+)'\]|\['(\w+)'\]|\.(\w+)")


class GraphLayers(LayerTracker):
    """The layer is that of the node which runs, where one does."""

    def __init__(self) -> None:
        super().__init__()
        self.of_node: str | None = None

    def current(self) -> str:
        return super().current() if self.of_node is None else self.of_node


class GraphCapture(FakeCapture):
    """State besides: the node that runs, and which node of which graph saved each value."""

    def __init__(self, static: set[int], mode: StepMode, roofline: Roofline | None) -> None:
        self._layers = GraphLayers()
        super().__init__(self._layers, static, mode, roofline)
        self._fused: frozenset[torch.fx.Node] = frozenset()
        self._graph: torch.fx.Graph | None = None
        self._node: torch.fx.Node | None = None
        self._saved_by: dict[int, list[tuple[str, str, str]]] = {}
        """By value: graph, node, and why it is never replayed."""
        self._runs = False
        self._computed_elsewhere: set[int] = set()
        """Ops that the compiler fuses away; they live as long as the capture."""
        self._graph_runs = 0

    def around_region(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any, **kwargs: Any) -> Any:
            before = self._graph_runs
            with self.away():  # while it is compiled
                found = call(*args, **kwargs)
            if self._runs and self._graph_runs == before:
                raise StepError(
                    f"model: expected compiled callables to be Inductor's in mode fake, found none of its graphs in "
                    f"{path or 'the model itself'}; profile the model as it is before torch.compile, and wrap a bare "
                    "nn.Sequential, of which torch compiles nothing, in a module of your own"
                )
            return found

        return opened

    @contextlib.contextmanager
    def running(self, model: torch.nn.Module) -> Iterator[Capture]:
        with super().running(model):
            self._runs = True
            try:
                yield self
            finally:
                self._runs = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """A block in which a graph runs."""
        if not self._runs:
            yield
            return
        self._graph_runs += 1
        was_on = self.is_on
        self.switch_on()
        try:
            yield
        finally:
            if not was_on:
                self.switch_off()

    @contextlib.contextmanager
    def runs(self, node: torch.fx.Node) -> Iterator[None]:
        """A block in which that node of a graph runs."""
        if node.graph is not self._graph:
            self._graph, self._fused = node.graph, never_in_memory(node.graph)
        outer, self._node, self._layers.of_node = self._layers.of_node, node, _layer_of(node)
        try:
            yield
        finally:
            self._node, self._layers.of_node = None, outer

    @contextlib.contextmanager
    def saves(self, key: str, node: torch.fx.Node, never: str) -> Iterator[None]:
        """A block in which the graph of that key saves what the node makes."""
        before = len(self.handles)
        yield
        for value, *_ in self.handles[before:]:
            self._saved_by.setdefault(value, []).append((key, node.name, never))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.ops)
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        for op in self.ops[before:] if self._node in self._fused else ():
            self._computed_elsewhere.add(id(op))
            op.duration_s = 0.0 if self.roofline is None else function_seconds(self.roofline, func, outputs)
            for number in op.outputs:
                self.values[number].size_bytes = 0
        return outputs

    def takes(self, op: CapturedOp, seconds: float) -> None:
        """Nothing, run by itself, where it is computed within the kernels that read what it makes."""
        op.duration_s = 0.0 if id(op) in self._computed_elsewhere else seconds

    def told_of_graphs(self, profile: Profile) -> Profile:
        """The profile, with what saved each value, and why it is never recomputed in its graph."""
        handles: dict[int, int] = {}
        for handle in profile.handles:
            handles[handle.value] = handles.get(handle.value, 0) + 1
        return msgspec.structs.replace(
            profile,
            values=tuple(
                self._told(number, value, handles[number]) if number in handles else value
                for number, value in enumerate(profile.values)
            ),
        )

    def _told(self, number: int, value: Value, handle_count: int) -> Value:
        by = self._saved_by.get(number, [])
        nodes = tuple(dict.fromkeys(f"{key}/{node}" for key, node, _ in by))
        runs = [one for others in self._saved_by.values() for one in others if one in by]
        never = next((why for _, _, why in by if why), "")
        if not by:
            never = ELSEWHERE
        elif handle_count != len(by) or len({key for key, _, _ in by}) > 1 or len(runs) > len(by):
            never = SEVERAL
        return msgspec.structs.replace(value, nodes=nodes, unreplayable=never or value.unreplayable)


@contextlib.contextmanager
def capturing_graphs(capture: GraphCapture) -> Iterator[None]:
    """A block in which compiled callables run their graphs for the capture to see. What was compiled before is let go
    of, as is what is compiled in the block: the compiler counts both, and makes no code of what it has compiled often.
    """
    forget_compiled()
    try:
        with open_graphs(capture):
            yield
    finally:
        forget_compiled()


def _layer_of(node: torch.fx.Node) -> str:
    """Path of the innermost module that the node was traced in; of the forward node's, for one of backward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    inner = path.split("L['self']", 1)[-1]
    return ".".join(next(filter(None, found)) for found in _MODULE.findall(inner) if any(found))
