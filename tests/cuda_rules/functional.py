"""Functions of torch that make tensors on the device of their arguments, which torch takes for the host; and kernels
that only CUDA has.

Attention is as CUDA has it: by plain ops, or by one kernel that draws its dropout itself. The kernels stand below
autograd, so the operators, what they save and their backwards are torch's own (:data:`KERNELS`, for ``rules``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_ALIGNED = 32
"""The efficient kernel's logsumexp has a multiple of so many rows; what is no row's is infinite."""


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if not causal:
        return scores
    allowed = query.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(allowed.logical_not(), -math.inf)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool) -> torch.Tensor:
    weights = _scores(query, key, causal).softmax(-1)
    return (weights * torch.nn.functional.dropout(torch.ones_like(weights), dropout)) @ value


def attend(query: Any, key: Any, value: Any, *, dropout_p: float = 0.0, is_causal: bool = False) -> torch.Tensor:
    """``scaled_dot_product_attention`` of a GPU."""
    cuda: Any = torch.backends.cuda
    if cuda.math_sdp_enabled():
        return plain(query, key, value, dropout_p, is_causal)
    if cuda.flash_sdp_enabled():
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False)[0]
    if cuda.mem_efficient_sdp_enabled():
        return aten._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout_p, is_causal)[0]
    return aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, dropout_p, is_causal, False)[0]


# -- kernels ----------------------------------------------------------------------------------------------------------


def _unwritten(count: int, dtype: torch.dtype) -> torch.Tensor:
    """What memory holds that nobody writes: the same in steps that allocate alike, and other bytes else."""
    from .machine import machine

    return torch.full((count,), machine().memory.allocated_bytes, dtype=dtype)


def _kept(weights: torch.Tensor, dropout: float, seed: int) -> torch.Tensor:
    """What dropout leaves, by a seed alone."""
    drawn = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn >= dropout).to(weights.dtype) / (1 - dropout)


def _drawn(dropout: float) -> int | None:
    return int(torch.randint(1 << 40, ()).item()) if dropout > 0 else None


def _forward(query: Any, key: Any, value: Any, dropout: float, causal: bool) -> tuple[Any, Any, int | None]:
    """The result, the logsumexp, and the seed where something was drawn."""
    scores = _scores(query, key, causal)
    logs, seed = scores.float().logsumexp(-1), _drawn(dropout)
    weights = (scores.float() - logs.unsqueeze(-1)).exp().to(query.dtype)
    return (weights if seed is None else weights * _kept(weights, dropout, seed)) @ value, logs, seed


def _backward(
    gradient: Any, query: Any, key: Any, value: Any, logs: Any, dropout: float, causal: bool, seed: Any
) -> tuple[Any, Any, Any]:
    logs = logs[..., : query.shape[-2]]
    weights = (_scores(query, key, causal).float() - logs.unsqueeze(-1)).exp().to(query.dtype)
    kept = _kept(weights, dropout, int(seed.flatten()[0].item())) if dropout > 0 else torch.ones_like(weights)
    of_value = (weights * kept).transpose(-2, -1) @ gradient
    of_weights = (gradient @ value.transpose(-2, -1)) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
    return of_scores @ key, of_scores.transpose(-2, -1) @ query, of_value


def _flash(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> Any:
    """The state of the generator, in device memory, is written where it drops."""
    result, logs, seed = _forward(query, key, value, dropout_p, is_causal)
    state = _unwritten(2, torch.uint64) if seed is None else torch.tensor([seed, 0], dtype=torch.uint64)
    unused = _unwritten(1, torch.uint64)[0].clone()
    return result, logs, None, None, query.shape[-2], key.shape[-2], state, unused, query.new_empty(0)


def _backward_with(dropout: int, causal: int, seed: int) -> Callable[..., Any]:
    """It takes these from their places behind ``logs``."""

    def run(gradient: Any, query: Any, key: Any, value: Any, out: Any, logs: Any, *more: Any, scale: Any = None) -> Any:
        return _backward(gradient, query, key, value, logs, more[dropout], more[causal], more[seed])

    return run


def _efficient(
    query: Any, key: Any, value: Any, bias: Any, logs: bool, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> Any:
    """The seed and the offset are in host memory where it drops, else nobody writes them."""
    result, found, seed = _forward(query, key, value, dropout_p, is_causal)
    padded = torch.nn.functional.pad(found, (0, -found.shape[-1] % _ALIGNED), value=math.inf)
    states = _unwritten(2, torch.int64) if seed is None else torch.tensor([seed, 0])
    return result, padded, states[0].clone(), states[1].clone()


def _efficient_backward(
    gradient: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, logs: Any, *more: Any, scale: Any = None
) -> Any:
    seed, _, dropout, _, causal = (*more, False)[:5]
    return (*_backward(gradient, query, key, value, logs, dropout, causal, seed), None)


def _cudnn(
    query: Any, key: Any, value: Any, bias: Any, logs: bool, dropout_p: float = 0.0, is_causal: bool = False, *_: Any
) -> Any:
    """The state begins as zeros."""
    result, found, seed = _forward(query, key, value, dropout_p, is_causal)
    states = torch.tensor([seed or 0, 0])
    lengths = query.shape[-2], key.shape[-2]
    return result, found, None, None, *lengths, states[:1].clone(), states[1:].clone(), query.new_empty(0)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention: _flash,
    aten._scaled_dot_product_flash_attention_backward: _backward_with(dropout=4, causal=5, seed=6),
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward: _backward_with(dropout=7, causal=8, seed=0),
}
"""What stands for operators that have no kernel on the host, given host tensors."""


def on_host(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Positions of the operator's outputs that are in host memory."""
    if operator is not aten._scaled_dot_product_efficient_attention:
        return ()
    return (2, 3) if kwargs.get("dropout_p", args[5] if len(args) > 5 else 0.0) > 0 else ()


def convolution_found_by_trying(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Another algorithm than the usual one: the same number, other bits."""
    wider = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
    return func(*wider, **kwargs).to(args[0].dtype)


def one_hot(numbers: torch.Tensor, count: int) -> torch.Tensor:
    return (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).long()
