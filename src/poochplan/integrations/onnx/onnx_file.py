"""Reads an ONNX file and refuses in one line what cannot be imported: before anything of torch is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from poochplan.errors import UsageError

from .operators import OPERATORS

OPSETS = range(13, 21)
"""The versions of ONNX's operators that are known."""

_CONSTANTS = ("value", "value_float", "value_floats", "value_int", "value_ints")


def read_model(path: Path, *, weights: bool = True) -> ModelProto:
    """The checked model: local functions are written out in the graph, shapes are inferred where they can be.

    Without ``weights`` those that lie in another file are not read, and what nodes there are is not checked.

    Raises
    ------
    UsageError
        The file is missing or no ONNX, its opset is not one of 13 to 20, weights that lie in another file are not
        there, or a node is none that the importer knows: the message names the node and its operator.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such ONNX file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's own errors have no public base
        raise UsageError(f"{path}: expected an ONNX model, found another file or a truncated one") from error
    if not model.HasField("graph") or not model.graph.output:
        raise UsageError(f"{path}: expected an ONNX model, found one without a graph; export it again")
    if not weights:
        return model
    _check_opset(path, model)
    _load_external(path, model)
    if model.functions:
        from onnx import inliner

        model = inliner.inline_local_functions(model)
    for node in model.graph.node:
        check_node(path, node)
    return model


def opset_of(model: ModelProto) -> int:
    """The version of ONNX's own operators; 0 where the file names none."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _check_opset(path: Path, model: ModelProto) -> None:
    found = opset_of(model)
    if found not in OPSETS:
        raise UsageError(
            f"{path}: expected opset {OPSETS[0]} to {OPSETS[-1]}, found {found or 'none'}; "
            "export it anew, or convert it by onnx.version_converter"
        )


def _load_external(path: Path, model: ModelProto) -> None:
    """Weights that the file keeps in others beside it."""
    names = sorted({location for tensor in model.graph.initializer for location in _locations(tensor)})
    for name in names:
        if not (path.parent / name).is_file():
            raise UsageError(
                f"{path}: its weights are external data, expected in {path.parent / name}, found no such file; "
                "put it there, or export with external_data=False"
            )
    if names:
        try:
            onnx.load_external_data_for_model(model, str(path.parent))
        except Exception as error:
            line = " ".join(str(error).split())
            raise UsageError(f"{path}: its external data cannot be read ({line}); export it anew") from error


def _locations(tensor: TensorProto) -> Iterator[str]:
    if tensor.data_location == TensorProto.EXTERNAL:
        yield from (entry.value for entry in tensor.external_data if entry.key == "location")


def check_node(path: Path, node: NodeProto) -> None:
    """Raises ``UsageError`` for a node of an unknown operator, in training mode, or of attributes that are unknown."""
    what = f"{path}: node {label_of(node)!r} ({node.op_type})"
    given = attributes_of(node)
    if node.domain not in ("", "ai.onnx") or (node.op_type not in OPERATORS and node.op_type != "Constant"):
        domain = f" of {node.domain}" if node.domain not in ("", "ai.onnx") else ""
        raise UsageError(f"{what}: operator {node.op_type}{domain} is not known; docs/onnx.md lists those that are")
    if node.op_type == "Constant":
        if not any(name in given for name in _CONSTANTS):
            raise UsageError(f"{what}: expected numbers, found {', '.join(given) or 'nothing'}; export it anew")
        return
    if given.get("training_mode", 0):
        raise UsageError(f"{what}: expected a graph for inference, found training mode; export after model.eval()")
    operator = OPERATORS[node.op_type]
    for name, values in operator.allowed.items():
        if name in given and not _is_one_of(given[name], values):
            listed = " or ".join(str(value) for value in values) or "none"
            raise UsageError(f"{what}: {name}: expected {listed}, found {given[name]}; export it another way")
    for place, name in operator.refused.items():
        if any(list(node.input)[place : place + 1]):
            raise UsageError(f"{what}: expected no input {name}, found one; export it another way")
    wrong = operator.check(given)
    if wrong:
        raise UsageError(f"{what}: {wrong}; export it another way")
    if operator.most_outputs is not None and any(list(node.output)[operator.most_outputs :]):
        raise UsageError(
            f"{what}: expected at most {operator.most_outputs} outputs, found {len(node.output)}; leave the others out"
        )


def _is_one_of(found: Any, values: tuple[Any, ...]) -> bool:
    if isinstance(found, float):
        return any(abs(found - value) < 1e-6 for value in values)
    return found in values


def label_of(node: NodeProto) -> str:
    """The node's name; one without a name goes by its first output."""
    return str(node.name or next(iter(node.output), ""))


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Attributes by name: numbers, lists of them, text, and arrays for tensors."""
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, TensorProto):
            value = numpy_helper.to_array(value)
        elif attribute.type == onnx.AttributeProto.STRINGS:
            value = [text.decode() for text in value]
        elif attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
            value = list(value)
        found[attribute.name] = value
    return found


def constant_of(node: NodeProto) -> np.ndarray:
    """What a Constant node holds."""
    name, value = next((name, value) for name, value in attributes_of(node).items() if name in _CONSTANTS)
    if name == "value":
        return np.asarray(value)
    return np.array(value, np.float32 if "float" in name else np.int64)


def dimensions_of(value: Any) -> list[int | str]:
    """The dimensions of a value's type: a number, or the name that the file gives it; empty where it has none."""
    return [
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param
        for dimension in value.type.tensor_type.shape.dim
    ]


def known_shapes(model: ModelProto) -> dict[str, tuple[int, ...]]:
    """The shapes of values that the file, or inference from it, knows to the last dimension."""
    try:
        graph: GraphProto = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # it is help, not a need: shapes that are not known are computed in each step
        graph = model.graph
    found = {}
    for value in (*graph.input, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            dimensions = dimensions_of(value)
            if all(isinstance(size, int) for size in dimensions):
                found[value.name] = tuple(int(size) for size in dimensions)
    return found
