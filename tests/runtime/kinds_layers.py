"""Kinds of layer: normalisation, precision and memory formats, several outputs, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.runtime.kinds import IMAGE, VOLUME, Body, Tensor, kind
from tests.runtime.nets import Net

# -- normalisation --------------------------------------------------------------------------------------------


def _stages(*names: str) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        for name in names:
            x = F.relu(net.get_submodule(name)(x)) + 0.1 * x
        return x

    return body


def _norms(norm: type[nn.Module], size: int, **options: object) -> Callable[[], tuple[nn.Module, ...]]:
    return lambda: (norm(size, **options), norm(size, **options))


_twice = _stages("a", "b")
kind("batch norm 1d", _twice, parts=_norms(nn.BatchNorm1d, 16), least=4)
kind("batch norm 1d on series", _twice, shape=(4, 6, 8), parts=_norms(nn.BatchNorm1d, 6), least=4)
kind("batch norm 2d", _twice, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6), least=4)
kind("batch norm 3d", _twice, shape=VOLUME, parts=_norms(nn.BatchNorm3d, 4), least=4)
kind("batch norm, cumulative", _twice, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6, momentum=None), least=4)
kind(
    "batch norm, no statistics",
    _twice,
    shape=IMAGE,
    parts=_norms(nn.BatchNorm2d, 6, track_running_stats=False),
    least=4,
)
kind("batch norm, no weights", _twice, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6, affine=False), least=4)
kind("instance norm", _twice, shape=IMAGE, parts=_norms(nn.InstanceNorm2d, 6, affine=True), least=4)
kind(
    "instance norm with statistics",
    _twice,
    shape=IMAGE,
    parts=_norms(nn.InstanceNorm2d, 6, track_running_stats=True),
    least=2,
    refused=("aten.native_batch_norm",),
)
kind("group norm", _twice, shape=IMAGE, parts=lambda: (nn.GroupNorm(2, 6), nn.GroupNorm(6, 6)), least=4)
kind("layer norm", _twice, parts=_norms(nn.LayerNorm, 16), least=4)
kind("rms norm", _twice, parts=_norms(nn.RMSNorm, 16), least=4)
kind("local response norm", _twice, shape=IMAGE, parts=_norms(nn.LocalResponseNorm, 2), least=4)
kind("batch norm used twice", _stages("a", "b", "a"), shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6), least=6)


def _frozen_norm(net: Net, x: Tensor) -> Tensor:
    net.a.eval()
    return F.relu(net.a(x)) * net.b(x)


kind("batch norm in eval mode", _frozen_norm, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6), least=2)


# -- precision and memory formats -----------------------------------------------------------------------------


def _conv_block() -> tuple[nn.Module, ...]:
    return (
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.GroupNorm(2, 6), nn.GELU(), nn.MaxPool2d(3, 1, 1)),
    )


def _conv3d_block() -> tuple[nn.Module, ...]:
    return (
        nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.PReLU()),
        nn.Sequential(nn.ConvTranspose3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LeakyReLU(inplace=True)),
    )


def _autocast(dtype: torch.dtype) -> Callable[[], object]:
    return lambda: torch.autocast("cpu", dtype)


def _mixed(net: Net, x: Tensor) -> Tensor:
    hidden = F.gelu(net.a(x))
    with torch.autocast("cpu", enabled=False):
        hidden = net.b(hidden.float()).softmax(-1)
    return net.a(hidden) * net.a(x)


def _linears() -> tuple[nn.Module, ...]:
    return (nn.Linear(16, 16), nn.Linear(16, 16))


kind("autocast to bf16", _twice, shape=IMAGE, parts=_conv_block, around=_autocast(torch.bfloat16), least=8)
kind("autocast to fp16", _twice, shape=IMAGE, parts=_conv_block, around=_autocast(torch.float16), least=8)
kind("autocast switched off inside", _mixed, parts=_linears, around=_autocast(torch.bfloat16), least=6)
kind("channels last", _twice, shape=IMAGE, parts=_conv_block, memory_format=torch.channels_last, least=6)
kind("channels last in 3d", _twice, shape=VOLUME, parts=_conv3d_block, memory_format=torch.channels_last_3d, least=6)
kind(
    "channels last under autocast",
    _twice,
    shape=IMAGE,
    parts=_conv_block,
    memory_format=torch.channels_last,
    around=_autocast(torch.bfloat16),
    least=6,
)


# -- ops with several outputs ---------------------------------------------------------------------------------


def _orders(net: Net, x: Tensor) -> Tensor:
    top, _ = (x * 2).topk(5, dim=1)
    ordered, places = (x * 3).sort(dim=1, descending=True)
    largest, _ = (x * 4).max(dim=1, keepdim=True)
    middle = (x * 5).median(dim=1).values.exp() + (x * 6).kthvalue(3, dim=1).values.sin()
    return top.exp() * ordered.sin()[:, :5] * largest.cos() * middle[:, None] + places[:, :5] * top


def _statistics(net: Net, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x * 2, dim=1, keepdim=True)
    high = (x * 3).amax(dim=1, keepdim=True)
    deviation, _ = torch.std_mean(x.exp(), dim=0, keepdim=True)
    return ((x - mean) / (variance + 1).sqrt() + high.exp() * deviation) * torch.cummax(x.sin(), 1).values


def _extremes(net: Net, x: Tensor) -> Tensor:
    low, high = torch.aminmax(x * 3, dim=1, keepdim=True)
    return (high - low).exp() * x.sin()


def _decompositions(net: Net, x: Tensor) -> Tensor:
    square = x[:, :6] @ x[:, :6].t() + 3 * torch.eye(6)
    lower = torch.linalg.cholesky(square).sin()
    first, second = torch.linalg.qr(x[:, :6] + 2 * torch.eye(6))
    left, values, right = torch.linalg.svd(x[:, :6] * torch.arange(1, 7), full_matrices=False)
    solved = torch.linalg.solve(square, second).sin() + torch.linalg.inv(square) * torch.linalg.det(square).log()
    return lower * first.exp() * solved + (left * values.sin()) @ right * torch.linalg.eigvalsh(square).log()


kind("topk, sort, max, median", _orders, least=8)
kind("var_mean, amax, cummax", _statistics, least=8)
kind("aminmax", _extremes, least=4)
kind("cholesky, qr, svd, solve", _decompositions, least=8)


# -- attention ------------------------------------------------------------------------------------------------


def _attention(backend: SDPBackend, **options: object) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        query, key, value = net.a(x).view(2, 8, 2, 3, 8).permute(3, 0, 2, 1, 4)
        mask = torch.ones(8, 8).tril().log() if options.get("mask") else None
        rest = {name: option for name, option in options.items() if name != "mask"}
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **rest)  # type: ignore[arg-type]
        return out.transpose(1, 2).reshape(2, 8, 16).exp()

    return body


ATTENTION: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": True},
    "dropout": {"dropout_p": 0.2},
    "causal dropout": {"is_causal": True, "dropout_p": 0.2},
    "mask dropout": {"mask": True, "dropout_p": 0.2},
}
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
for _backend, _which in BACKENDS.items():
    for _label, _options in ATTENTION.items():
        kind(
            f"attention {_backend} {_label}",
            _attention(_which, **_options),
            shape=(2, 8, 16),
            parts=lambda: (nn.Linear(16, 48),),
            least=3,
        )


def _multihead(net: Net, x: Tensor) -> Tensor:
    out, weights = net.a(x, x, x, need_weights=True)
    return net.b(out + weights.mean())


kind(
    "multi-head attention with its weights",
    _multihead,
    shape=(2, 8, 16),
    parts=lambda: (
        nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True),
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    ),
    least=10,
)
