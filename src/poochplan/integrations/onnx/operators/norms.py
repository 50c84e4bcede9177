"""Normalisations and softmax."""

from __future__ import annotations

import torch
from torch.nn import functional

from .known import Node, operator


@operator("BatchNormalization", no_weights=(3, 4), allowed={"training_mode": (0,)})
def _batch_norm(
    node: Node, value: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    """In training it moves the running statistics; ONNX's momentum is the share of them that stays."""
    attributes = node.attributes
    momentum, epsilon = 1.0 - attributes.get("momentum", 0.9), attributes.get("epsilon", 1e-5)
    return functional.batch_norm(value, mean, variance, scale, bias, node.training, momentum, epsilon)


@operator("RMSNormalization", allowed={"stash_type": (1,)})
def _rms_norm(node: Node, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    shape = value.shape[node.attributes.get("axis", -1) :]
    return functional.rms_norm(value, shape, scale.expand(shape), node.attributes.get("epsilon", 1e-5))


@operator("InstanceNormalization")
def _instance_norm(node: Node, value: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.instance_norm(value, weight=scale, bias=bias, eps=node.attributes.get("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(node: Node, value: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    shape = value.shape[node.attributes.get("axis", -1) :]
    return functional.layer_norm(
        value,
        shape,
        scale.expand(shape),
        None if bias is None else bias.expand(shape),
        node.attributes.get("epsilon", 1e-5),
    )


@operator("GroupNormalization", allowed={"stash_type": (1,)})
def _group_norm(node: Node, value: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Scale and bias are per group up to opset 20, and torch's per channel."""
    groups, channels = node.attributes["num_groups"], value.shape[1]
    if scale.numel() != channels:
        scale, bias = (part.repeat_interleave(channels // groups) for part in (scale, bias))
    return functional.group_norm(value, groups, scale, bias, node.attributes.get("epsilon", 1e-5))


@operator("LpNormalization")
def _lp_normalization(node: Node, value: torch.Tensor) -> torch.Tensor:
    return functional.normalize(value, node.attributes.get("p", 2), node.attributes.get("axis", -1), 0.0)


@operator("Softmax")
def _softmax(node: Node, value: torch.Tensor) -> torch.Tensor:
    return torch.softmax(value, node.attributes.get("axis", -1))


@operator("LogSoftmax")
def _log_softmax(node: Node, value: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(value, node.attributes.get("axis", -1))
