"""Kinds of the values that were there before the step, as the model and the optimizers that hold them tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from poochplan.formats.profile import Kind
from poochplan.tensors.storages import has_storage, parts_of

from .capture import Capture


class Kinds(dict[int, Kind]):
    """Kind by value, for those that somebody has told; the first to tell counts."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def note(self, tensors: Iterable[Any], kind: Kind) -> None:
        """The tensors among these, and those that sparse and nested ones are made of, are of that kind."""
        for tensor in tensors:
            for part in parts_of(tensor) if isinstance(tensor, torch.Tensor) else ():
                if has_storage(part, self._capture.device_type):
                    self.setdefault(self._capture.value_of(part), kind)

    def note_model(self, model: torch.nn.Module) -> None:
        """Parameters and buffers."""
        self.note(model.parameters(), Kind.PARAMETER)
        self.note(model.buffers(), Kind.BUFFER)

    def note_gradients(self, model: torch.nn.Module) -> None:
        """Those that are there."""
        self.note((parameter.grad for parameter in model.parameters()), Kind.GRADIENT)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its state."""
        self.note(_tensors_in(list(optimizer.state.values())), Kind.OPTIMIZER_STATE)


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested containers, as optimizers keep them (LBFGS in lists)."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors_in(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors_in(item)
