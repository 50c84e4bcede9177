"""Layers: which module is running, by path; and which forward layer an op of backward belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from poochplan.guard import guarded
from poochplan.tensors.modes import compiled_modules, inside, left_out_of_copies
from poochplan.torch_private.tensor_internals import backward_node, in_backward, last_sequence_number, sequence_number


class LayerTracker:
    """State: the running modules, and the layer of each autograd node by its sequence number.

    ``ran_again`` has the outermost modules whose forward ran in backward, in order, as with checkpoints. Autograd is
    off there. If it is on, the module is not one that only a backward calls.
    """

    def __init__(self) -> None:
        self.running: list[str] = []
        """Paths of the modules that run, the innermost last."""
        self._layer_of_node: dict[int, str] = {}
        self._last_backward_layer = ""
        self.ran_again: dict[str, None] = {}
        self.of_node: str | None = None
        """Path of the module of the node that runs, of a graph that runs node by node."""

    @contextlib.contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[LayerTracker]:
        """Follows ``model`` in a block. Modules inside compiled ones get no hooks, which would compile them again, nor
        do TorchScript's, which take none: what runs there belongs to the module around them.
        """
        compiled = compiled_modules(model)
        with contextlib.ExitStack() as stack:
            for name, module in model.named_modules():
                if not inside(name, compiled) and not isinstance(module, torch.jit.ScriptModule):
                    entering = module.register_forward_pre_hook(guarded(self._enter(name)))
                    leaving = module.register_forward_hook(guarded(self._leave), always_call=True)
                    stack.enter_context(left_out_of_copies(entering))
                    stack.enter_context(left_out_of_copies(leaving))
            yield self

    def current(self) -> str:
        """Path of the innermost running module; in backward, of the module whose op is being differentiated."""
        if self.of_node is not None:
            return self.of_node
        node = backward_node()
        if node is None:
            layer = self.running[-1] if self.running else ""
            self._layer_of_node[last_sequence_number()] = layer
            return layer
        return self.layer_of(node)

    def layer_of(self, node: Any) -> str:
        """Path of the module that a node of backward differentiates."""
        # AccumulateGrad has no sequence number of its own: it belongs to the node before it.
        self._last_backward_layer = self._layer_of_node.get(sequence_number(node), self._last_backward_layer)
        return self._last_backward_layer

    def running_again(self, compiled: str | None = None) -> str:
        """Path of the outermost module that runs within backward, or ``compiled``; else of the one differentiated."""
        if self.running:
            return self.running[0]
        return self.current() if compiled is None else compiled

    def _enter(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            if not self.running and in_backward() and torch.is_grad_enabled():
                self.ran_again[name] = None
            self.running.append(name)

        return hook

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.running:
            self.running.pop()
