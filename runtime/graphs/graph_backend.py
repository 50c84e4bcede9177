"""Graph mode's backend for ``torch.compile``: Inductor, with the points of the runtime's clock in the compiled code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from poochplan.runtime.regions.anchors import with_anchoring
from poochplan.runtime.regions.installing import PARTITIONER, PASSES
from poochplan.torch_private.compiler_internals import (
    call_attribute,
    compile_module,
    compile_with_inductor,
    compiled_by_inductor,
    forget_compiled,
    inductor_settings,
    lowered_as_output,
)

from .graph_partitioner import SAVE, GraphPartitioner, Replays, has_save_points

_WRITTEN: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[Any], frozenset[str]]]
_WRITTEN = weakref.WeakKeyDictionary()
"""By the model: what it was compiled to, and the replays in that."""


class GraphBackend:
    """What ``torch.compile(backend=...)`` calls with each graph. ``replays``: what is recomputed in it; ``options``:
    Inductor's own.
    """

    def __init__(self, replays: Replays | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self.partitioner = GraphPartitioner(replays or {})

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        lowered_as_output(SAVE)
        passes = self.options.get(PASSES, getattr(inductor_settings(), PASSES))
        settings = {**self.options, PARTITIONER: self.partitioner, PASSES: with_anchoring(passes)}
        return compile_with_inductor(graph, inputs, lowered, settings)


def lowered(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """One half of a graph as code; what a forward has handed out is reused by nothing in it."""
    if kwargs.get("is_backward") or not has_save_points(graph):
        return compiled_by_inductor(graph, inputs, **kwargs)
    with inductor_settings().patch(allow_buffer_reuse=False, inplace_buffers=False):
        return compiled_by_inductor(graph, inputs, **kwargs)


def compile_in_place(model: torch.nn.Module, replays: Iterable[str], options: Mapping[str, Any], **given: Any) -> None:
    """Compiles the model's call with these replays, as ``graph/node``; ``given`` is for ``Module.compile``.

    What was compiled before in this process is let go of: of a function that has been compiled too often the compiler
    makes no code.
    """
    forget_compiled()
    names = frozenset(replays)
    by_graph: dict[str, set[str]] = {}
    for one in names:
        key, name = one.split("/", 1)
        by_graph.setdefault(key, set()).add(name)
    compile_module(model, backend=GraphBackend(by_graph, options), **given)
    _WRITTEN[model] = weakref.ref(getattr(model, call_attribute(model))), names


def written_replays(model: torch.nn.Module) -> frozenset[str] | None:
    """The replays in the graphs of a model that :func:`compile_in_place` has compiled; None of any other."""
    compiled, names = _WRITTEN.get(model, (None, frozenset()))
    return names if compiled is not None and compiled() is getattr(model, call_attribute(model)) else None
