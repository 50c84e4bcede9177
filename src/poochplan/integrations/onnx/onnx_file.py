"""Reads an ONNX file. Refuses files that cannot be imported, in one line, before any module is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from poochplan.errors import UsageError

from .operators import OPERATORS

OPSETS = range(13, 29)
"""Supported versions of ONNX's operators."""
_LARGEST_TOLD = 1024
"""Initialisers with more elements determine no shape of another tensor, so shape inference does not get their data."""

_PREFIXES = re.compile(r"\[\w+Error\]|Inference error\(s\):")
_CONSTANTS = ("value", "value_float", "value_floats", "value_int", "value_ints")


def read_model(path: Path, *, weights: bool = True) -> ModelProto:
    """The model, checked by ONNX's own checker, with local functions expanded.

    Without ``weights`` those in another file are not read, and nodes are not checked.

    Raises ``UsageError`` if the file is missing or no ONNX, if its opset is not one of 13 to 28, or if a file with
    weights is missing. Also if a node is not supported or the checker refuses it; the message then names the node and
    its operator.
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
    found = opset_of(model)
    if found not in OPSETS:
        raise UsageError(
            f"{path}: expected opset {OPSETS[0]} to {OPSETS[-1]}, found {found or 'none'}; "
            "export it anew, or convert it by onnx.version_converter"
        )
    _load_external(path, model)
    if model.functions:
        from onnx import inliner

        model = inliner.inline_local_functions(model)
    for node in model.graph.node:
        check_node(path, node)
    check_graph(path, model)
    return model


def opset_of(model: ModelProto) -> int:
    """The version of ONNX's own operators; 0 if the file names none."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _load_external(path: Path, model: ModelProto) -> None:
    """Loads weights that are in other files next to this one."""
    external = (tensor for tensor in _tensors(model) if tensor.data_location == TensorProto.EXTERNAL)
    entries = (entry for tensor in external for entry in tensor.external_data)
    names = sorted({entry.value for entry in entries if entry.key == "location"})
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


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """All tensors of the file: initialisers, and those of nodes, including local functions."""
    yield from model.graph.initializer
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def check_node(path: Path, node: NodeProto) -> None:
    """Raises ``UsageError`` for a node in training mode, or with an unknown operator or attribute."""
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


def check_graph(path: Path, model: ModelProto) -> None:
    """Raises ``UsageError`` with the first fault that ONNX's own checker finds, and its node."""
    alone = _without_weights(model)
    for value in (*alone.graph.input, *alone.graph.output):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, []))  # inference gives the types
    opset = opset_of(model)
    for node in alone.graph.node:  # such as GroupNormalization before opset 21
        if onnx.defs.has(node.op_type, opset) and onnx.defs.get_schema(node.op_type, opset).deprecated:
            node.domain = "deprecated"  # the checker would refuse it, but ignores nodes of other domains
    alone.opset_import.append(helper.make_opsetid("deprecated", 1))
    try:
        onnx.checker.check_model(alone)
    except onnx.checker.ValidationError as error:
        line = " ".join(str(error).replace("==> Context:", "").split())
        raise UsageError(f"{path}: ONNX's checker refuses it: {line}; export it anew") from error


def _without_weights(model: ModelProto) -> ModelProto:
    """The same graph, with large initialisers as inputs of their type and shape, and a name for each node.

    It is small, because checker and inference take a model of at most 2 GiB.
    """
    graph = model.graph
    large = [tensor for tensor in graph.initializer if np.prod(tensor.dims, dtype=np.int64) > _LARGEST_TOLD]
    names = {tensor.name for tensor in large}
    inputs = [value for value in graph.input if value.name not in names]
    inputs += [helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in large]
    small = [tensor for tensor in graph.initializer if tensor.name not in names]
    alone = helper.make_graph(
        graph.node, graph.name or "graph", inputs, graph.output, small, value_info=graph.value_info
    )
    for node in alone.node:
        node.name = label_of(node)
    return helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version)


def _is_one_of(found: Any, values: tuple[Any, ...]) -> bool:
    if isinstance(found, float):
        return any(abs(found - value) < 1e-6 for value in values)
    return found in values


def label_of(node: NodeProto) -> str:
    """The node's name; without one, that of its first output."""
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
    name, value = next((name, value) for name, value in attributes_of(node).items() if name in _CONSTANTS)
    if name == "value":
        return np.asarray(value)
    return np.array(value, np.float32 if "float" in name else np.int64)


def dimensions_of(value: Any) -> list[int | str]:
    """The dimensions of a value's type: a number, a name, or empty if the file gives neither."""
    return [
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param
        for dimension in value.type.tensor_type.shape.dim
    ]


def known_shapes(path: Path, model: ModelProto) -> dict[str, tuple[int, ...]]:
    """The shapes of values for which the file, or inference from it, gives all dimensions.

    Raises ``UsageError`` for impossible types and shapes; the message names the node.
    """
    try:
        graph = onnx.shape_inference.infer_shapes(_without_weights(model), check_type=True, strict_mode=True).graph
    except onnx.shape_inference.InferenceError as error:
        line = " ".join(_PREFIXES.sub("", str(error)).split())
        raise UsageError(f"{path}: its types and shapes do not fit: {line}; export it anew") from error
    found = {}
    for value in (*graph.input, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            dimensions = dimensions_of(value)
            if all(isinstance(size, int) for size in dimensions):
                found[value.name] = tuple(int(size) for size in dimensions)
    return found
