"""Operators that move elements: reshaping, cutting, joining, looking up and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from .known import OnnxNode as Node
from .known import integers, operator, operators, tensors, to_tensor


def asked_shape(node: Node, found: tuple[int, ...], asked: list[int]) -> list[int]:
    """The result's shape of Reshape: 0 is the dimension of the input, unless ``allowzero``."""
    if node.attributes.get("allowzero", 0):
        return asked
    return [found[index] if size == 0 else size for index, size in enumerate(asked)]


operators(
    {
        "Concat": lambda node, *values: torch.cat(tensors(*values), node.attributes["axis"]),
        "Flatten": lambda node, value: value.reshape(value.shape[: node.attributes.get("axis", 1)].numel(), -1),
        "Transpose": lambda node, value: value.permute(
            node.attributes.get("perm") or list(reversed(range(value.ndim)))
        ),
    }
)
operators(
    {
        "Expand": lambda node, value, shape: value.expand(torch.broadcast_shapes(value.shape, tuple(integers(shape)))),
        "Reshape": lambda node, value, shape: value.reshape(asked_shape(node, tuple(value.shape), integers(shape))),
        "SequenceAt": lambda node, values, place: values[integers(place)[0]],
        "Squeeze": lambda node, value, axes=None: (
            value.squeeze() if axes is None else value.squeeze(tuple(integers(axes)))
        ),
        "Tile": lambda node, value, repeats: value.repeat(integers(repeats)),
    },
    on_host=(1,),
)


@operator("Unsqueeze", on_host=(1,))
def _unsqueeze(node: Node, value: torch.Tensor, axes: Any) -> torch.Tensor:
    chosen = integers(axes)
    for axis in sorted(axis % (value.ndim + len(chosen)) for axis in chosen):
        value = value.unsqueeze(axis)
    return value


@operator("Split", on_host=(1,), most_outputs=None)
def _split(node: Node, value: torch.Tensor, sizes: Any = None) -> Any:
    axis = node.attributes.get("axis", 0)
    parts = torch.split(value, split_sizes(node, value.shape[axis], sizes), axis)
    return parts if node.outputs > 1 else parts[0]


def split_sizes(node: Node, size: int, sizes: Any) -> list[int]:
    """The sizes of Split's parts: the given ones, else equal ones with a smaller one at the end."""
    if sizes is not None:
        return integers(sizes)
    count = node.attributes.get("num_outputs", node.outputs)
    each = -(-size // count)
    return [*[each] * (count - 1), size - each * (count - 1)]


@operator("SplitToSequence", on_host=(1,), allowed={"keepdims": (1,)})
def _split_to_sequence(node: Node, value: torch.Tensor, sizes: Any = None) -> tuple[torch.Tensor, ...]:
    """The parts as a tuple. One number is the size of each part; without sizes it is 1."""
    axis, given = node.attributes.get("axis", 0), [1] if sizes is None else integers(sizes)
    return torch.split(value, given[0] if sizes is None or sizes.ndim == 0 else given, axis)


@operator("Slice", on_host=(1, 2, 3, 4))
def _slice(node: Node, value: torch.Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    for axis, part in enumerate(slices(tuple(value.shape), starts, ends, axes, steps)):
        if part.step is not None and part.step < 0:
            chosen = list(range(value.shape[axis])[part])
            value = value.index_select(axis, torch.tensor(chosen, device=value.device))
        elif part != slice(None):
            value = value[(*[slice(None)] * axis, part)]
    return value


def slices(shape: tuple[int, ...], starts: Any, ends: Any, axes: Any, steps: Any) -> list[slice]:
    """One Python slice for each dimension, from the inputs of Slice."""
    begins, stops = integers(starts), integers(ends)
    along = list(range(len(begins))) if axes is None else integers(axes)
    strides = [1] * len(begins) if steps is None else integers(steps)
    found = [slice(None)] * len(shape)
    for axis, begin, stop, stride in zip(along, begins, stops, strides, strict=True):
        past_first = stride < 0 and stop < -shape[axis]
        found[axis] = slice(begin, None if past_first else stop, stride)
    return found


@operator("Gather", no_weights=(1,))
def _gather(node: Node, value: torch.Tensor, indices: Any) -> torch.Tensor:
    axis = node.attributes.get("axis", 0) % value.ndim
    if isinstance(indices, np.ndarray):
        if indices.ndim == 0:
            return value.select(axis, int(indices))
        indices = to_tensor(np.where(indices < 0, indices + value.shape[axis], indices), value.device)
    if axis == 0 and value.ndim == 2 and value.is_floating_point():
        return functional.embedding(indices, value)
    indices = _places(value, axis, indices)
    found = value.index_select(axis, indices.reshape(-1))
    return found.reshape(*value.shape[:axis], *indices.shape, *value.shape[axis + 1 :])


def _places(value: torch.Tensor, axis: int, indices: Any) -> torch.Tensor:
    """The indices along an axis, counted from its beginning."""
    indices = to_tensor(indices, value.device)
    return torch.where(indices < 0, indices + value.shape[axis], indices)


@operator("GatherElements", no_weights=(1,))
def _gather_elements(node: Node, value: torch.Tensor, indices: Any) -> torch.Tensor:
    axis = node.attributes.get("axis", 0)
    return torch.gather(value, axis, _places(value, axis, indices))


operator("GatherND", no_weights=(1,), allowed={"batch_dims": (0,)})(
    lambda node, value, indices: value[to_tensor(indices, value.device).unbind(-1)]
)


@operator("ScatterElements", no_weights=(1,), allowed={"reduction": ("none",)})
def _scatter_elements(node: Node, value: torch.Tensor, indices: Any, updates: Any) -> torch.Tensor:
    axis = node.attributes.get("axis", 0)
    return value.scatter(axis, _places(value, axis, indices), to_tensor(updates, value.device))


@operator("ScatterND", no_weights=(1,), allowed={"reduction": ("none",)})
def _scatter_nd(node: Node, value: Any, indices: Any, updates: Any) -> torch.Tensor:
    tensor = to_tensor(value)
    places = to_tensor(indices, tensor.device).unbind(-1)
    return tensor.index_put(places, to_tensor(updates, tensor.device))


@operator("Pad", on_host=(1, 3), no_weights=(2,), allowed={"mode": ("constant", "reflect", "edge", "wrap")})
def _pad(node: Node, value: torch.Tensor, pads: Any, fill: Any = None, axes: Any = None) -> torch.Tensor:
    given = integers(pads)
    along = list(range(value.ndim)) if axes is None else [axis % value.ndim for axis in integers(axes)]
    ends = {axis: (given[index], given[index + len(along)]) for index, axis in enumerate(along)}
    first = min((axis for axis, pair in ends.items() if pair != (0, 0)), default=value.ndim)
    flat = [number for axis in reversed(range(first, value.ndim)) for number in ends.get(axis, (0, 0))]
    if not flat:
        return value
    asked = node.attributes.get("mode", "constant")
    mode = {"edge": "replicate", "wrap": "circular"}.get(asked, asked)
    if mode == "constant":
        return functional.pad(value, flat, value=0.0 if fill is None else fill.item())
    return functional.pad(value, flat, mode=mode)


@operator("Trilu", on_host=(1,))
def _trilu(node: Node, value: Any, diagonal: Any = None) -> torch.Tensor:
    function = torch.triu if node.attributes.get("upper", 1) else torch.tril
    return function(to_tensor(value), 0 if diagonal is None else integers(diagonal)[0])


@operator("DepthToSpace")
def _depth_to_space(node: Node, value: torch.Tensor) -> torch.Tensor:
    block = node.attributes["blocksize"]
    if node.attributes.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(value, block)
    parts = value.unflatten(1, (block, block, -1)).permute(0, 3, 4, 1, 5, 2)
    return parts.flatten(4).flatten(2, 3)


@operator("SpaceToDepth")
def _space_to_depth(node: Node, value: torch.Tensor) -> torch.Tensor:
    block = node.attributes["blocksize"]
    if node.attributes.get("mode", "DCR") == "CRD":
        return functional.pixel_unshuffle(value, block)
    parts = value.unflatten(3, (-1, block)).unflatten(2, (-1, block))
    return parts.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
