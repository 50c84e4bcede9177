"""Products, convolutions, pooling and resizing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from .known import Node, integers, operator, to_tensor

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_AVERAGE_POOLS = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


@operator("MatMul")
def _matmul(node: Node, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.matmul(left, right)


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


@operator("Einsum")
def _einsum(node: Node, *values: torch.Tensor) -> torch.Tensor:
    return torch.einsum(node.attributes["equation"], *values)


@operator(
    "Attention",
    no_weights=(3,),
    allowed={"softcap": (0.0,), "softmax_precision": (1,), "left_window_size": (-1,), "right_window_size": (-1,)},
    refused={4: "past_key", 5: "past_value", 6: "nonpad_kv_seqlen"},
)
def _attention(node: Node, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None) -> Any:
    """Of (batch, heads, length, width), or of (batch, length, heads x width) with the number of heads as attributes."""
    attributes, is_flat = node.attributes, query.ndim == 3
    if is_flat:
        query = query.unflatten(2, (attributes["q_num_heads"], -1)).transpose(1, 2)
        key, value = (part.unflatten(2, (attributes["kv_num_heads"], -1)).transpose(1, 2) for part in (key, value))
    is_causal = bool(attributes.get("is_causal", 0))
    if mask is not None:
        mask = to_tensor(mask, query.device)
        if is_causal:
            later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
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
    return _CONVOLUTIONS[dims](value, weight, bias, stride, pads, dilation, node.attributes.get("group", 1))


@operator("ConvTranspose", allowed={"auto_pad": ("NOTSET", "VALID"), "output_shape": ()})
def _conv_transpose(
    node: Node, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    dims, attributes = value.ndim - 2, node.attributes
    pads = attributes.get("pads") or [0] * (2 * dims)
    begins, ends = pads[:dims], pads[dims:]
    extra = list(attributes.get("output_padding") or [0] * dims)
    found = _TRANSPOSED[dims](
        value,
        weight,
        bias,
        _of_dims(node, "strides", dims),
        0 if begins != ends else begins,
        extra,
        attributes.get("group", 1),
        _of_dims(node, "dilations", dims),
    )
    if begins == ends:
        return found
    for dim, (begin, end) in enumerate(zip(begins, ends, strict=True), start=2):
        found = found.narrow(dim, begin, found.shape[dim] - begin - end)
    return found


@operator("MaxPool", allowed={"storage_order": (0,)})
def _max_pool(node: Node, value: torch.Tensor) -> torch.Tensor:
    dims, kernel = value.ndim - 2, list(node.attributes["kernel_shape"])
    value, pads = _padded(node, value, kernel, -math.inf)
    if any(2 * pad > size for pad, size in zip(pads, kernel, strict=True)):
        value, pads = functional.pad(value, _both_ends(pads), value=-math.inf), [0] * dims
    ceil_mode = bool(node.attributes.get("ceil_mode", 0))
    return _MAX_POOLS[dims](
        value, kernel, _of_dims(node, "strides", dims), pads, _of_dims(node, "dilations", dims), ceil_mode
    )


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
    ceil_mode = bool(attributes.get("ceil_mode", 0))
    return _AVERAGE_POOLS[dims](value, kernel, _of_dims(node, "strides", dims), pads, ceil_mode, counted)


@operator("GlobalAveragePool")
def _global_average_pool(node: Node, value: torch.Tensor) -> torch.Tensor:
    return value.mean(tuple(range(2, value.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(node: Node, value: torch.Tensor) -> torch.Tensor:
    return value.amax(tuple(range(2, value.ndim)), keepdim=True)


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
    """Of sizes and scales those of batch and channels have to leave these as they are."""
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
    """The value, and the pads of each dimension: at both ends the same, else they are put on here and none are left."""
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


def _both_ends(pads: list[int]) -> list[int]:
    return [pad for pad in reversed(pads) for _ in range(2)]
