"""Inductor with our partitioner: in its settings for compiled blocks, and in the backend of graph mode."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from poochplan.tensors.modes import compiled_modules
from poochplan.torch_private.compiler_internals import (
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
)

from .deferred_unpack import parts_are_measured
from .partitioner import Partitioner, Replays, with_anchoring, without_anchoring
from .points import SAVE

PARTITIONER, PASSES = "custom_partitioner_fn", "post_grad_custom_post_pass"
"""Inductor's settings that we set."""
_open_blocks = 0
_passes_before: Any = None
_passes: Any = None


@contextlib.contextmanager
def compiled_deferring(model: torch.nn.Module, device_type: str) -> Iterator[None]:
    """A block in which code compiled for ``model`` gets deferred unpacks, unless :func:`why_none_deferred` gives a
    reason against it.

    Code compiled earlier stays unchanged. Such blocks may be nested, or overlap.
    """
    global _open_blocks, _passes_before, _passes
    if not compiled_modules(model) or why_none_deferred(model, device_type):
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


def why_none_deferred(model: torch.nn.Module, device_type: str) -> str:
    """Why compiled backwards of ``model`` get all saved tensors at once; empty if not, or if nothing is compiled."""
    if not compiled_modules(model):
        return ""
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
