"""Tensors that an exporter made one because they were equal: each is one of its own again, or it is told."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from onnx import GraphProto, TensorProto

_INSERTED = re.compile(r"Identity(_\d+)?")
"""What torch's older exporter calls the nodes that it joins by. A model's own have a scope: ``/block/Identity``."""
_TENSOR = re.compile(r"(?!\d+$)\w[\w.]*")
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "PRelu")
_SHOWN = 3


def part_joined(graph: GraphProto) -> dict[str, str]:
    """Makes each further name of an initialiser one of its own; returns these, each with the name it was joined to.

    The older exporter of torch keeps one of several equal tensors and has the others be an Identity of it. Tensors that
    the module itself shares have one name in its files, so none of those is parted.
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
    """Warns where parameters were parted, and where several layers have one that cannot be parted."""
    names, readers = set(weights), defaultdict[str, list[str]](list)
    apart = sorted(name for name in parted if name in names)
    if apart:
        warnings.warn(
            f"{path}: {len(apart)} parameters were joined with equal ones ({_some(apart)}); "
            "each is a parameter of its own again",
            stacklevel=2,
        )
    for node in graph.node:
        if node.op_type in _LAYERS or node.op_type.endswith("Normalization"):
            for name in set(node.input[1:]) & names:
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
