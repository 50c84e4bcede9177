"""The inputs of an ONNX graph, and tensors drawn at random for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from onnx import ModelProto

from poochplan.errors import UsageError

from .onnx_file import dimensions_of
from .operators.elementwise import TORCH_TYPES

_PASSED_ON = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_TAKEN = ("loss", "optimizer", "constants", "parameters", "device")


@dataclass(frozen=True)
class GraphInput:
    """One input of the graph: its type, and its dimensions, a number or the name of a dynamic one."""

    name: str
    dtype: torch.dtype
    dimensions: tuple[int | str, ...]
    rows: int | None
    """Rows of the smallest table that its elements are looked up in; None where they are no indices."""

    def draw(self, sizes: Mapping[str, int], device: str) -> torch.Tensor:
        """Normally distributed floats, or indices below ``rows``; whole numbers that are no indices are ones."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.dimensions]
        if self.dtype.is_floating_point:
            return torch.randn(shape, dtype=self.dtype, device=device)
        if self.rows is not None:
            return torch.randint(0, self.rows, shape, dtype=self.dtype, device=device)
        return torch.ones(shape, dtype=self.dtype, device=device)


def inputs_of(path: Path, model: ModelProto) -> list[GraphInput]:
    """The graph's inputs in their order. A dynamic dimension without a name is called after its input: ``ids_0``.

    Raises ``UsageError`` for an input that is no tensor, or of a type that torch has not.
    """
    held = {tensor.name for tensor in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in held:
            continue
        kind = value.type.tensor_type
        if kind.elem_type not in TORCH_TYPES or not kind.HasField("shape"):
            raise UsageError(f"{path}: input {value.name!r}: expected a tensor of numbers with a shape, found another")
        dimensions = tuple(
            size if isinstance(size, int) else dimension_name(size or f"{value.name}_{axis}")
            for axis, size in enumerate(dimensions_of(value))
        )
        found.append(GraphInput(value.name, TORCH_TYPES[kind.elem_type], dimensions, _rows(model, value.name)))
    return found


def dimension_name(name: str) -> str:
    """The name as ``--set`` can write it."""
    plain = re.sub(r"\W", "_", name)
    if not plain.isidentifier():
        plain = f"_{plain}"
    return f"{plain}_size" if plain in _TAKEN else plain


def _rows(model: ModelProto, name: str) -> int | None:
    """The rows of the smallest constant table that the input is an index into, as it is or reshaped."""
    tables = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    same, found = {name}, []
    for node in model.graph.node:
        if node.op_type in _PASSED_ON and node.input[0] in same:
            same.add(node.output[0])
        if node.op_type == "Gather" and node.input[1] in same and node.input[0] in tables:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            found.append(tables[node.input[0]][axis])
    return min(found, default=None)
