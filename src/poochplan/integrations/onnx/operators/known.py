"""The table of ONNX operators: the function of torch for each one, and the requirements on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Function = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One ONNX operator. Its function takes the node, then the inputs in their order; omitted ones are None."""

    function: Function
    on_host: tuple[int, ...] = ()
    """Inputs that are read as whole numbers: shapes, axes, pads. They are usually arrays, and sometimes tensors."""
    no_weights: tuple[int, ...] = ()
    """Further inputs that may have floats, but are never trained: bounds, fill values, scales."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """By attribute: the supported values. A missing attribute is allowed."""
    most_outputs: int | None = 1
    """Number of supported outputs; a file that uses later ones is refused. None supports all."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Inputs that a node must not have, with their names."""
    check: Callable[[Mapping[str, Any]], str] = lambda attributes: ""
    """Returns the fault of a combination of attributes, as ``expected ..., found ...``; empty if there is none."""


OPERATORS: dict[str, Operator] = {}
"""Every supported operator, by its ONNX name."""

HOST: dict[str, Function] = {}
"""Operators that also run on arrays of the host, to compute shapes."""


def operator(name: str, **facts: Any) -> Callable[[Function], Function]:
    """Registers a function in the table under that name; ``facts`` are the other fields of :class:`Operator`."""

    def register(function: Function) -> Function:
        OPERATORS[name] = Operator(function, **facts)
        return function

    return register


def operators(functions: Mapping[str, Function], **facts: Any) -> None:
    """Registers each function under its name; ``facts`` are the other fields of each."""
    for name, function in functions.items():
        operator(name, **facts)(function)


def integers(value: Any) -> list[int]:
    """The whole numbers of an input such as a shape, whether it is on the host or not."""
    return [int(number) for number in np.atleast_1d(np.asarray(value.tolist()))]


def to_tensor(value: Any, device: torch.device | None = None) -> torch.Tensor:
    """An array as a tensor of the same type; a tensor unchanged."""
    if isinstance(value, torch.Tensor):
        return value
    if value.dtype.name == "bfloat16":
        return torch.tensor(value.astype(np.float32), dtype=torch.bfloat16, device=device)
    if value.size > 1 and not any(value.strides):  # one number, expanded: a replay can compute it again
        return torch.full(value.shape, value.flat[0].item(), dtype=torch.tensor(value.flat[0]).dtype, device=device)
    return torch.tensor(value.copy(), device=device)


def device_of(values: Iterable[Any]) -> torch.device | None:
    """Of the first tensor among them."""
    return next((value.device for value in values if isinstance(value, torch.Tensor)), None)


def tensors(*values: Any) -> list[torch.Tensor]:
    """All as tensors of one device."""
    device = device_of(values)
    return [to_tensor(value, device) for value in values]


def operands(*values: Any) -> list[Any]:
    """Inputs of an elementwise operator: an array of one number becomes that number, any other a tensor.

    At least one of them is a tensor afterwards.
    """
    device = device_of(values)
    if device is None:
        return tensors(*values)
    deepest = max(value.ndim for value in values if isinstance(value, torch.Tensor))
    return [
        value.item()
        if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= deepest
        else to_tensor(value, device)
        for value in values
    ]


class OnnxNode(torch.nn.Module):
    """Runs one ONNX operator. Weights belong to the graph, and are arguments.

    ``attributes`` have text as ``str``, and tensors as arrays. ``constants`` are inputs of the node that are no
    arguments, by position: shapes, axes, single numbers. ``outputs`` is their number, without unused ones at the end.
    """

    def __init__(
        self,
        kind: str,
        attributes: Mapping[str, Any],
        constants: Mapping[int, np.ndarray],
        outputs: int,
        on_host: bool,
    ) -> None:
        super().__init__()
        self.kind, self.attributes, self.constants = kind, dict(attributes), dict(constants)
        self.outputs, self.on_host = outputs, on_host

    def forward(self, *arguments: Any) -> Any:
        """The operator's result: a tensor, a tuple of them, or an array if it computes a shape."""
        inputs, given = [], iter(arguments)
        for place in range(len(arguments) + len(self.constants)):
            inputs.append(self.constants[place] if place in self.constants else next(given))
        if self.on_host:
            return HOST[self.kind](self, *inputs)
        if inputs and isinstance(inputs[0], np.ndarray) and inputs[0].ndim:
            inputs[0] = to_tensor(inputs[0], device_of(inputs))
        return OPERATORS[self.kind].function(self, *inputs)

    def extra_repr(self) -> str:
        return ", ".join([self.kind, *(f"{name}={value}" for name, value in self.attributes.items())])
