"""GraphCapture: the capture of a step without memory whose compiled callables run node by node."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from poochplan.errors import StepError
from poochplan.formats.profile import Profile, Value
from poochplan.profiler.fake.fake import FakeCapture, StepMode
from poochplan.profiler.fake.roofline import Roofline, function_seconds

ELSEWHERE = "it is saved outside of compiled graphs, where graph mode recomputes nothing"
SEVERAL = "more than one compiled graph holds it, or its graph runs more than once in a step"
_MODULE = re.compile(r"_modules\['(\w+)'\]|\['(\w+)'\]|\.(\w+)")


class GraphCapture(FakeCapture):
    """Additional state: whether the running node is fused, and which node of which graph saved each value."""

    opens_compiled = True

    def __init__(self, model: torch.nn.Module, mode: StepMode, roofline: Roofline | None) -> None:
        super().__init__(model, mode, roofline)
        self._is_fused = False
        self._saved_by: dict[int, list[tuple[str, str, str]]] = {}
        """By value: the graphs and nodes that saved it, and why each is never replayed."""
        self._runs = False
        self._graph_runs = 0

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
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
    def running(self) -> Iterator[None]:
        with super().running():
            self._runs = True
            try:
                yield
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
    def runs(self, node: torch.fx.Node, *, is_fused: bool) -> Iterator[None]:
        """A block in which a node of a graph runs."""
        outer, self._is_fused, self.tracker.of_node = self.tracker.of_node, is_fused, _layer_of(node)
        try:
            yield
        finally:
            self._is_fused, self.tracker.of_node = False, outer

    @contextlib.contextmanager
    def saves(self, graph: str, node: str, never: str) -> Iterator[None]:
        """A block in which a graph saves the node's result."""
        before = len(self.handles)
        yield
        for handle in self.handles[before:]:
            self._saved_by.setdefault(handle.value, []).append((graph, node, never))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.ops)
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        for op in self.ops[before:] if self._is_fused else ():
            self.fused.add(id(op))
            op.duration_s = 0.0 if self.roofline is None else function_seconds(self.roofline, func, outputs)
            for number in op.outputs:
                self.values[number].size_bytes = 0
        return outputs

    def told_of_graphs(self, profile: Profile) -> Profile:
        """The profile with the nodes that saved each value, and why it is never recomputed in its graph."""
        handles = Counter(handle.value for handle in profile.handles)
        values = (
            self._told(number, value, handles[number]) if number in handles else value
            for number, value in enumerate(profile.values)
        )
        return msgspec.structs.replace(profile, values=tuple(values))

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


def _layer_of(node: torch.fx.Node) -> str:
    """Path of the innermost module that the node was traced in; for a node of backward, that of its forward node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    inner = path.split("L['self']", 1)[-1]
    return ".".join(next(filter(None, found)) for found in _MODULE.findall(inner) if any(found))
