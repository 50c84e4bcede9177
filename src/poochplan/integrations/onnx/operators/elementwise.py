"""Arithmetic: operators on single elements, reductions over axes, and sums along one axis."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from .known import Function, Node, integers, operands, operator, to_tensor

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
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": functional.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": functional.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": functional.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_OF_TWO: dict[str, Function] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Pow": torch.pow,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
_COMPARED = ("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor")


def _one(function: Function, node: Node, value: Any) -> torch.Tensor:
    return function(to_tensor(value))


def _two(function: Function, node: Node, left: Any, right: Any) -> torch.Tensor:
    left, right = operands(left, right)
    if not isinstance(left, torch.Tensor) and function is not torch.pow:
        left = torch.as_tensor(left, dtype=right.dtype, device=right.device)
    elif not isinstance(right, torch.Tensor) and function in (torch.logical_and, torch.logical_or, torch.logical_xor):
        right = torch.as_tensor(right, device=left.device)
    return function(left, right)


for _name, _function in _OF_ONE.items():
    operator(_name)(functools.partial(_one, _function))
for _name, _function in _OF_TWO.items():
    operator(_name, no_weights=(0, 1) if _name in _COMPARED else ())(functools.partial(_two, _function))


@operator("Div")
def _div(node: Node, left: Any, right: Any) -> torch.Tensor:
    left, right = operands(left, right)
    whole = not any(
        isinstance(value, float) or (torch.is_tensor(value) and value.is_floating_point()) for value in (left, right)
    )
    return torch.div(left, right, rounding_mode="trunc" if whole else None)


@operator("Mod")
def _mod(node: Node, left: Any, right: Any) -> torch.Tensor:
    function = torch.fmod if node.attributes.get("fmod", 0) else torch.remainder
    return function(*operands(left, right))


def _largest(function: Function, node: Node, *values: Any) -> torch.Tensor:
    return functools.reduce(function, _tensors(values))


for _name, _function in (("Max", torch.maximum), ("Min", torch.minimum)):
    operator(_name, no_weights=tuple(range(16)))(functools.partial(_largest, _function))


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    return [to_tensor(value, device) for value in values]


@operator("Where", no_weights=(0,))
def _where(node: Node, condition: Any, left: Any, right: Any) -> torch.Tensor:
    condition, left, right = _tensors((condition, left, right))
    return torch.where(condition, left, right)


@operator("Clip", no_weights=(1, 2))
def _clip(node: Node, value: Any, low: Any = None, high: Any = None) -> torch.Tensor:
    low, high = (bound.item() if bound is not None and not torch.is_tensor(bound) else bound for bound in (low, high))
    return to_tensor(value) if low is None and high is None else torch.clamp(to_tensor(value), low, high)


@operator("Cast", allowed={"to": tuple(TORCH_TYPES)})
def _cast(node: Node, value: Any) -> torch.Tensor:
    return to_tensor(value).to(TORCH_TYPES[node.attributes["to"]])


@operator("CastLike", no_weights=(1,))
def _cast_like(node: Node, value: Any, other: Any) -> torch.Tensor:
    return to_tensor(value).to(to_tensor(other).dtype)


@operator("Dropout", no_weights=(1, 2))
def _dropout(node: Node, value: torch.Tensor, ratio: Any = None, training_mode: Any = None) -> torch.Tensor:
    share = 0.5 if ratio is None else float(ratio.item())
    return functional.dropout(value, share, training=node.training)


@operator("Gelu", allowed={"approximate": ("none", "tanh")})
def _gelu(node: Node, value: torch.Tensor) -> torch.Tensor:
    return functional.gelu(value, approximate=node.attributes.get("approximate", "none"))


@operator("Swish")
def _swish(node: Node, value: torch.Tensor) -> torch.Tensor:
    alpha = node.attributes.get("alpha", 1.0)
    return functional.silu(value) if alpha == 1.0 else value * torch.sigmoid(alpha * value)


_SIMPLE: dict[str, Function] = {
    "Celu": lambda node, value: functional.celu(value, node.attributes.get("alpha", 1.0)),
    "Elu": lambda node, value: functional.elu(value, node.attributes.get("alpha", 1.0)),
    "HardSigmoid": lambda node, value: torch.clamp(
        value * node.attributes.get("alpha", 0.2) + node.attributes.get("beta", 0.5), 0.0, 1.0
    ),
    "Identity": lambda node, value: value,
    "LeakyRelu": lambda node, value: functional.leaky_relu(value, node.attributes.get("alpha", 0.01)),
    "Mean": lambda node, *values: functools.reduce(torch.add, operands(*values)) / len(values),
    "Sum": lambda node, *values: functools.reduce(torch.add, operands(*values)),
    "ThresholdedRelu": lambda node, value: functional.threshold(value, node.attributes.get("alpha", 1.0), 0.0),
}
for _name, _function in _SIMPLE.items():
    operator(_name)(_function)


@operator("Selu", allowed={"alpha": (1.6732631921768188,), "gamma": (1.0507010221481323,)})
def _selu(node: Node, value: torch.Tensor) -> torch.Tensor:
    return functional.selu(value)


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
    "ReduceLogSumExp": lambda value, axes, keep: torch.logsumexp(value, axes, keepdim=keep),
    "ReduceMax": lambda value, axes, keep: torch.amax(value, axes, keepdim=keep),
    "ReduceMean": lambda value, axes, keep: torch.mean(value, axes, keepdim=keep),
    "ReduceMin": lambda value, axes, keep: torch.amin(value, axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceSum": lambda value, axes, keep: torch.sum(value, axes, keepdim=keep),
    "ReduceSumSquare": lambda value, axes, keep: torch.sum(value.square(), axes, keepdim=keep),
}


def _reduction(function: Function) -> Function:
    def reduce(node: Node, value: Any, axes: Any = None) -> torch.Tensor:
        tensor = to_tensor(value)
        chosen = axes_of(node, axes, tensor.ndim)
        return tensor if chosen is None else function(tensor, chosen, bool(node.attributes.get("keepdims", 1)))

    return reduce


def axes_of(node: Node, axes: Any, ndim: int) -> list[int] | None:
    """The axes to reduce over: an attribute in older opsets, else an input. None reduces nothing."""
    chosen = node.attributes.get("axes") if axes is None else integers(axes)
    if chosen:
        return list(chosen)
    return None if node.attributes.get("noop_with_empty_axes", 0) else list(range(ndim))


for _name, _function in _REDUCTIONS.items():
    operator(_name, on_host=(1,))(_reduction(_function))


def _arg(function: Function, node: Node, value: torch.Tensor) -> torch.Tensor:
    return function(value, node.attributes.get("axis", 0), keepdim=bool(node.attributes.get("keepdims", 1)))


for _name, _function in (("ArgMax", torch.argmax), ("ArgMin", torch.argmin)):
    operator(_name, allowed={"select_last_index": (0,)})(functools.partial(_arg, _function))


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
