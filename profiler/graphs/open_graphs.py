"""Compiled callables that run their graphs node by node, with all their points, and no code: for a step without memory.

What would be compiled in a block is split as graph mode splits it and then not lowered; the compiler's caches are left
alone. A graph that runs tells each of its nodes before it runs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from poochplan.runtime.graphs.graph_partitioner import SAVE, GraphPartitioner, saved_nodes
from poochplan.runtime.graphs.rewriting import Split, why_never_replayed
from poochplan.runtime.graphs.save_points import save
from poochplan.runtime.regions.arrivals import ARRIVE, arrive
from poochplan.torch_private.compiler_internals import boxed, not_lowered


class Watching(Protocol):
    """Who is told what runs."""

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """A block in which a graph runs."""

    def runs(self, node: torch.fx.Node) -> contextlib.AbstractContextManager[None]:
        """A block in which that node runs."""

    def saves(self, key: str, node: torch.fx.Node, never: str) -> contextlib.AbstractContextManager[None]:
        """A block in which the graph of that key saves what the node makes; ``never`` says why it cannot be made again,
        and is empty where it can.
        """


@contextlib.contextmanager
def open_graphs(watching: Watching) -> Iterator[None]:
    """A block in which what is compiled tells ``watching`` what it does."""

    def lower(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        return _run_by(graph, watching)

    with not_lowered(lower, _NotingPartitioner()):
        yield


class _NotingPartitioner(GraphPartitioner):
    """Notes on each save point which graph it is of, and whether what it saves can be made again."""

    def __init__(self) -> None:
        super().__init__({})

    def saw(self, key: str, split: Split) -> None:
        for node in saved_nodes(split):
            node.meta["poochplan"] = key, why_never_replayed(split, node)


def _run_by(graph: torch.fx.GraphModule, watching: Watching) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        with watching.inside():
            return _Interpreter(graph, watching).boxed_run(list(args) if not isinstance(args, list) else args)

    return boxed(run)  # it lets go of its arguments as the code would


class _Interpreter(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.GraphModule, watching: Watching) -> None:
        super().__init__(graph)
        self._watching = watching
        self._node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        self._node = n
        with self._watching.runs(n):
            return super().run_node(n)

    def call_function(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if target is SAVE:
            assert self._node is not None
            saved = self._node.args[0]
            assert isinstance(saved, torch.fx.Node)
            key, never = saved.meta["poochplan"]
            with self._watching.saves(key, saved, never):
                return save(args[0])
        if target is ARRIVE:
            return arrive(args[0])
        return super().call_function(target, tuple(args), kwargs)
