"""GraphCapture: the capture of a step without memory that runs compiled callables node by node.

The compiler splits their graphs as in graph mode, with all points, and generates no code. An interpreter runs both
halves. The compiler's caches are not used.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from poochplan.errors import StepError
from poochplan.formats.profile import Profile, Value
from poochplan.profiler.fake.fake import FakeCapture, StepMode
from poochplan.profiler.fake.roofline import Roofline, function_seconds
from poochplan.runtime.compiled.partitioner import Partitioner, saved_nodes
from poochplan.runtime.compiled.points import DEFERRED_UNPACK, SAVE, Node, deferred_unpack, readers, save
from poochplan.runtime.compiled.rewriting import Split, why_never_replayed
from poochplan.torch_private.compiler_internals import boxed, forget_compiled, not_lowered
from poochplan.torch_private.tensor_internals import OpOverload

ELSEWHERE = "it is saved outside of compiled graphs, where graph mode recomputes nothing"
SEVERAL = "more than one compiled graph holds it, or its graph runs more than once in a step"
_MODULE = re.compile(r"_modules\['(\w+)'\]|\['(\w+)'\]|\.(\w+)")


class GraphCapture(FakeCapture):
    """Additional state: the running node, and which node of which graph saved each value."""

    opens_compiled = True

    def __init__(self, model: torch.nn.Module, mode: StepMode, roofline: Roofline | None) -> None:
        super().__init__(model, mode, roofline)
        self._fused_nodes: frozenset[Node] = frozenset()
        self._graph: torch.fx.Graph | None = None
        self._node: Node | None = None
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
    def runs(self, node: Node) -> Iterator[None]:
        """A block in which a node of a graph runs."""
        if node.graph is not self._graph:
            self._graph, self._fused_nodes = node.graph, never_in_memory(node.graph)
        outer, self._node, self.tracker.of_node = self.tracker.of_node, node, _layer_of(node)
        try:
            yield
        finally:
            self._node, self.tracker.of_node = None, outer

    @contextlib.contextmanager
    def saves(self, node: Node) -> Iterator[None]:
        """A block in which a graph saves the node's result."""
        before, (key, never) = len(self.handles), node.meta[_NOTES]
        yield
        for handle in self.handles[before:]:
            self._saved_by.setdefault(handle.value, []).append((key, node.name, never))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.ops)
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        for op in self.ops[before:] if self._node in self._fused_nodes else ():
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


@contextlib.contextmanager
def capturing_graphs(capture: GraphCapture) -> Iterator[None]:
    """A block in which the capture sees the graphs of compiled callables. Code compiled before and in the block is
    dropped: the compiler counts both, and stops compiling a function that it has compiled often.
    """

    def lower(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        def run(args: Sequence[Any]) -> Any:
            with capture.inside():
                return _Interpreter(graph, capture).boxed_run(list(args) if not isinstance(args, list) else args)

        return boxed(run)  # it releases its arguments like compiled code

    forget_compiled()
    try:
        with not_lowered(lower, _NotingPartitioner({})):
            yield
    finally:
        forget_compiled()


_NOTES = "poochplan"
"""The metadata of a saved node: the key of its graph, and why it is never replayed (empty if it can be)."""


class _NotingPartitioner(Partitioner):
    def saw(self, key: str, split: Split) -> None:
        for node in saved_nodes(split):
            node.meta[_NOTES] = key, why_never_replayed(split, node)


class _Interpreter(torch.fx.Interpreter):
    """Announces each node to the capture before it runs."""

    def __init__(self, graph: torch.fx.GraphModule, capture: GraphCapture) -> None:
        super().__init__(graph)
        self._capture = capture

    def run_node(self, n: Node) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._capture.runs(n))
            if n.target is SAVE:
                stack.enter_context(self._capture.saves(n.all_input_nodes[0]))
            return super().run_node(n)

    def call_function(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        points = {SAVE: save, DEFERRED_UNPACK: deferred_unpack}  # called directly, so that no mode sees an op
        if target in points:
            return points[target](args[0])
        return super().call_function(target, tuple(args), kwargs)


def _layer_of(node: Node) -> str:
    """Path of the innermost module that the node was traced in; for a node of backward, that of its forward node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    inner = path.split("L['self']", 1)[-1]
    return ".".join(next(filter(None, found)) for found in _MODULE.findall(inner) if any(found))


# -- what the compiler fuses -----------------------------------------------------------------------------------------

_MADE_ANYWHERE = ("aten.full", "aten.arange", "aten.scalar_tensor", "aten.zeros", "aten.ones", "prims.iota")
_POINTWISE = ("prims.convert_element_type", "prims.inductor_random", "aten.where", "aten.clone", "aten.constant_pad_nd")
_REDUCTIONS = ("sum", "mean", "var", "var_mean", "amax", "amin", "max", "min", "any", "all", "prod", "argmax", "argmin")


def never_in_memory(graph: torch.fx.Graph) -> frozenset[Node]:
    """Nodes that only pointwise nodes and reductions read.

    This estimates Inductor's scheduler. A pointwise node or a constant is computed inside the kernels that read it, if
    all of them are pointwise or reductions. It then only takes the time of its function.
    """
    found = ((node, list(readers(node))) for node in graph.nodes if _is_pointwise(node))
    return frozenset(
        node for node, reading in found if reading and all(_is_pointwise(x) or _is_reduction(x) for x in reading)
    )


def _is_pointwise(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    name = str(node.target)
    return torch.Tag.pointwise in node.target.tags or name.startswith((*_MADE_ANYWHERE, *_POINTWISE))


def _is_reduction(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and str(node.target).split(".")[1] in _REDUCTIONS
