"""Finds the weights among an ONNX graph's constants, and those that an exporter joined: the file names neither."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from poochplan.errors import UsageError

from .operators import OPERATORS

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Sum", "Mean", "Where", "Expand", "Concat")
"""Operators for weights and plain numbers. A single number is no weight there, unless it is a bias."""
_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")
_LARGEST = 1e30
"""Masks have minus infinity, or the least number of their type. No weight is as large as this."""

Use = tuple[NodeProto, int]
_INSERTED = re.compile(r"Identity(_\d+)?")
"""Names of the nodes by which torch's older exporter joins weights. A model's own have a scope: ``/block/Identity``."""
_TENSOR = re.compile(r"(?!\d+$)\w[\w.]*")
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "PRelu")
_SHOWN = 3


def parameters_of(
    path: object,
    graph: GraphProto,
    arrays: Mapping[str, np.ndarray],
    parameters: Iterable[str] = (),
    constants: Iterable[str] = (),
) -> set[str]:
    """The names of initialisers that are trained.

    A weight has floats and at least one dimension, and is an input for weights of Conv, Gemm, MatMul, LSTM, a
    normalisation, Gather, arithmetic or an operator that moves elements. Running statistics, bounds, fill values,
    scales, and tensors with an infinity are no weights. A single number in arithmetic is one only if it is added to a
    product. ``parameters`` and ``constants`` name exceptions.

    Raises ``UsageError`` if one of these names is no initialiser of floats.
    """
    forced, denied = set(parameters), set(constants)
    for name in sorted(forced | denied):
        if name not in arrays or not _is_float(arrays[name]):
            known = ", ".join(sorted(key for key, array in arrays.items() if _is_float(array))) or "none"
            raise UsageError(f"{path}: no initialiser of floats is named {name!r}; those there are: {known}")
    uses: defaultdict[str, list[Use]] = defaultdict(list)
    for node in graph.node:
        for slot, name in enumerate(node.input):
            uses[name].append((node, slot))
    made_by = {output: node.op_type for node in graph.node for output in node.output}
    found = {
        name
        for name, array in arrays.items()
        if _is_float(array) and _can_be_weight(array) and any(_is_weight(use, array, made_by) for use in uses[name])
    }
    return (found | forced) - denied


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _can_be_weight(array: np.ndarray) -> bool:
    values = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    return array.ndim > 0 and bool(np.abs(values).max(initial=0.0) < min(_LARGEST, float(np.finfo(values.dtype).max)))


def _is_weight(use: Use, array: np.ndarray, made_by: Mapping[str, str]) -> bool:
    node, slot = use
    known = OPERATORS.get(node.op_type)
    if known is None or slot in (*known.on_host, *known.no_weights):
        return False
    if array.size > 1 or node.op_type not in _ARITHMETIC:
        return True
    other = next((name for index, name in enumerate(node.input) if index != slot), "")
    return node.op_type == "Add" and made_by.get(other) in _PRODUCTS


def part_joined(graph: GraphProto) -> dict[str, str]:
    """Separates joined initialisers. Returns the new ones by name, each with the name that it was joined to.

    The older exporter of torch keeps one of several equal tensors, and makes the others an Identity of it. Tensors that
    the module itself shares have one name in its files, so they stay joined.
    """
    held = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, str] = {}
    outputs = {value.name for value in graph.output}
    for node in list(graph.node):
        is_inserted = node.op_type == "Identity" and _INSERTED.fullmatch(node.name) and node.input[0] in held
        name = node.output[0] if node.output else ""
        if not is_inserted or name in outputs or not _TENSOR.fullmatch(name):
            continue
        found[name] = node.input[0]
        own = TensorProto()
        own.CopyFrom(held[node.input[0]])
        own.name = name
        graph.initializer.append(own)
        held[name] = own
        graph.node.remove(node)
    return found


def tell_joined(path: Path, graph: GraphProto, parted: dict[str, str], weights: Iterable[str]) -> None:
    """Warns if parameters were separated, or if several layers share one that cannot be separated."""
    names, readers = set(weights), defaultdict[str, list[str]](list)
    apart = sorted(name for name in parted if name in names)
    if apart:
        warnings.warn(
            f"{path}: {len(apart)} parameters were joined with equal ones ({_some(apart)}); "
            "each is a parameter of its own again",
            stacklevel=2,
        )
    made_by = {output: node.op_type for node in graph.node for output in node.output}
    for node in graph.node:
        is_bias = node.op_type == "Add" and any(made_by.get(name) in _PRODUCTS for name in node.input)
        if is_bias or node.op_type in _LAYERS or node.op_type.endswith("Normalization"):
            for name in set(node.input if is_bias else node.input[1:]) & names:
                readers[name].append(node.name or node.output[0])
    shared = sorted(name for name, found in readers.items() if len(found) > 1)
    if shared:
        warnings.warn(
            f"{path}: several layers have one parameter ({_some(shared)}): the module shares it, or an exporter joined "
            "equal ones, and the gradients are those of another model; export with optimize=False to keep them apart",
            stacklevel=2,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
