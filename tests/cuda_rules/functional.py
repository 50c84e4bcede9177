"""Functions of torch that make tensors on the device of their arguments, which torch takes for the host.

Attention is as CUDA has it: by plain ops, or by one kernel that draws its dropout itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_LIBRARY = torch.library.Library("stand_in", "DEF")
_LIBRARY.define(
    "_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout, bool causal) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define(
    "_scaled_dot_product_flash_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, "
    "Tensor weights, Tensor kept) -> (Tensor, Tensor, Tensor)"
)


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if not causal:
        return scores
    allowed = query.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(allowed.logical_not(), -math.inf)


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the weights, and what dropout left of each."""
    weights = _scores(query, key, causal).softmax(-1)
    kept = torch.nn.functional.dropout(torch.ones_like(weights), dropout)
    return (weights * kept) @ value, weights, kept


def _backward(gradient: Any, query: Any, key: Any, value: Any, weights: Any, kept: Any) -> Any:
    of_value = (weights * kept).transpose(-2, -1) @ gradient
    of_weights = (gradient @ value.transpose(-2, -1)) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
    return of_scores @ key, of_scores.transpose(-2, -1) @ query, of_value


_LIBRARY.impl("_scaled_dot_product_flash_attention", plain, "CPU")
_LIBRARY.impl("_scaled_dot_product_flash_attention_backward", _backward, "CPU")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        result, weights, kept = torch.ops.stand_in._scaled_dot_product_flash_attention(*args)
        ctx.save_for_backward(*args[:3], weights, kept)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        found = torch.ops.stand_in._scaled_dot_product_flash_attention_backward(gradient, *ctx.saved_tensors)
        return (*found, None, None)


def attend(query: Any, key: Any, value: Any, *, dropout_p: float = 0.0, is_causal: bool = False) -> torch.Tensor:
    """``scaled_dot_product_attention`` of a GPU."""
    if torch.backends.cuda.math_sdp_enabled():
        return plain(query, key, value, dropout_p, is_causal)[0]
    return _Fused.apply(query, key, value, dropout_p, is_causal)


def one_hot(numbers: torch.Tensor, count: int) -> torch.Tensor:
    return (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).long()
