"""Layers: products, convolutions, pooling, resizing, normalisations, softmax, and LSTM, GRU and RNN.

ONNX joins the weights of a recurrent layer's directions, and has another order of gates. If they are constants of the
file, they become the parameters that ``torch.nn`` would have (:func:`torch_weights`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from .known import Function, integers, operator, operators, to_tensor
from .known import OnnxNode as Node

_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""The positions of ONNX's gates in torch's order: iofc -> ifco, zrh -> rzh."""
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""Torch's names for the weights of a direction, in their order."""


@operator("Gemm")
def _gemm(node: Node, left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    attributes = node.attributes
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if attributes.get("transA", 0):
        left = left.t()
    if attributes.get("transB", 0):
        if alpha == beta == 1.0 and (added is None or (torch.is_tensor(added) and added.ndim == 1)):
            return functional.linear(left, right, added)
        right = right.t()
    if added is None:
        return torch.mm(left, right) if alpha == 1.0 else torch.mm(left, right) * alpha
    return torch.addmm(to_tensor(added, left.device), left, right, beta=beta, alpha=alpha)


@operator(
    "Attention",
    no_weights=(3,),
    allowed={"softcap": (0.0,), "softmax_precision": (1,), "left_window_size": (-1,), "right_window_size": (-1,)},
    refused={4: "past_key", 5: "past_value", 6: "nonpad_kv_seqlen"},
)
def _attention(node: Node, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None) -> Any:
    """Attention on (batch, heads, length, width), or on (batch, length, heads x width) with heads as attributes."""
    attributes, is_flat = node.attributes, query.ndim == 3
    if is_flat:
        query = query.unflatten(2, (attributes["q_num_heads"], -1)).transpose(1, 2)
        key, value = (part.unflatten(2, (attributes["kv_num_heads"], -1)).transpose(1, 2) for part in (key, value))
    is_causal = bool(attributes.get("is_causal", 0))
    if mask is not None:
        mask = to_tensor(mask, query.device)
        if is_causal:
            sizes = query.shape[-2], key.shape[-2]  # the mask's own may be broadcast
            later = torch.ones(sizes, dtype=torch.bool, device=query.device).triu(1)
            mask = mask.expand(torch.broadcast_shapes(mask.shape, sizes))
            mask = mask & ~later if mask.dtype == torch.bool else mask.masked_fill(later, -math.inf)
    found = functional.scaled_dot_product_attention(
        *(query, key, value, mask),
        is_causal=is_causal and mask is None,
        scale=attributes.get("scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).flatten(2) if is_flat else found


@operator("Conv", allowed={"auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")})
def _conv(node: Node, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    dims = value.ndim - 2
    stride, dilation = _of_dims(node, "strides", dims), _of_dims(node, "dilations", dims)
    value, pads = _padded(node, value, list(weight.shape[2:]), 0.0)
    function, groups = getattr(functional, f"conv{dims}d"), node.attributes.get("group", 1)
    return function(value, weight, bias, stride, pads, dilation, groups)


@operator("ConvTranspose", allowed={"auto_pad": ("NOTSET", "VALID"), "output_shape": ()})
def _conv_transpose(
    node: Node, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    dims, attributes = value.ndim - 2, node.attributes
    pads = attributes.get("pads") or [0] * (2 * dims)
    begins, ends = pads[:dims], pads[dims:]
    extra, groups = list(attributes.get("output_padding") or [0] * dims), attributes.get("group", 1)
    stride, dilation = _of_dims(node, "strides", dims), _of_dims(node, "dilations", dims)
    function, is_even = getattr(functional, f"conv_transpose{dims}d"), begins == ends
    found = function(value, weight, bias, stride, begins if is_even else 0, extra, groups, dilation)
    if is_even:
        return found
    for dim, (begin, end) in enumerate(zip(begins, ends, strict=True), start=2):
        found = found.narrow(dim, begin, found.shape[dim] - begin - end)
    return found


@operator("MaxPool", allowed={"storage_order": (0,)})
def _max_pool(node: Node, value: torch.Tensor) -> torch.Tensor:
    dims, kernel = value.ndim - 2, list(node.attributes["kernel_shape"])
    value, pads = _padded(node, value, kernel, -math.inf)
    if any(2 * pad > size for pad, size in zip(pads, kernel, strict=True)):
        both_ends = [pad for pad in reversed(pads) for _ in range(2)]
        value, pads = functional.pad(value, both_ends, value=-math.inf), [0] * dims
    stride, dilation = _of_dims(node, "strides", dims), _of_dims(node, "dilations", dims)
    function, ceil_mode = getattr(functional, f"max_pool{dims}d"), bool(node.attributes.get("ceil_mode", 0))
    return function(value, kernel, stride, pads, dilation, ceil_mode)


def _check_average(attributes: Mapping[str, Any]) -> str:
    pads = attributes.get("pads") or []
    if any(dilation != 1 for dilation in attributes.get("dilations") or []):
        return "expected dilations of 1, found others"
    if pads[: len(pads) // 2] != pads[len(pads) // 2 :] and not attributes.get("count_include_pad", 0):
        return "expected the same pads at both ends or count_include_pad=1, found neither"
    return ""


@operator("AveragePool", allowed={"auto_pad": ("NOTSET", "VALID")}, check=_check_average)
def _average_pool(node: Node, value: torch.Tensor) -> torch.Tensor:
    attributes, dims, kernel = node.attributes, value.ndim - 2, list(node.attributes["kernel_shape"])
    counted = bool(attributes.get("count_include_pad", 0))
    value, pads = _padded(node, value, kernel, 0.0)
    function, ceil_mode = getattr(functional, f"avg_pool{dims}d"), bool(attributes.get("ceil_mode", 0))
    return function(value, kernel, _of_dims(node, "strides", dims), pads, ceil_mode, counted)


def _check_resize(attributes: Mapping[str, Any]) -> str:
    mode, where = attributes.get("mode", "nearest"), attributes.get("coordinate_transformation_mode", "half_pixel")
    rounding = attributes.get("nearest_mode", "round_prefer_floor")
    if mode != "nearest":
        return "" if where != "asymmetric" else f"expected another transformation than asymmetric for {mode}, found it"
    if (where, rounding) != ("asymmetric", "floor"):
        return f"expected nearest with asymmetric and floor, found it with {where} and {rounding}"
    return ""


@operator(
    "Resize",
    no_weights=(1, 2),
    on_host=(3,),
    allowed={
        "mode": ("nearest", "linear", "cubic"),
        "coordinate_transformation_mode": ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"),
        "cubic_coeff_a": (-0.75,),
        "antialias": (0,),
        "keep_aspect_ratio_policy": ("stretch",),
    },
    check=_check_resize,
)
def _resize(node: Node, value: torch.Tensor, roi: Any = None, scales: Any = None, sizes: Any = None) -> torch.Tensor:
    """Resizes all dimensions but batch and channels, whose sizes and scales must change nothing."""
    attributes, dims = node.attributes, value.ndim - 2
    mode, where = attributes.get("mode", "nearest"), attributes.get("coordinate_transformation_mode", "half_pixel")
    names = {"linear": ["linear", "bilinear", "trilinear"], "cubic": ["", "bicubic", ""], "nearest": ["nearest"] * 3}
    corners = None if mode == "nearest" else where == "align_corners"
    given_sizes = integers(sizes)[2:] if sizes is not None else None
    factors = None if given_sizes else [float(scale) for scale in scales.tolist()][2:]
    return functional.interpolate(
        value, size=given_sizes, scale_factor=factors, mode=names[mode][dims - 1], align_corners=corners
    )


def _of_dims(node: Node, name: str, dims: int) -> list[int]:
    return list(node.attributes.get(name) or [1] * dims)


def _padded(node: Node, value: torch.Tensor, kernel: list[int], fill: float) -> tuple[torch.Tensor, list[int]]:
    """The value, and equal pads for both ends of each dimension. Unequal pads are applied here, and none are left."""
    dims = len(kernel)
    pads = _pads(node, value, kernel)
    if pads[:dims] == pads[dims:]:
        return value, pads[:dims]
    ends = [number for dim in reversed(range(dims)) for number in (pads[dim], pads[dims + dim])]
    return functional.pad(value, ends, value=fill), [0] * dims


def _pads(node: Node, value: torch.Tensor, kernel: list[int]) -> list[int]:
    dims, kind = len(kernel), node.attributes.get("auto_pad", "NOTSET")
    if kind == "NOTSET":
        return list(node.attributes.get("pads") or [0] * (2 * dims))
    if kind == "VALID":
        return [0] * (2 * dims)
    strides, dilations = _of_dims(node, "strides", dims), _of_dims(node, "dilations", dims)
    smaller, larger = [], []
    for size, width, stride, dilation in zip(value.shape[2:], kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        smaller.append(total // 2)
        larger.append(total - total // 2)
    return smaller + larger if kind == "SAME_UPPER" else larger + smaller


@operator("BatchNormalization", no_weights=(3, 4), allowed={"training_mode": (0,)})
def _batch_norm(
    node: Node, value: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    """Batch normalisation, which updates running statistics in training. ONNX's momentum is the share that stays."""
    attributes = node.attributes
    momentum, epsilon = 1.0 - attributes.get("momentum", 0.9), attributes.get("epsilon", 1e-5)
    return functional.batch_norm(value, mean, variance, scale, bias, node.training, momentum, epsilon)


@operator("RMSNormalization", allowed={"stash_type": (1,)})
def _rms_norm(node: Node, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    shape = value.shape[node.attributes.get("axis", -1) :]
    return functional.rms_norm(value, shape, scale.expand(shape), node.attributes.get("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(node: Node, value: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    shape, epsilon = value.shape[node.attributes.get("axis", -1) :], node.attributes.get("epsilon", 1e-5)
    added = None if bias is None else bias.expand(shape)
    return functional.layer_norm(value, shape, scale.expand(shape), added, epsilon)


@operator("GroupNormalization", allowed={"stash_type": (1,)})
def _group_norm(node: Node, value: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Group normalisation. Up to opset 20 scale and bias are per group; torch's are per channel."""
    groups, channels = node.attributes["num_groups"], value.shape[1]
    if scale.numel() != channels:
        scale, bias = (part.repeat_interleave(channels // groups) for part in (scale, bias))
    return functional.group_norm(value, groups, scale, bias, node.attributes.get("epsilon", 1e-5))


_SIMPLE: dict[str, Function] = {
    "Einsum": lambda node, *values: torch.einsum(node.attributes["equation"], *values),
    "GlobalAveragePool": lambda node, value: value.mean(tuple(range(2, value.ndim)), keepdim=True),
    "GlobalMaxPool": lambda node, value: value.amax(tuple(range(2, value.ndim)), keepdim=True),
    "InstanceNormalization": lambda node, value, scale, bias: functional.instance_norm(
        value, weight=scale, bias=bias, eps=node.attributes.get("epsilon", 1e-5)
    ),
    "LogSoftmax": lambda node, value: torch.log_softmax(value, node.attributes.get("axis", -1)),
    "LpNormalization": lambda node, value: functional.normalize(
        value, node.attributes.get("p", 2), node.attributes.get("axis", -1), 0.0
    ),
    "MatMul": lambda node, left, right: torch.matmul(left, right),
    "Softmax": lambda node, value: torch.softmax(value, node.attributes.get("axis", -1)),
}
operators(_SIMPLE)


def torch_weights(
    kind: str, weight: torch.Tensor, recurrence: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """The weights for torch: for each direction two weights of shape (gates * hidden, ...), then two biases.

    ``weight`` is (directions, gates * hidden, inputs), ``recurrence`` (directions, gates * hidden, hidden) and ``bias``
    (directions, 2 * gates * hidden).
    """
    order, found = _GATES[kind], []
    for direction in range(weight.shape[0]):
        parts = [weight[direction], recurrence[direction]]
        if bias is not None:
            parts += list(bias[direction].chunk(2))
        for part in parts:
            gates = part.chunk(len(order))
            found.append(torch.cat([gates[gate] for gate in order]) if len(order) > 1 else part)
    return found


def _check_recurrent(kind: str, attributes: Mapping[str, Any]) -> str:
    given = [name.lower() for name in attributes.get("activations") or []]
    usual = (_ACTIVATIONS.get(kind) or given[:1]) * _directions(attributes)
    if (given and given != usual) or any(name not in ("tanh", "relu", "sigmoid") for name in given):
        return f"expected the usual activations, found {', '.join(given)}"
    if kind == "RNN" and "sigmoid" in given:
        return "expected tanh or relu, found sigmoid"
    if kind == "GRU" and not attributes.get("linear_before_reset", 0):
        return "expected linear_before_reset=1, found 0"
    return ""


def _recurrent(kind: str, node: Node, value: torch.Tensor, *inputs: Any) -> Any:
    """The states of all time steps (time, directions, batch, hidden), then the last states."""
    weights, hidden, cell = _taken(kind, node, value, inputs)
    directions = _directions(node.attributes)
    is_biased = len(weights) == len(NAMES) * directions
    state: Any = (hidden, cell) if kind == "LSTM" else hidden
    is_relu = (node.attributes.get("activations") or ["Tanh"])[0].lower() == "relu"
    recurrences: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru}
    function = recurrences.get(kind, torch.rnn_relu if is_relu else torch.rnn_tanh)
    is_reverse = node.attributes.get("direction", "forward") == "reverse"
    given = value.flip(0) if is_reverse else value
    out, *states = function(given, state, weights, is_biased, 1, 0.0, node.training, directions == 2, False)
    if is_reverse:
        out = out.flip(0)
    out = out.unflatten(-1, (directions, out.shape[-1] // directions)).transpose(1, 2)
    return (out, *states)[: node.outputs] if node.outputs > 1 else out


for _kind, _states in (("LSTM", 2), ("GRU", 1), ("RNN", 1)):
    operator(
        _kind,
        no_weights=(4, 5, 6)[: _states + 1],
        allowed={"clip": (), "layout": (0,), "input_forget": (0,)},
        refused={4: "sequence_lens", 7: "peepholes (P)"},
        most_outputs=1 + _states,
        check=functools.partial(_check_recurrent, _kind),
    )(functools.partial(_recurrent, _kind))


def _taken(
    kind: str, node: Node, value: torch.Tensor, inputs: tuple[Any, ...]
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Weights in torch's order, and the first states; missing ones are zeros."""
    weight, recurrence, bias, _, hidden, cell = [*inputs, *[None] * 6][:6]
    split = isinstance(weight, (list, tuple))
    weights = list(weight) if split else torch_weights(kind, weight, recurrence, bias)
    directions, size = _directions(node.attributes), weights[1].shape[1]
    states = [
        value.new_zeros(directions, value.shape[1], size) if state is None else to_tensor(state, value.device)
        for state in (hidden, cell)
    ]
    return weights, states[0], states[1]


def _directions(attributes: Mapping[str, Any]) -> int:
    return 2 if attributes.get("direction", "forward") == "bidirectional" else 1
