"""Kinds of layer: normalisation, precision and memory formats, several outputs, attention; and kinds of data: series,
indices, images, complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.runtime.kinds import IMAGE, ONEDNN, VOLUME, WRITTEN_LATER, Body, Tensor, kind
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


# -- recurrent networks ---------------------------------------------------------------------------------------


def _recurrent(net: Net, x: Tensor) -> Tensor:
    out, state = net.a(x)
    last = state[0] if isinstance(state, tuple) else state
    return out.exp().sum() + last.sin().sum()


def _packed(net: Net, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 2]), batch_first=True)
    out, _ = net.a(packed)
    return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].exp()


def _cells(net: Net, x: Tensor) -> Tensor:
    hidden = memory = x.new_zeros(3, 16)
    state = x.new_zeros(3, 16)
    for step in x.unbind(1):
        hidden, memory = net.a(step, (hidden, memory))
        state = net.b(hidden, state)
    return state.exp() * memory


SERIES = (3, 7, 16)
_DEEP = {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True}
_GONE = ("is gone before backward",)
"""The batch sizes of a packed sequence, from outside torch."""


def _recurrent_kinds(
    name: str,
    layer: Callable[..., nn.Module],
    least: tuple[int, int, int],
    refused: tuple[str, ...],
    packed_mode_bytes: int = 0,
) -> None:
    one, deep, packed = least
    kind(name, _recurrent, shape=SERIES, parts=lambda: (layer(16, 16, batch_first=True),), least=one, refused=refused)
    kind(
        f"{name}, deep", _recurrent, shape=SERIES, parts=lambda: (layer(16, 12, **_DEEP),), least=deep, refused=refused
    )
    rest = (*WRITTEN_LATER, *_GONE)
    kind(
        f"{name}, packed",
        _packed,
        shape=SERIES,
        parts=lambda: (layer(16, 12, **_DEEP),),
        least=packed,
        refused=rest,
        mode_bytes=packed_mode_bytes,
    )


_recurrent_kinds("lstm", nn.LSTM, (9, 17, 20), ONEDNN, packed_mode_bytes=1024)
_recurrent_kinds("gru", nn.GRU, (10, 30, 30), WRITTEN_LATER)
_recurrent_kinds("rnn", nn.RNN, (12, 36, 36), ())
kind(
    "lstm with projections",
    _recurrent,
    shape=SERIES,
    parts=lambda: (nn.LSTM(16, 16, proj_size=4, batch_first=True),),
    least=15,
    refused=WRITTEN_LATER,
)
kind(
    "lstm and gru cells",
    _cells,
    shape=SERIES,
    parts=lambda: (nn.LSTMCell(16, 16), nn.GRUCell(16, 16)),
    least=15,
    refused=WRITTEN_LATER,
)


# -- embedding and indexing -----------------------------------------------------------------------------------


def _embedded(net: Net, x: Tensor) -> Tensor:
    return net.a(net.tokens + 0).sin() * x[:2, None].exp()


def _embedded_twice(net: Net, x: Tensor) -> Tensor:
    again = net.a(net.tokens.flip(0) % 5)
    return _embedded(net, x) * again.exp()


def _bags(net: Net, x: Tensor) -> Tensor:
    weights = (x[:2, :6] * 2).contiguous()
    return net.a(net.tokens).exp() * net.b(net.tokens, per_sample_weights=weights).sin()


def _embedding(**options: object) -> Callable[[], tuple[nn.Module, ...]]:
    return lambda: (nn.Embedding(8, 16, **options),)  # type: ignore[arg-type]


kind("embedding", _embedded, parts=_embedding(padding_idx=0), least=3)
kind("embedding, sparse gradient", _embedded, parts=_embedding(sparse=True), least=3)
kind("embedding, renormalised", _embedded, parts=_embedding(max_norm=1.0), least=3)
kind(
    "embedding, renormalised between readers",
    _embedded_twice,
    parts=_embedding(max_norm=1.0),
    least=5,
    refused=("the step writes that after it was read",),
)
kind(
    "embedding bag",
    _bags,
    parts=lambda: (nn.EmbeddingBag(8, 16, mode="max"), nn.EmbeddingBag(8, 16, mode="sum")),
    least=3,
)


def _picked(net: Net, x: Tensor) -> Tensor:
    rows, columns = torch.tensor([0, 2, 5]), torch.tensor([[1, 3], [0, 0], [15, 2]])
    picked = (x * 2).index_select(0, rows)[:, :2].exp() * (x * 3).gather(1, columns).sin()[:3]
    return picked * (x * 4)[rows[:, None], columns].cos() * (x * 5)[x.detach()[:, 0] > -2][:3, :2].exp()


def _put(net: Net, x: Tensor) -> Tensor:
    places = torch.tensor([[1, 3], [0, 2], [15, 4]])
    out = torch.zeros(6, 16).scatter(1, places, (x * 2)[:3, :2])
    out = out.scatter_add(1, places, (x * 3)[:3, :2]).index_add(0, torch.tensor([1, 1]), x[:2].exp())
    out.index_put_((torch.tensor([0, 4]), torch.tensor([3, 3])), x[0, :2] * 2, accumulate=True)
    out[torch.tensor([True, False] * 3)] = x[3:].sin()
    return out.masked_scatter(out.detach() > 0.5, x.cos()).exp() * out.index_fill(1, torch.tensor([2]), 0.5)


def _chosen(net: Net, x: Tensor) -> Tensor:
    where = torch.where(x > 0, x * 2, x.exp()) * x.cumsum(1).sin() * x.cumprod(0).cos()
    hot = F.one_hot(x.detach().argmax(1), 16) * x.sin()
    return where * hot.exp() * x.roll(1, 1).flip(0).tril().exp() * x.repeat_interleave(2, 1)[:, :16].cos()


kind("index_select, gather, indexing", _picked, least=6, mode_bytes=512)
kind("scatter, index_put, masked_scatter", _put, least=4)
kind("where, cumsum, one_hot, roll", _chosen, least=8, mode_bytes=2560)


# -- images, sequences, complex numbers -----------------------------------------------------------------------


def _resized(net: Net, x: Tensor) -> Tensor:
    x = F.interpolate(x * 2, scale_factor=2, mode="bilinear").exp()
    x = F.interpolate(x, size=(7, 9), mode="bicubic", align_corners=True).sin()
    x = F.interpolate(x, size=(8, 8), mode="nearest").cos() * F.interpolate(x, size=(8, 8), mode="area")
    return F.grid_sample(
        x, F.affine_grid(torch.eye(2, 3).repeat(4, 1, 1), [4, 6, 8, 8], False), align_corners=False
    ).exp()


def _folded(net: Net, x: Tensor) -> Tensor:
    patches = F.unfold(x * 2, 3, padding=1).sin()
    x = F.fold(patches, (8, 8), 3, padding=1).exp()
    shuffled = F.pixel_unshuffle(x.view(4, 6, 8, 8), 2).sin()
    return F.pad(F.pixel_shuffle(shuffled, 2).exp(), (1, 1, 1, 1), mode="reflect").sin() * 2


def _pooled(net: Net, x: Tensor) -> Tensor:
    pooled, places = F.max_pool2d(x * 2, 2, return_indices=True)
    x = F.max_unpool2d(pooled.exp(), places, 2).sin() + F.adaptive_avg_pool2d(x, 8).exp()
    return F.avg_pool2d(x, 3, 1, 1).exp() * F.lp_pool2d(x.abs() + 1, 2, 3, 1).mean() * F.adaptive_max_pool2d(x, 8)


def _ctc(net: Net, x: Tensor) -> Tensor:
    likely = (x * 2).log_softmax(-1)
    return F.ctc_loss(likely, torch.tensor([[1, 2, 3], [4, 4, 0]]), (9, 7), (3, 2)) + x.exp().mean()


def _losses(net: Net, x: Tensor) -> Tensor:
    labels = torch.tensor([1, 4, 0, 15, -100, 2])
    total = F.cross_entropy(x * 2, labels, label_smoothing=0.1) + F.kl_div(
        x.log_softmax(1), x.detach().softmax(0), reduction="batchmean"
    )
    total = total + F.binary_cross_entropy_with_logits(x, (x.detach() > 0).float()) + F.smooth_l1_loss(x.exp(), x)
    total = total + F.cosine_similarity(x, x.flip(0)).mean() + F.multi_margin_loss(x, labels.clamp(min=0))
    return total + F.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0)) + F.huber_loss(x.sin(), x.cos())


def _spectrum(net: Net, x: Tensor) -> Tensor:
    waves = torch.fft.rfft(x * 2)
    filtered = torch.fft.irfft(waves * waves.conj() * torch.polar(x[:, :9].exp(), x[:, :9]), n=16)
    both = torch.complex(x.sin(), x.cos())
    return filtered * torch.fft.fft2(both).abs() * torch.view_as_real(both * both.mH.mT.conj()).sum(-1)


kind("interpolate, grid_sample", _resized, shape=IMAGE, least=6)
kind("unfold, fold, pixel_shuffle", _folded, shape=IMAGE, least=5)
kind("pooling with indices", _pooled, shape=IMAGE, least=6)
# What lies beyond the lengths is left uninitialised; the lengths come from outside torch.
kind(
    "ctc loss", _ctc, shape=(9, 2, 6), least=2, refused=("its replay gave other bits", "a tensor that it needs is gone")
)
kind("losses", _losses, least=6)
# A lazily conjugated tensor is not rebuilt.
kind("fft and complex numbers", _spectrum, least=6, refused=("a tensor that it needs is gone",))
kind(
    "einsum, bilinear, weight norm",
    lambda net, x: torch.einsum("ij,kj->ik", x.exp(), x.sin()) * net.a(x, x.cos()) @ net.b(x).exp(),
    shape=(6, 6),
    parts=lambda: (nn.Bilinear(6, 6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
    least=6,
)
kind(
    "spectral norm",
    lambda net, x: net.a(x).exp(),
    parts=lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),),
    least=1,
)
