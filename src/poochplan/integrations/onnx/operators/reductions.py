"""Reductions over axes, sums along one, and what looks for the largest."""

from __future__ import annotations

from typing import Any

import torch

from .known import Function, Node, integers, operator, to_tensor


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
    """The axes to reduce over: an attribute in older opsets, else an input. None leaves the value as it is."""
    chosen = node.attributes.get("axes") if axes is None else integers(axes)
    if chosen:
        return list(chosen)
    return None if node.attributes.get("noop_with_empty_axes", 0) else list(range(ndim))


for _name, _function in _REDUCTIONS.items():
    operator(_name, on_host=(1,))(_reduction(_function))


@operator("ArgMax", allowed={"select_last_index": (0,)})
def _argmax(node: Node, value: torch.Tensor) -> torch.Tensor:
    return torch.argmax(value, node.attributes.get("axis", 0), keepdim=bool(node.attributes.get("keepdims", 1)))


@operator("ArgMin", allowed={"select_last_index": (0,)})
def _argmin(node: Node, value: torch.Tensor) -> torch.Tensor:
    return torch.argmin(value, node.attributes.get("axis", 0), keepdim=bool(node.attributes.get("keepdims", 1)))


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
