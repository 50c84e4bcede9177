"""One node of an ONNX graph as a module: in profiles and plans it is a layer that goes by the node's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .operators import HOST, OPERATORS
from .operators.known import to_tensor


class OnnxNode(torch.nn.Module):
    """Runs one ONNX operator. It holds no weights: these are the graph's, and come as arguments.

    ``constants`` are inputs of the node, by their place, that no argument is given for: shapes, axes, single numbers.
    """

    def __init__(
        self,
        kind: str,
        attributes: Mapping[str, Any],
        constants: Mapping[int, np.ndarray],
        outputs: int,
        opset: int,
        on_host: bool,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.attributes = dict(attributes)
        self.constants = dict(constants)
        self.outputs = outputs
        self.opset = opset
        self.on_host = on_host

    def forward(self, *arguments: Any) -> Any:
        """What the operator gives: a tensor, a tuple of them, or an array where it computes a shape."""
        inputs, given = [], iter(arguments)
        for place in range(len(arguments) + len(self.constants)):
            inputs.append(self.constants[place] if place in self.constants else next(given))
        if self.on_host:
            return HOST[self.kind](self, *inputs)
        if inputs and isinstance(inputs[0], np.ndarray) and inputs[0].ndim:
            device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), None)
            inputs[0] = to_tensor(inputs[0], device)
        return OPERATORS[self.kind].function(self, *inputs)

    def extra_repr(self) -> str:
        return ", ".join([self.kind, *(f"{name}={value}" for name, value in self.attributes.items())])
