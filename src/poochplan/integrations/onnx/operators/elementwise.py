"""Arithmetic: operators on single elements, reductions over axes, and sums along one axis."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from .known import Function, integers, operands, operator, operators, tensors, to_tensor
from .known import OnnxNode as Node

TORCH_TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""Torch's types by their numbers in ``onnx.TensorProto``. Torch lacks the other types, or cannot train with them."""

_OF_ONE: dict[str, Function] = {
    name: getattr(torch, name.lower(), None) or getattr(functional, name.lower())
    for name in (
        "Abs", "Acos", "Asin", "Atan", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "HardSwish", "IsNaN", "Log",
        "Mish", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign",
        "Sqrt", "Tan", "Tanh",
    )
} | {"Not": torch.logical_not}  # fmt: skip
"""Most have torch's name."""
_OF_TWO: dict[str, Function] = {"Add": torch.add, "Mul": torch.mul, "Pow": torch.pow, "Sub": torch.sub}
_COMPARED: dict[str, Function] = {
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
}


def _two(function: Function, node: Node, left: Any, right: Any) -> torch.Tensor:
    left, right = operands(left, right)
    if not isinstance(left, torch.Tensor) and function is not torch.pow:
        left = torch.as_tensor(left, dtype=right.dtype, device=right.device)
    elif not isinstance(right, torch.Tensor) and function in (torch.logical_and, torch.logical_or, torch.logical_xor):
        right = torch.as_tensor(right, device=left.device)
    return function(left, right)


def _one(function: Function, node: Node, value: Any) -> torch.Tensor:
    return function(to_tensor(value))


operators({name: functools.partial(_one, function) for name, function in _OF_ONE.items()})
operators({name: functools.partial(_two, function) for name, function in _OF_TWO.items()})
operators({name: functools.partial(_two, function) for name, function in _COMPARED.items()}, no_weights=(0, 1))


@operator("Div")
def _div(node: Node, left: Any, right: Any) -> torch.Tensor:
    left, right = operands(left, right)
    whole = not any(
        isinstance(value, float) or (torch.is_tensor(value) and value.is_floating_point()) for value in (left, right)
    )
    return torch.div(left, right, rounding_mode="trunc" if whole else None)


operators(
    {
        "Max": lambda node, *values: functools.reduce(torch.maximum, tensors(*values)),
        "Min": lambda node, *values: functools.reduce(torch.minimum, tensors(*values)),
    },
    no_weights=tuple(range(16)),
)


@operator("Clip", no_weights=(1, 2))
def _clip(node: Node, value: Any, low: Any = None, high: Any = None) -> torch.Tensor:
    low, high = (bound.item() if bound is not None and not torch.is_tensor(bound) else bound for bound in (low, high))
    return to_tensor(value) if low is None and high is None else torch.clamp(to_tensor(value), low, high)


@operator("Swish")
def _swish(node: Node, value: torch.Tensor) -> torch.Tensor:
    alpha = node.attributes.get("alpha", 1.0)
    return functional.silu(value) if alpha == 1.0 else value * torch.sigmoid(alpha * value)


operators(
    {
        "Celu": lambda node, value: functional.celu(value, node.attributes.get("alpha", 1.0)),
        "Elu": lambda node, value: functional.elu(value, node.attributes.get("alpha", 1.0)),
        "HardSigmoid": lambda node, value: torch.clamp(
            value * node.attributes.get("alpha", 0.2) + node.attributes.get("beta", 0.5), 0.0, 1.0
        ),
        "Identity": lambda node, value: value,
        "LeakyRelu": lambda node, value: functional.leaky_relu(value, node.attributes.get("alpha", 0.01)),
        "Mean": lambda node, *values: functools.reduce(torch.add, operands(*values)) / len(values),
        "Mod": lambda node, *values: (torch.fmod if node.attributes.get("fmod", 0) else torch.remainder)(
            *operands(*values)
        ),
        "Sum": lambda node, *values: functools.reduce(torch.add, operands(*values)),
        "ThresholdedRelu": lambda node, value: functional.threshold(value, node.attributes.get("alpha", 1.0), 0.0),
    }
)
operator("Cast", allowed={"to": tuple(TORCH_TYPES)})(
    lambda node, value: to_tensor(value).to(TORCH_TYPES[node.attributes["to"]])
)
operator("CastLike", no_weights=(1,))(lambda node, value, other: to_tensor(value).to(to_tensor(other).dtype))
operator("Dropout", no_weights=(1, 2))(
    lambda node, value, ratio=None, training_mode=None: functional.dropout(
        value, 0.5 if ratio is None else float(ratio.item()), training=node.training
    )
)
operator("Gelu", allowed={"approximate": ("none", "tanh")})(
    lambda node, value: functional.gelu(value, approximate=node.attributes.get("approximate", "none"))
)
operator("Selu", allowed={"alpha": (1.6732631921768188,), "gamma": (1.0507010221481323,)})(
    lambda node, value: functional.selu(value)
)
operator("Where", no_weights=(0,))(lambda node, *values: torch.where(*tensors(*values)))


@operator("PRelu")
def _prelu(node: Node, value: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    slope = to_tensor(slope, value.device)
    if slope.numel() == 1 or (slope.ndim == value.ndim - 1 and slope.shape[1:].numel() == 1):
        return functional.prelu(value, slope.reshape(-1))
    return torch.where(value >= 0, value, value * slope)


def _product(value: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    for axis in sorted((axis % value.ndim for axis in axes), reverse=True):
        value = torch.prod(value, axis, keepdim=keep)
    return value


_REDUCTIONS: dict[str, Function] = {
    "ReduceL1": lambda value, axes, keep: torch.sum(value.abs(), axes, keepdim=keep),
    "ReduceL2": lambda value, axes, keep: torch.linalg.vector_norm(value, 2, axes, keepdim=keep),
    "ReduceLogSum": lambda value, axes, keep: torch.log(torch.sum(value, axes, keepdim=keep)),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceSum": torch.sum,
    "ReduceSumSquare": lambda value, axes, keep: torch.sum(value.square(), axes, keepdim=keep),
}


def _reduced(function: Function, node: Node, value: Any, axes: Any = None) -> torch.Tensor:
    tensor = to_tensor(value)
    chosen = axes_of(node, axes, tensor.ndim)
    return tensor if chosen is None else function(tensor, chosen, bool(node.attributes.get("keepdims", 1)))


def axes_of(node: Node, axes: Any, ndim: int) -> list[int] | None:
    """The axes to reduce over: an attribute in older opsets, else an input. None reduces nothing."""
    chosen = node.attributes.get("axes") if axes is None else integers(axes)
    if chosen:
        return list(chosen)
    return None if node.attributes.get("noop_with_empty_axes", 0) else list(range(ndim))


operators({name: functools.partial(_reduced, function) for name, function in _REDUCTIONS.items()}, on_host=(1,))


def _place(function: Function, node: Node, value: torch.Tensor) -> torch.Tensor:
    return function(value, node.attributes.get("axis", 0), keepdim=bool(node.attributes.get("keepdims", 1)))


operators(
    {"ArgMax": functools.partial(_place, torch.argmax), "ArgMin": functools.partial(_place, torch.argmin)},
    allowed={"select_last_index": (0,)},
)


@operator("TopK", on_host=(1,), most_outputs=2)
def _top_k(node: Node, value: torch.Tensor, count: Any) -> Any:
    attributes = node.attributes
    axis, largest, ordered = (
        attributes.get(name, default) for name, default in (("axis", -1), ("largest", 1), ("sorted", 1))
    )
    found = torch.topk(value, integers(count)[0], axis, bool(largest), bool(ordered))
    return tuple(found) if node.outputs > 1 else found.values


@operator("CumSum", on_host=(1,), allowed={"exclusive": (0,)})
def _cumulative_sum(node: Node, value: Any, axis: Any) -> torch.Tensor:
    tensor, along = to_tensor(value), integers(axis)[0]
    if node.attributes.get("reverse", 0):
        return tensor.flip(along).cumsum(along).flip(along)
    return tensor.cumsum(along)
