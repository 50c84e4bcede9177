"""The training step of an ONNX file: its model, random inputs, a loss, and an optimizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from onnx import ModelProto
from torch.nn import functional

from poochplan.errors import UsageError

from .importing import GraphImport
from .onnx_file import dimensions_of, read_model
from .operators.elementwise import TORCH_TYPES

Made = TypeVar("Made")
Step = Callable[[], torch.Tensor]
Loss = Callable[..., Any]
Build = Callable[[torch.nn.Module, Step, torch.optim.Optimizer | None], Made]

_LOSSES = "mse, cross-entropy or file.py:function"
_OWN: dict[str, tuple[Any, Any]] = {
    "loss": (str, ""),
    "optimizer": (Literal["adamw", "sgd", "none"], "adamw"),
    "parameters": (list[str], []),
    "constants": (list[str], []),
    "device": (str, "cpu"),
}
"""The parameters that every file has, with their types and defaults."""

_PASSED_ON = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators whose result has the same numbers as the input."""


def training_function(path: Path, build: Build[Made], find: Callable[[str], Loss]) -> Callable[..., Made]:
    """A function that builds the file's training step. It has one keyword for each dynamic dimension of the inputs.

    Other keywords are ``loss`` (``mse``, ``cross-entropy`` or a name for ``find``), ``optimizer``, ``device``, and
    ``parameters`` and ``constants`` of :func:`~poochplan.integrations.onnx.importing.load`. ``build`` gets the model
    in training mode, the step and the optimizer.

    Raises ``UsageError`` if the file cannot be read. The function raises it for invalid arguments and nodes.
    """
    model = read_model(path, weights=False)
    dynamic = dict.fromkeys(
        size for given in inputs_of(path, model) for size in given.dimensions if isinstance(size, str)
    )

    def training(**asked: Any) -> Made:
        own = {name: asked.pop(name, default) for name, (_, default) in _OWN.items()}
        return build(*_training(path, asked, own, find))

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, annotation=int) for name in dynamic]
    parameters += [
        inspect.Parameter(name, kind, annotation=hint, default=default) for name, (hint, default) in _OWN.items()
    ]
    training.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    training.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return training


def _training(
    path: Path, sizes: Mapping[str, int], own: Mapping[str, Any], find: Callable[[str], Loss]
) -> tuple[torch.nn.Module, Step, torch.optim.Optimizer | None]:
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{path}: dimension {name!r}: expected at least 1, found {size}; correct --set {name}")
    name = own["loss"]
    if not name:
        raise UsageError(f"{path}: expected a loss, found none; give --loss {_LOSSES}")
    if name not in ("mse", "cross-entropy") and ":" not in name:
        raise UsageError(f"{path}: loss: expected {_LOSSES}, found {name!r}")
    custom = find(name) if ":" in name else None
    read = read_model(path)
    model = GraphImport(path, read, own["parameters"], own["constants"]).module().to(own["device"])
    inputs = [given.draw(sizes, own["device"]) for given in inputs_of(path, read)]
    if custom is None:
        shape = _output_shape(path, model, inputs, read.graph.output, sizes)
        loss = _own_loss(path, name, shape, own["device"])
    else:
        loss = custom

    def step() -> torch.Tensor:
        found = model(*inputs)
        return loss(*found) if isinstance(found, tuple) else loss(found)

    model.train()
    return model, step, _optimizer(path, model, own["optimizer"])


def _optimizer(path: Path, model: torch.nn.Module, name: str) -> torch.optim.Optimizer | None:
    weights = list(model.parameters())
    if not weights:
        raise UsageError(f"{path}: expected weights to train, found none; name them by --set 'parameters=[\"NAME\"]'")
    if name == "none":
        return None
    return torch.optim.AdamW(weights) if name == "adamw" else torch.optim.SGD(weights, lr=0.01, momentum=0.9)


def _output_shape(
    path: Path, model: torch.nn.Module, inputs: list[torch.Tensor], outputs: Any, sizes: Mapping[str, int]
) -> list[int]:
    """The shape of the only output: from the file, else from a forward pass in eval mode."""
    if len(outputs) != 1:
        raise UsageError(
            f"{path}: mse and cross-entropy take one output, found {len(outputs)}; give --loss file.py:function"
        )
    shape = [
        size if isinstance(size, int) else sizes.get(dimension_name(size), 0) for size in dimensions_of(outputs[0])
    ]
    if shape and all(shape):
        return shape
    with torch.no_grad():
        return list(model.eval()(*inputs).shape)


def _own_loss(path: Path, name: str, shape: list[int], device: str) -> Loss:
    """Cross-entropy over the last dimension of (batch, classes) and (batch, length, classes), else over the second."""
    if name == "mse":
        target = torch.randn(shape, device=device)
        return lambda found: functional.mse_loss(found, target)
    if len(shape) < 2:
        raise UsageError(
            f"{path}: cross-entropy: expected an output with classes, found shape {shape}; give --loss mse"
        )
    if len(shape) == 3:
        target = torch.randint(0, shape[2], (shape[0] * shape[1],), device=device)
        return lambda found: functional.cross_entropy(found.flatten(0, 1), target)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device)
    return lambda found: functional.cross_entropy(found, target)


@dataclass(frozen=True)
class GraphInput:
    """One input of the graph: its type, and its dimensions, each a number or the name of a dynamic one."""

    name: str
    dtype: torch.dtype
    dimensions: tuple[int | str, ...]
    rows: int | None
    """Rows of the smallest table that the elements are indices for; None if they are no indices."""

    def draw(self, sizes: Mapping[str, int], device: str) -> torch.Tensor:
        """Random contents: normally distributed floats, or indices below ``rows``. Other whole numbers are ones."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.dimensions]
        if self.dtype.is_floating_point:
            return torch.randn(shape, dtype=self.dtype, device=device)
        if self.rows is not None:
            return torch.randint(0, self.rows, shape, dtype=self.dtype, device=device)
        return torch.ones(shape, dtype=self.dtype, device=device)


def inputs_of(path: Path, model: ModelProto) -> list[GraphInput]:
    """The graph's inputs in their order. A dynamic dimension without a name gets one from its input: ``ids_0``.

    Raises ``UsageError`` for an input that is no tensor, or has a type that torch lacks.
    """
    held = {tensor.name for tensor in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in held:
            continue
        kind = value.type.tensor_type
        if kind.elem_type not in TORCH_TYPES or not kind.HasField("shape"):
            raise UsageError(
                f"{path}: input {value.name!r}: expected a tensor of numbers with a shape, found another; "
                "export the model with tensors as inputs"
            )
        dimensions = tuple(
            size if isinstance(size, int) else dimension_name(size or f"{value.name}_{axis}")
            for axis, size in enumerate(dimensions_of(value))
        )
        found.append(GraphInput(value.name, TORCH_TYPES[kind.elem_type], dimensions, _rows(model, value.name)))
    return found


def dimension_name(name: str) -> str:
    """The name in a form for ``--set``."""
    plain = re.sub(r"\W", "_", name)
    if not plain.isidentifier():
        plain = f"_{plain}"
    return f"{plain}_size" if plain in _OWN else plain


def _rows(model: ModelProto, name: str) -> int | None:
    """Rows of the smallest constant table that the input, possibly reshaped, is an index for."""
    tables = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    same, found = {name}, []
    for node in model.graph.node:
        if node.op_type in _PASSED_ON and node.input[0] in same:
            same.add(node.output[0])
        if node.op_type == "Gather" and node.input[1] in same and node.input[0] in tables:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            found.append(tables[node.input[0]][axis])
    return min(found, default=None)
