"""Graph mode's backend for ``torch.compile``: Inductor, with the points of the runtime's clock in the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from poochplan.tensors.torch_private import (
    compile_with_inductor,
    compiled_by_inductor,
    inductor_settings,
    lowered_as_output,
)

from .graph_partitioner import SAVE, GraphPartitioner, Replays, has_save_points


class GraphBackend:
    """What ``torch.compile(backend=...)`` calls with each graph. ``replays``: what is recomputed in it; ``options``:
    Inductor's own.
    """

    def __init__(self, replays: Replays | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self.partitioner = GraphPartitioner(replays or {})
        self.compiled = 0
        """Graphs so far."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1
        lowered_as_output(SAVE)
        settings = {**self.options, "custom_partitioner_fn": self.partitioner}
        return compile_with_inductor(graph, inputs, lowered, settings)


def lowered(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """One half of a graph as code; what a forward has handed out is reused by nothing in it."""
    if kwargs.get("is_backward") or not has_save_points(graph):
        return compiled_by_inductor(graph, inputs, **kwargs)
    with inductor_settings().patch(allow_buffer_reuse=False, inplace_buffers=False):
        return compiled_by_inductor(graph, inputs, **kwargs)
