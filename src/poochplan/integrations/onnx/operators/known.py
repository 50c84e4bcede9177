"""The table of ONNX operators: which function of torch runs each one, and what it asks of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


class Node(Protocol):
    """What a function knows of the node that it runs."""

    attributes: Mapping[str, Any]
    """The node's attributes, with text as ``str``, and tensors as arrays."""
    outputs: int
    """How many outputs the node has, unused ones at the end left out."""
    opset: int
    training: bool


Function = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One ONNX operator. Its function takes the node and then the inputs in their order, None for one left out."""

    name: str
    function: Function
    on_host: frozenset[int]
    """Inputs that are read as whole numbers: shapes, axes, pads. They are arrays or, at worst, tensors."""
    no_weights: frozenset[int]
    """Inputs that are never trained, though they may be of floats: bounds, fill values, scales."""
    allowed: Mapping[str, tuple[Any, ...]]
    """Attributes of which only these values are known; an attribute that is not given is allowed."""
    most_outputs: int | None
    """Later outputs are refused where the file uses them; None knows them all."""
    refused: Mapping[int, str]
    """Inputs that a node must not have, and what they are called."""
    check: Callable[[Mapping[str, Any]], str]
    """What is wrong with a node's attributes together, as ``expected ..., found ...``; empty where nothing is."""


OPERATORS: dict[str, Operator] = {}
"""Every operator that the importer knows, by its ONNX name."""

HOST: dict[str, Function] = {}
"""The operators that also run on arrays of the host: those that shapes are computed with."""


def operator(
    *names: str,
    on_host: tuple[int, ...] = (),
    no_weights: tuple[int, ...] = (),
    allowed: Mapping[str, tuple[Any, ...]] | None = None,
    most_outputs: int | None = 1,
    refused: Mapping[int, str] | None = None,
    check: Callable[[Mapping[str, Any]], str] = lambda attributes: "",
) -> Callable[[Function], Function]:
    """Puts a function into the table under each of the names."""

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
    """An array as a tensor of the same type; a tensor stays what it is."""
    if isinstance(value, torch.Tensor):
        return value
    if value.dtype.name == "bfloat16":
        return torch.tensor(value.astype(np.float32), dtype=torch.bfloat16, device=device)
    if value.size > 1 and not any(value.strides):  # one number, expanded: this way it can be computed again
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
