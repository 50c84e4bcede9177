"""The table of ONNX operators: the function of torch for each one, and the requirements on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


class Node(Protocol):
    """The node that a function runs."""

    attributes: Mapping[str, Any]
    """The node's attributes, with text as ``str``, and tensors as arrays."""
    outputs: int
    """Number of outputs, without unused ones at the end."""
    opset: int
    training: bool


Function = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One ONNX operator. Its function takes the node, then the inputs in their order; omitted ones are None."""

    name: str
    function: Function
    on_host: frozenset[int]
    """Inputs that are read as whole numbers: shapes, axes, pads. They are usually arrays, and sometimes tensors."""
    no_weights: frozenset[int]
    """Inputs that may have floats, but are never trained: bounds, fill values, scales."""
    allowed: Mapping[str, tuple[Any, ...]]
    """By attribute: the supported values. A missing attribute is allowed."""
    most_outputs: int | None
    """Number of supported outputs; a file that uses later ones is refused. None supports all."""
    refused: Mapping[int, str]
    """Inputs that a node must not have, with their names."""
    check: Callable[[Mapping[str, Any]], str]
    """Returns the fault of a combination of attributes, as ``expected ..., found ...``; empty if there is none."""


OPERATORS: dict[str, Operator] = {}
"""Every supported operator, by its ONNX name."""

HOST: dict[str, Function] = {}
"""Operators that also run on arrays of the host, to compute shapes."""


def operator(
    *names: str,
    on_host: tuple[int, ...] = (),
    no_weights: tuple[int, ...] = (),
    allowed: Mapping[str, tuple[Any, ...]] | None = None,
    most_outputs: int | None = 1,
    refused: Mapping[int, str] | None = None,
    check: Callable[[Mapping[str, Any]], str] = lambda attributes: "",
) -> Callable[[Function], Function]:
    """Registers a function in the table under each of the names."""

    def register(function: Function) -> Function:
        for name in names:
            OPERATORS[name] = Operator(
                name=name,
                function=function,
                on_host=frozenset(on_host),
                no_weights=frozenset((*on_host, *no_weights)),
                allowed=allowed or {},
                most_outputs=most_outputs,
                refused=refused or {},
                check=check,
            )
        return function

    return register


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


def operands(*values: Any) -> list[Any]:
    """Inputs of an elementwise operator: an array of one number becomes that number, any other a tensor.

    At least one of them is a tensor afterwards.
    """
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    if device is None:
        return [to_tensor(value) for value in values]
    deepest = max(value.ndim for value in values if isinstance(value, torch.Tensor))
    return [
        value.item()
        if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= deepest
        else to_tensor(value, device)
        for value in values
    ]
