"""Inductor with our partitioner: in its settings for compiled blocks, in the backend of graph mode, and in captures
without memory, for which it generates no code.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from poochplan.runtime.compiled_hooks import GraphRun
from poochplan.torch_private.compiler_internals import (
    boxed,
    call_attribute,
    compile_module,
    compile_with_inductor,
    compiled_by_inductor,
    compiles_autograd,
    forget_compiled,
    inductor_mode,
    inductor_settings,
    lacking_in_compiler,
    lowered_as_output,
    not_lowered,
)
from poochplan.torch_private.tensor_internals import OpOverload

from .deferred_unpack import parts_are_measured
from .partitioner import Partitioner, Replays, saved_nodes, with_anchoring, without_anchoring
from .points import DEFERRED_UNPACK, SAVE, Node, deferred_unpack, readers, save
from .rewriting import Split, why_never_replayed

PARTITIONER, PASSES = "custom_partitioner_fn", "post_grad_custom_post_pass"
"""Inductor's settings that we set."""
_open_blocks = 0
_passes_before: Any = None
_passes: Any = None


@contextlib.contextmanager
def compiled_deferring(device_type: str) -> Iterator[None]:
    """A block in which compiled code gets deferred unpacks, unless :func:`why_none_deferred` gives a reason against it.

    Code compiled earlier stays unchanged. Such blocks may be nested, or overlap.
    """
    global _open_blocks, _passes_before, _passes
    if why_none_deferred(device_type):
        yield
        return
    settings = inductor_settings()
    if not _open_blocks:
        setattr(settings, PARTITIONER, Partitioner())
        _passes_before = without_anchoring(getattr(settings, PASSES))
        _passes = with_anchoring(_passes_before)
        setattr(settings, PASSES, _passes)
    _open_blocks += 1
    try:
        yield
    finally:
        _open_blocks -= 1
        if not _open_blocks and isinstance(getattr(settings, PARTITIONER), Partitioner):
            setattr(settings, PARTITIONER, None)
        if not _open_blocks and getattr(settings, PASSES) is _passes:
            setattr(settings, PASSES, _passes_before)


def why_none_deferred(device_type: str) -> str:
    """Why compiled backwards get all saved tensors at once; empty if they do not."""
    if device_type != "cpu":
        return "deferred unpacks in a compiled backward are for the CPU"
    missing = lacking_in_compiler()
    if missing:
        return f"deferred unpacks in a compiled backward need {missing}, and torch {torch.__version__} has none"
    if compiles_autograd():
        return "torch is set to compile autograd too"
    if not parts_are_measured(device_type):
        return "memory of the parts of a compiled backward is not known without the compiled allocator"
    partitioner = getattr(inductor_settings(), PARTITIONER)
    if not _open_blocks and not (partitioner is None or isinstance(partitioner, Partitioner)):  # ours may be left over
        return "custom_partitioner_fn is set already, to one of your own"
    return ""


def why_no_graph_mode(device_type: str) -> str:
    """Why graph mode is impossible here; empty if it is possible."""
    if device_type != "cpu":
        return "expected a model on the CPU, found it on " + device_type + "; plan it without torch.compile"
    missing = lacking_in_compiler()
    if missing:
        return f"expected {missing} in torch, found {torch.__version__} without: plan the model without torch.compile"
    if not parts_are_measured(device_type):
        return "expected the compiled allocator, found none: install a C++ compiler (pooch doctor --build says more)"
    return ""


class GraphBackend:
    """The backend that ``torch.compile`` calls with each graph. ``replays``: of values; ``options``: Inductor's."""

    def __init__(self, replays: Replays | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self.partitioner = Partitioner(replays or {})

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        lowered_as_output(SAVE)
        passes = self.options.get(PASSES, getattr(inductor_settings(), PASSES))
        settings = {**self.options, PARTITIONER: self.partitioner, PASSES: with_anchoring(passes)}
        return compile_with_inductor(graph, inputs, _lowered, settings)


def _lowered(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """One half of a graph as code. Code of a forward reuses no memory that it hands out at save points."""
    has_points = not kwargs.get("is_backward") and graph.graph.find_nodes(op="call_function", target=SAVE)
    settings = {"allow_buffer_reuse": False, "inplace_buffers": False} if has_points else {}
    with inductor_settings().patch(settings):
        return compiled_by_inductor(graph, inputs, **kwargs)


_WRITTEN: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[Any], frozenset[str]]]
_WRITTEN = weakref.WeakKeyDictionary()
"""By model: its compiled code, and the replays in it."""


def compile_in_place(model: torch.nn.Module, replays: Iterable[str], options: Mapping[str, Any]) -> None:
    """Compiles the model's call in graph mode, with these replays as ``graph/node``; shapes are never dynamic.
    ``options``: ``fullgraph``, ``mode`` and ``options`` of ``torch.compile``.

    Code that this process compiled before is dropped: the compiler refuses a function that was compiled too often.
    """
    forget_compiled()
    names = frozenset(replays)
    by_graph: dict[str, set[str]] = {}
    for one in names:
        key, name = one.split("/", 1)
        by_graph.setdefault(key, set()).add(name)
    settings = {**(inductor_mode(options["mode"]) if options.get("mode") else {}), **(options.get("options") or {})}
    backend = GraphBackend(by_graph, settings)
    compile_module(model, backend=backend, fullgraph=bool(options.get("fullgraph")), dynamic=False)
    _WRITTEN[model] = weakref.ref(getattr(model, call_attribute(model))), names


def written_replays(model: torch.nn.Module) -> frozenset[str] | None:
    """The replays in the graphs of a model that :func:`compile_in_place` has compiled; None for any other model."""
    compiled, names = _WRITTEN.get(model, (None, frozenset()))
    return names if compiled is not None and compiled() is getattr(model, call_attribute(model)) else None


# -- graphs that run node by node, for a capture without memory -------------------------------------------------------

_NOTES = "poochplan"
"""The metadata of a saved node: the key of its graph, and why it is never replayed (empty if it can be)."""


@contextlib.contextmanager
def capturing_graphs(capture: GraphRun) -> Iterator[None]:
    """A block in which the capture sees the graphs of compiled callables. Code compiled before and in the block is
    dropped: the compiler counts both, and stops compiling a function that it has compiled often. Its caches are not
    used. It splits graphs as in graph mode, with all points, and an interpreter runs both halves.
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


class _NotingPartitioner(Partitioner):
    def saw(self, key: str, split: Split) -> None:
        for node in saved_nodes(split):
            node.meta[_NOTES] = key, why_never_replayed(split, node)


class _Interpreter(torch.fx.Interpreter):
    """Announces each node to the capture before it runs."""

    def __init__(self, graph: torch.fx.GraphModule, capture: GraphRun) -> None:
        super().__init__(graph)
        self._capture = capture
        self._fused = never_in_memory(graph.graph)

    def run_node(self, n: Node) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._capture.runs(n, is_fused=n in self._fused))
            if n.target is SAVE:
                saved = n.all_input_nodes[0]
                key, never = saved.meta[_NOTES]
                stack.enter_context(self._capture.saves(key, saved.name, never))
            return super().run_node(n)

    def call_function(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        points = {SAVE: save, DEFERRED_UNPACK: deferred_unpack}  # called directly, so that no mode sees an op
        if target in points:
            return points[target](args[0])
        return super().call_function(target, tuple(args), kwargs)


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
