"""All that the core knows of graph mode and compiled code: seven hooks, and what they do where nothing is compiled.

``runtime/compiled`` registers its own as ``HOOKS``. :func:`hooks_for` loads it when it meets a model with a compiled
part, so ``torch.compile`` needs nothing else of the user. Steps of other models have no points or replays to know of.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from poochplan.tensors.modes import compiled_modules
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.hooks import Hooks

Block = AbstractContextManager[None]


class GraphRun(Protocol):
    """Is told of graphs that run node by node: of blocks in which one runs, a node of it runs, or a result is saved."""

    def inside(self) -> Block: ...
    def runs(self, node: torch.fx.Node, *, is_fused: bool) -> Block: ...
    def saves(self, graph: str, node: str, never: str) -> Block: ...


class CompiledHooks(NamedTuple):
    deferring: Callable[[Hooks, Callable[[Any], Geometry | None], str], Hooks] = lambda hooks, *_: hooks
    """Saved-tensors hooks that defer unpacks of compiled backwards; the last argument is the type of device."""
    plainly: Callable[[Hooks], Hooks] = lambda hooks: hooks
    """Hooks in their place where they have failed."""
    compiled_deferring: Callable[[str], Block] = lambda _: nullcontext()
    """A block in which code that is compiled gets deferred unpacks."""
    why_none_deferred: Callable[[str], str] = lambda _: ""
    told_of_points: Callable[[Callable[[], Block], str], Block] = lambda *_: nullcontext()
    """A block in which the block that is given is entered around each point of compiled code."""
    written_replays: Callable[[torch.nn.Module], frozenset[str] | None] = lambda _: None
    """The replays in the code of a model; None if it is not in graph mode."""
    capturing_graphs: Callable[[GraphRun], Block] = lambda _: nullcontext()
    """A block in which graphs run node by node."""


def hooks_for(model: torch.nn.Module) -> CompiledHooks:
    """The hooks for the steps of a model as it is now."""
    if not compiled_modules(model):
        return CompiledHooks()
    return importlib.import_module("poochplan.runtime.compiled").HOOKS
