"""Imports an ONNX graph to ``torch.fx``: a node for each ONNX node, weights as parameters, shapes as host arrays."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, NodeProto, numpy_helper
from torch import fx

from poochplan.errors import PoochError, UsageError

from .onnx_file import attributes_of, constant_of, known_shapes, label_of, read_model
from .operators import HOST, OPERATORS
from .operators.known import OnnxNode, to_tensor
from .operators.layers import NAMES, torch_weights
from .weights import parameters_of, part_joined, tell_joined

_LARGEST_FOLDED = 1 << 24
"""A constant result with more elements is computed in each step, and not stored."""
_STATISTICS = {3: "running_mean", 4: "running_var"}
_RECURRENT = ("LSTM", "GRU", "RNN")


def load(path: str | Path, *, parameters: Iterable[str] = (), constants: Iterable[str] = ()) -> fx.GraphModule:
    """The model of an ONNX file (opset 13 to 28) as a graph of ``torch.fx``, in eval mode, on the CPU.

    It takes the file's inputs in their order, and returns its output, or a tuple of several. Each ONNX node is one node
    of the graph and one submodule, named after it. Dynamic dimensions stay dynamic. Weights are parameters with the
    names in the file, so the ``state_dict()`` of an unoptimised export is that of the exported module. ``parameters``
    and ``constants`` name initialisers that :func:`~poochplan.integrations.onnx.weights.parameters_of` would classify
    wrongly. After ``train()`` batch normalisation and dropout behave as in training.

    Raises ``UsageError`` if the file cannot be read, is no valid ONNX, or has a node that the importer does not
    support; the message names the node.
    """
    where = Path(path)
    return GraphImport(where, read_model(where), parameters, constants).module()


class GraphImport:
    """State: the part of the graph that has been translated so far."""

    def __init__(self, path: Path, model: ModelProto, parameters: Iterable[str], constants: Iterable[str]) -> None:
        self.path, self.model, self.graph = path, model, fx.Graph()
        self.root = torch.nn.Module()
        self.values: dict[str, fx.Node] = {}
        """Values of the running graph: results of nodes, and the graph's inputs."""
        self.host: set[str] = set()
        """Those of ``values`` that are arrays: shapes and results computed from shapes alone."""
        parted = part_joined(model.graph)
        self.arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        """Known values: initialisers, constants, and results computed from these alone."""
        self.weights = parameters_of(path, model.graph, self.arrays, parameters, constants)
        tell_joined(path, model.graph, parted, self.weights)
        self.uses = Counter(name for node in model.graph.node for name in node.input)
        self.shapes = known_shapes(path, model)
        self.held: dict[str, str] = {}
        """By name in the file: the name of the module's tensor."""

    def module(self) -> fx.GraphModule:
        for value in self.model.graph.input:
            if value.name not in self.arrays:
                self.values[value.name] = self.graph.placeholder(self._argument_name(value.name))
        for node in self.model.graph.node:
            if not self._folded(node):
                self._add(node)
        outputs = [self._output(value.name) for value in self.model.graph.output]
        self.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        return fx.GraphModule(self.root, self.graph, class_name=_identifier(self.path.stem) or "Model").eval()

    def _argument_name(self, name: str) -> str:
        """A unique Python name for an input, because it becomes a parameter in the code of ``forward``."""
        plain = _identifier(name)
        plain = plain if plain.isidentifier() else f"input_{plain}"
        taken = {node.target for node in self.graph.nodes}
        while plain in taken:
            plain += "_"
        return plain

    def _output(self, name: str) -> fx.Node:
        if name in self.values:
            return self.values[name]
        if name not in self.arrays:
            raise UsageError(f"{self.path}: output {name!r} is made by no node; export it anew")
        return self._tensor(name)

    def _folded(self, node: NodeProto) -> bool:
        """Whether the node's outputs are known without running it. If so, adds them to the arrays."""
        if node.op_type == "Constant":
            self.arrays[node.output[0]] = constant_of(node)
            return True
        names = [name for name in node.input if name]
        shape = self.shapes.get(node.input[0]) if node.op_type in ("Shape", "Size") else None
        known = all(name in self.arrays and name not in self.weights for name in names)
        if node.op_type not in HOST or not (known or shape is not None):
            return False
        inputs: list[Any] = [self.arrays.get(name) for name in node.input]
        if shape is not None:
            inputs = [np.broadcast_to(np.int64(0), shape)]
        found = self._computed(node, inputs)
        if sum(array.size for array in found) > _LARGEST_FOLDED:
            return False
        self.arrays.update(zip(node.output, found, strict=False))
        return True

    def _computed(self, node: NodeProto, inputs: list[Any]) -> tuple[np.ndarray, ...]:
        try:
            found = HOST[node.op_type](self._module_for(node, {}, on_host=True), *inputs)
        except PoochError:
            raise
        except Exception as error:
            line = " ".join(str(error).split())
            raise self._wrong(node, f" ({node.op_type}) cannot be computed: {line}; export it anew") from error
        return found if isinstance(found, tuple) else (found,)

    def _add(self, node: NodeProto) -> None:
        """Adds one node to the graph, and a submodule that runs it."""
        self._refuse_training(node)
        on_host = self._runs_on_host(node)
        constants: dict[int, np.ndarray] = {}
        arguments: list[Any] = []
        for place, name in enumerate(_inputs(node)):
            if self._is_held_by_node(node, place, name, on_host):
                constants[place] = self.arrays[name]
            elif node.op_type in _RECURRENT and place in (1, 2, 3):
                arguments.append(self._recurrent(node, place))
            else:
                arguments.append(self._argument(node, place, name))
        module = self._module_for(node, constants, on_host)
        target = self._free_name(_identifier(label_of(node)))
        self.root.add_module(target, module)
        made = self.graph.call_module(target, tuple(arguments))
        made.meta["onnx"] = (label_of(node), node.op_type)
        for place, name in enumerate(node.output):
            if name:
                self.values[name] = made if module.outputs == 1 else self.graph.call_function(getitem, (made, place))
        if on_host:
            self.host.update(node.output)

    def _wrong(self, node: NodeProto, found: str) -> UsageError:
        return UsageError(f"{self.path}: node {label_of(node)!r}{found}")

    def _refuse_training(self, node: NodeProto) -> None:
        mode = node.input[2] if node.op_type == "Dropout" and len(node.input) > 2 else ""
        if mode and np.any(self.arrays.get(mode, True)):
            found = " (Dropout): expected a graph for inference, found training mode; export after model.eval()"
            raise self._wrong(node, found)

    def _module_for(self, node: NodeProto, constants: dict[int, np.ndarray], on_host: bool) -> OnnxNode:
        used = [place for place, name in enumerate(node.output) if name]
        return OnnxNode(node.op_type, attributes_of(node), constants, max(used, default=0) + 1, on_host)

    def _runs_on_host(self, node: NodeProto) -> bool:
        """Whether a node runs on the host: shapes, and results of shapes alone without constants of two dimensions."""
        if node.op_type in ("Shape", "Size", "Range", "ConstantOfShape"):
            return True
        asked = OPERATORS[node.op_type].on_host
        names = [name for place, name in enumerate(node.input) if name and place not in asked]
        plain = all(
            name in self.host or (name in self.arrays and name not in self.weights and self.arrays[name].ndim < 2)
            for name in names
        )
        return node.op_type in HOST and plain

    def _is_held_by_node(self, node: NodeProto, place: int, name: str, on_host: bool) -> bool:
        if name not in self.arrays or name in self.weights:
            return False
        is_shape = on_host or place in OPERATORS[node.op_type].on_host
        return is_shape or (self.arrays[name].size == 1 and node.op_type not in _RECURRENT)

    def _argument(self, node: NodeProto, place: int, name: str) -> fx.Node | None:
        if not name:
            return None
        is_statistic = node.op_type == "BatchNormalization" and place in _STATISTICS
        if is_statistic and name in self.values:
            found = f"expected a constant {_STATISTICS[place]}, found {name!r}, which a node makes"
            raise self._wrong(node, f" (BatchNormalization): {found}; export with dynamo=True and optimize=False")
        if name in self.values:
            return self.values[name]
        if name not in self.arrays:
            raise self._wrong(node, f" reads {name!r}, which nothing makes; export it anew")
        if is_statistic and name in self.weights:
            return self._tensor(f"{_identifier(label_of(node))}.{_STATISTICS[place]}", self.arrays[name])
        return self._tensor(name)

    def _recurrent(self, node: NodeProto, place: int) -> Any:
        """Converts constant weights to those of ``torch.nn``, which replace the first; other weights stay unchanged."""
        names = [name for name in _inputs(node)[1:4] if name]
        if not all(name in self.weights and self.uses[name] == 1 for name in names):
            name = _inputs(node)[place] if place < len(_inputs(node)) else ""
            return self._argument(node, place, name)
        if place > 1:
            return None
        parts = [to_tensor(self.arrays[name]) for name in names]
        found = torch_weights(node.op_type, parts[0], parts[1], parts[2] if len(parts) == 3 else None)
        each = 4 if len(parts) == 3 else 2
        label = self._free_name(_identifier(label_of(node)) + "_weights")
        made = []
        for index, tensor in enumerate(found):
            name = f"{label}.{NAMES[index % each]}_l0{'_reverse' if index >= each else ''}"
            made.append(self.graph.get_attr(self._hold(name, torch.nn.Parameter(tensor.clone()))))
        return made

    def _tensor(self, name: str, array: np.ndarray | None = None) -> fx.Node:
        """The graph's node for a parameter or a buffer of the module."""
        if name not in self.held:
            tensor = to_tensor(self.arrays[name] if array is None else array)
            self.held[name] = self._hold(name, torch.nn.Parameter(tensor) if name in self.weights else tensor)
        return self.graph.get_attr(self.held[name])

    def _hold(self, name: str, tensor: torch.Tensor) -> str:
        """Registers the tensor under the file's name, or a similar valid one; returns the registered name."""
        path = [_plain(re.sub(r"\W", "_", part)) for part in name.split(".") if part] or ["weight"]
        owner = self.root
        for part in path[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
            if not isinstance(owner, torch.nn.Module):
                return self._hold("_".join(path), tensor)
        if hasattr(owner, path[-1]):
            return self._hold("_".join([*path, "1"]), tensor)
        if isinstance(tensor, torch.nn.Parameter):
            owner.register_parameter(path[-1], tensor)
        else:
            owner.register_buffer(path[-1], tensor)
        return ".".join(path)

    def _free_name(self, name: str) -> str:
        name, wanted, count = name or "node", name or "node", 1
        while hasattr(self.root, name):
            name, count = f"{wanted}_{count}", count + 1
        return name


def _inputs(node: NodeProto) -> list[str]:
    """Names of the inputs, without omitted ones at the end."""
    names = list(node.input)
    while names and not names[-1]:
        names.pop()
    return names


def _identifier(name: str) -> str:
    """The name with only letters, digits and underscores, for use in code."""
    return _plain(re.sub(r"\W+", "_", name).strip("_"))


def _plain(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) else name
