"""Operators on arrays of the host: shapes, axes and positions that a graph computes in addition to its tensors.

A shape is never a tensor, so it needs no op of the step and no copy from a device, and is in no profile.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .elementwise import TORCH_TYPES, axes_of
from .known import HOST, Function, integers, operator, operators
from .known import OnnxNode as Node
from .structure import asked_shape, slices, split_sizes

_ALL: dict[str, Function] = {
    name: getattr(np, name.lower())
    for name in ("Abs", "Add", "Ceil", "Cos", "Equal", "Exp", "Floor", "Greater", "Less", "Log", "Sin", "Sqrt")
} | {
    "And": np.logical_and,
    "GreaterOrEqual": np.greater_equal,
    "LessOrEqual": np.less_equal,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Sub": np.subtract,
}
"""Of one or more inputs; those above have numpy's name."""
_REDUCTIONS: dict[str, Function] = {
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
}


for _name, _function in _ALL.items():
    HOST[_name] = lambda node, *values, function=_function: np.asarray(
        functools.reduce(function, values) if len(values) > 1 else function(*values)
    )
for _name, _function in _REDUCTIONS.items():
    HOST[_name] = lambda node, value, axes=None, function=_function: np.asarray(
        function(value, tuple(axes_of(node, axes, value.ndim) or ()), keepdims=bool(node.attributes.get("keepdims", 1)))
    ).astype(value.dtype)


def _constant_of_shape(node: Node, shape: Any) -> np.ndarray:
    value = node.attributes.get("value", np.zeros(1, np.float32))
    return np.broadcast_to(value.reshape(()), integers(shape))


def _range(node: Node, *bounds: Any) -> np.ndarray:
    numbers: list[Any] = [np.asarray(number.tolist()) for number in bounds]
    return np.arange(*numbers)


def _cast(node: Node, value: np.ndarray) -> np.ndarray:
    name = str(TORCH_TYPES[node.attributes["to"]]).removeprefix("torch.")
    return value.astype(np.float32 if name == "bfloat16" else name)


def _div(node: Node, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if np.issubdtype(np.result_type(left, right), np.integer):
        return np.asarray(np.trunc(left / right)).astype(left.dtype)
    return np.asarray(left / right)


def _split(node: Node, value: np.ndarray, sizes: Any = None) -> Any:
    axis = node.attributes.get("axis", 0)
    ends = np.cumsum(split_sizes(node, value.shape[axis], sizes))
    parts = tuple(np.split(value, ends[:-1], axis))
    return parts if node.outputs > 1 else parts[0]


def _cumulative_sum(node: Node, value: np.ndarray, axis: Any) -> np.ndarray:
    along = integers(axis)[0]
    if node.attributes.get("reverse", 0):
        return np.flip(np.cumsum(np.flip(value, along), along), along)
    return np.cumsum(value, along)


_ALWAYS: dict[str, Function] = {
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Shape": lambda node, value: np.array(
        tuple(value.shape)[node.attributes.get("start", 0) : node.attributes.get("end", value.ndim)], np.int64
    ),
    "Size": lambda node, value: np.array(np.prod(tuple(value.shape), dtype=np.int64)),
}
"""Their results are on the host even if their inputs are tensors."""
operators(_ALWAYS)
operator("ConstantOfShape", on_host=(0,))(_ALWAYS["ConstantOfShape"])
operator("Range", no_weights=(0, 1, 2))(_ALWAYS["Range"])
HOST.update(
    _ALWAYS
    | {
        "Cast": _cast,
        "CumSum": _cumulative_sum,
        "Div": _div,
        "Split": _split,
        "Trilu": lambda node, value, diagonal=None: (np.triu if node.attributes.get("upper", 1) else np.tril)(
            value, 0 if diagonal is None else integers(diagonal)[0]
        ),
        "Identity": lambda node, value: value,
        "Mod": lambda node, left, right: np.asarray(
            (np.fmod if node.attributes.get("fmod", 0) else np.mod)(left, right)
        ),
        "Pow": lambda node, left, right: np.asarray(left**right).astype(left.dtype),
        "Where": lambda node, condition, left, right: np.where(condition, left, right),
        "Reshape": lambda node, value, shape: value.reshape(asked_shape(node, value.shape, integers(shape))),
        "Transpose": lambda node, value: value.transpose(node.attributes.get("perm")),
        "Squeeze": lambda node, value, axes=None: value.squeeze(None if axes is None else tuple(integers(axes))),
        "Unsqueeze": lambda node, value, axes: np.expand_dims(value, tuple(integers(axes))),
        "Concat": lambda node, *values: np.concatenate(values, node.attributes["axis"]),
        "Slice": lambda node, value, starts, ends, axes=None, steps=None: value[
            tuple(slices(value.shape, starts, ends, axes, steps))
        ],
        "Gather": lambda node, value, indices: np.asarray(np.take(value, indices, node.attributes.get("axis", 0))),
        "Expand": lambda node, value, shape: np.broadcast_to(
            value, np.broadcast_shapes(value.shape, tuple(integers(shape)))
        ),
        "Tile": lambda node, value, repeats: np.tile(value, integers(repeats)),
    }
)
