"""One small network for each kind of op that a replay must get right, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from nets import Case
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensor = torch.Tensor
Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A linear layer, what is to be tried, and a loss; ``parts`` are the modules that ``body`` calls."""

    generator: torch.Generator

    def __init__(self, body: Body, width: int, **parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.body = body
        self.generator = torch.Generator().manual_seed(7)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, batch: Tensor) -> Tensor:
        return self.body(self, self.first(batch).tanh())


@dataclass
class Kind(Case):
    """A case whose replays are counted, and what must not be replayed in it."""

    least: int = 1
    """Values that are replayed in a step that recomputes all it may, at least."""
    refused: tuple[str, ...] = ()
    """What the reasons say for which values that the step bears are not recomputed."""
    slow: bool = False

    def fresh(self) -> tuple[nn.Module, Callable[[], Tensor], torch.optim.Optimizer]:
        model, step, _ = super().fresh()
        return model, step, torch.optim.SGD(model.parameters(), lr=1e-3)


KINDS: dict[str, Kind] = {}
WRITTEN_LATER = ("written in place after it was saved",)
"""Gates of recurrent cells: chunks of one storage, each written in place and saved before the next is written."""
ONEDNN = ("its replay gave other bits",)
"""The padding of oneDNN's workspace is left uninitialised."""


def kind(
    name: str,
    body: Body,
    *,
    shape: tuple[int, ...] = (6, 16),
    parts: Callable[[], dict[str, nn.Module]] = dict,
    around: Callable[[], object] | None = None,
    memory_format: torch.memory_format | None = None,
    least: int = 1,
    refused: tuple[str, ...] = (),
    slow: bool = False,
) -> None:
    """Enters a network: ``body`` between a linear layer on the last dimension of ``shape`` and a sum of squares."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        net, batch = Net(body, shape[-1], **parts()), torch.randn(shape)
        if memory_format is not None:
            net, batch = net.to(memory_format=memory_format), batch.to(memory_format=memory_format)

        def loss_of(model: nn.Module) -> Tensor:
            if around is None:
                return model(batch).square().mean()
            with around():  # type: ignore[attr-defined]
                return model(batch).float().square().mean()

        return net, loss_of

    KINDS[name] = Kind(make, least=least, refused=refused, slow=slow)


# -- in-place chains ------------------------------------------------------------------------------------------


def _chain(net: Net, x: Tensor) -> Tensor:
    x = x * 1.5
    flat = x.view(-1)
    flat.mul_(1.25)
    x[:, :8].add_(0.5)
    x.t().masked_fill_(torch.eye(16, 6, dtype=torch.bool), 0.25)
    x.relu_()
    return (x + 0).sin() * x.exp()


def _activations(net: Net, x: Tensor) -> Tensor:
    for act in (F.relu_, F.leaky_relu_, F.elu_, F.hardtanh_, torch.tanh_, torch.sigmoid_, F.selu_, torch.clamp_min_):
        x = act(x * 1.1, 0.1) if act is torch.clamp_min_ else act(x * 1.1)  # type: ignore[operator]
    return F.silu(F.hardswish(x + 0.1, inplace=True), inplace=True)


def _filled_by_parts(net: Net, x: Tensor) -> Tensor:
    out = torch.zeros(6, 16)
    out[:, :8] = x[:, 8:].sin()
    out[:, 8:] = x[:, :8].cos()
    return out.exp() * out


def _left_uninitialised(net: Net, x: Tensor) -> Tensor:
    out = torch.empty(6, 16)
    out[:, :8] = x[:, 8:].sin()
    out[:, 8:] = x[:, :8].cos()
    return out.exp() * out


def _written_between_saves(net: Net, x: Tensor) -> Tensor:
    x = x * 2
    grown = x.detach().exp() * (x + 1)
    x.add_(1).sigmoid_()
    return grown * x


def _unsafe_chunks(net: Net, x: Tensor) -> Tensor:
    first, second, third, fourth = (x * 1.5).unsafe_chunk(4, 1)
    first = first.sigmoid_()
    second = second.tanh_()
    return first * second + third.sigmoid_() * fourth.tanh_()


def _accumulated(net: Net, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for step in range(3):
        total += x.mul(step + 1).sin()
        total *= 0.5
    return total.addcmul_(total.detach().clone(), x).exp()


kind("in-place chain through views", _chain, least=4)
kind("in-place activations", _activations, least=4)
kind("filled by parts", _filled_by_parts, least=3)
kind("uninitialised, filled by parts", _left_uninitialised, refused=("aten.empty",))
kind("written between two readers", _written_between_saves, least=3)
kind("in-place on unsafe chunks", _unsafe_chunks, refused=WRITTEN_LATER)
kind("accumulated in place", _accumulated, least=3)


# -- views ----------------------------------------------------------------------------------------------------


def _several_views(net: Net, x: Tensor) -> Tensor:
    whole = x * 2
    left, right = whole[:, :8], whole[:, 8:]
    return left.exp() * right.sin() + whole.t()[:8].t().cos() * whole.view(12, 8)[::2]


def _as_strided(net: Net, x: Tensor) -> Tensor:
    return (x * 2).as_strided((4, 5), (3, 7), 2).exp() * (x * 3).as_strided((4, 5), (0, 1)).sin()


def _splits(net: Net, x: Tensor) -> Tensor:
    one, two = (x * 2).chunk(2, 1)
    three, four = (x * 3).split([6, 10], 1)
    rows = (x * 4).unbind(0)
    return one.exp() * two.sin() + (three.sin().sum() + four.cos().sum()) * rows[2][:8].exp() * rows[4][8:].tanh()


def _expanded(net: Net, x: Tensor) -> Tensor:
    row = (x[:1] * 2).expand(6, 16)
    return row.exp() * x + row.sin() * x.mean(1, keepdim=True).expand_as(x).cos()


def _rearranged(net: Net, x: Tensor) -> Tensor:
    cube = (x * 2).view(6, 4, 4).permute(2, 0, 1)
    return cube.exp().diagonal(dim1=0, dim2=2) @ cube.sin().movedim(1, 0).unfold(0, 2, 1).contiguous()[:4, 0, :, 0]


kind("several saved views", _several_views, least=3, slow=True)
kind("as_strided", _as_strided, least=3)
kind("chunk, split, unbind", _splits, least=5)
kind("expand", _expanded, least=3)
kind("permute, diagonal, unfold", _rearranged, least=2)


# -- random ops -----------------------------------------------------------------------------------------------


def _dropouts(net: Net, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.3)
    x = F.dropout(x * 2, 0.3, inplace=True)
    x = F.alpha_dropout(x + 0.1, 0.2)
    return F.dropout1d(x.view(6, 4, 4), 0.3).exp() * F.feature_alpha_dropout(x.view(6, 4, 4), 0.3)


def _noise(net: Net, x: Tensor) -> Tensor:
    x = x * torch.bernoulli(torch.full_like(x, 0.6)) + torch.randn_like(x) * x
    x = x + torch.normal(x.detach(), 0.5) * x
    return F.gumbel_softmax(x, tau=0.7) * torch.poisson(x.detach().abs() + 1) * x


def _leaky_at_random(net: Net, x: Tensor) -> Tensor:
    return F.rrelu(x * 2, training=True) * F.rrelu_(x * 3, training=True).exp()


def _drawn_indices(net: Net, x: Tensor) -> Tensor:
    chosen = torch.multinomial(x.detach().softmax(1), 4)
    order = torch.randperm(6)
    return (x.gather(1, chosen).exp() * x[order][:, :4]).sin() * torch.randint(1, 5, (6, 4))


def _own_generator(net: Net, x: Tensor) -> Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5, generator=net.generator)
    noise = torch.randn(6, 16, generator=net.generator)
    own = torch.rand(6, 16, generator=net.generator)
    return (x * mask * 2).exp() * (x + noise * torch.randn(6, 16)) * own


kind("dropout", _dropouts, least=6)
kind("bernoulli, normal, gumbel, poisson", _noise, least=8)
kind("rrelu", _leaky_at_random, refused=("aten.empty_like", "writes into something it does not own"))
kind("multinomial, randperm, randint", _drawn_indices, least=4)
kind("an explicit generator", _own_generator, least=4)


# -- normalisation --------------------------------------------------------------------------------------------


def _stages(*names: str) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        for name in names:
            x = F.relu(net.get_submodule(name)(x)) + 0.1 * x
        return x

    return body


def _norms(norm: type[nn.Module], size: int, **options: object) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"a": norm(size, **options), "b": norm(size, **options)}


IMAGE, VOLUME = (4, 6, 8, 8), (2, 4, 4, 6, 6)
_twice = _stages("a", "b")
kind("batch norm 1d", _twice, parts=_norms(nn.BatchNorm1d, 16), least=4, slow=True)
kind("batch norm 1d on series", _twice, shape=(4, 6, 8), parts=_norms(nn.BatchNorm1d, 6), least=4, slow=True)
kind("batch norm 2d", _twice, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6), least=4)
kind("batch norm 3d", _twice, shape=VOLUME, parts=_norms(nn.BatchNorm3d, 4), least=4)
kind("batch norm, cumulative", _twice, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6, momentum=None), least=4)
kind(
    "batch norm, no statistics",
    _twice,
    shape=IMAGE,
    parts=_norms(nn.BatchNorm2d, 6, track_running_stats=False),
    least=4,
    slow=True,
)
kind("batch norm, no weights", _twice, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6, affine=False), least=4, slow=True)
kind("instance norm", _twice, shape=IMAGE, parts=_norms(nn.InstanceNorm2d, 6, affine=True), least=4, slow=True)
kind(
    "instance norm with statistics",
    _twice,
    shape=IMAGE,
    parts=_norms(nn.InstanceNorm2d, 6, track_running_stats=True),
    least=2,
    refused=("aten.native_batch_norm",),
)
kind("group norm", _twice, shape=IMAGE, parts=lambda: {"a": nn.GroupNorm(2, 6), "b": nn.GroupNorm(6, 6)}, least=4)
kind("layer norm", _twice, parts=_norms(nn.LayerNorm, 16), least=4)
kind("rms norm", _twice, parts=_norms(nn.RMSNorm, 16), least=4, slow=True)
kind("local response norm", _twice, shape=IMAGE, parts=_norms(nn.LocalResponseNorm, 2), least=4, slow=True)
kind("batch norm used twice", _stages("a", "b", "a"), shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6), least=6)


def _frozen_norm(net: Net, x: Tensor) -> Tensor:
    net.get_submodule("a").eval()
    return F.relu(net.get_submodule("a")(x)) * net.get_submodule("b")(x)


kind("batch norm in eval mode", _frozen_norm, shape=IMAGE, parts=_norms(nn.BatchNorm2d, 6), least=2)


# -- precision and memory formats -----------------------------------------------------------------------------


def _conv_block() -> dict[str, nn.Module]:
    return {
        "a": nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        "b": nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.GroupNorm(2, 6), nn.GELU(), nn.MaxPool2d(3, 1, 1)
        ),
    }


def _conv3d_block() -> dict[str, nn.Module]:
    return {
        "a": nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.PReLU()),
        "b": nn.Sequential(nn.ConvTranspose3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LeakyReLU(inplace=True)),
    }


def _autocast(dtype: torch.dtype) -> Callable[[], object]:
    return lambda: torch.autocast("cpu", dtype)


def _mixed(net: Net, x: Tensor) -> Tensor:
    hidden = F.gelu(net.get_submodule("a")(x))
    with torch.autocast("cpu", enabled=False):
        hidden = net.get_submodule("b")(hidden.float()).softmax(-1)
    return net.get_submodule("a")(hidden) * net.get_submodule("a")(x)


def _linears() -> dict[str, nn.Module]:
    return {"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}


kind("autocast to bf16", _twice, shape=IMAGE, parts=_conv_block, around=_autocast(torch.bfloat16), least=8)
kind("autocast to fp16", _twice, shape=IMAGE, parts=_conv_block, around=_autocast(torch.float16), least=8)
kind("autocast switched off inside", _mixed, parts=_linears, around=_autocast(torch.bfloat16), least=6)
kind("channels last", _twice, shape=IMAGE, parts=_conv_block, memory_format=torch.channels_last, least=6, slow=True)
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
    low, high = torch.aminmax(x * 3, dim=1, keepdim=True)
    deviation, _ = torch.std_mean(x.exp(), dim=0, keepdim=True)
    return ((x - mean) / (variance + 1).sqrt() + (high - low).exp() * deviation) * torch.cummax(x.sin(), 1).values


def _decompositions(net: Net, x: Tensor) -> Tensor:
    square = x[:, :6] @ x[:, :6].t() + 3 * torch.eye(6)
    lower = torch.linalg.cholesky(square).sin()
    first, second = torch.linalg.qr(x[:, :6] + 2 * torch.eye(6))
    left, values, right = torch.linalg.svd(x[:, :6] * torch.arange(1, 7), full_matrices=False)
    solved = torch.linalg.solve(square, second).sin() + torch.linalg.inv(square) * torch.linalg.det(square).log()
    return lower * first.exp() * solved + (left * values.sin()) @ right * torch.linalg.eigvalsh(square).log()


kind("topk, sort, max, median", _orders, least=8)
kind("var_mean, aminmax, cummax", _statistics, least=8)
kind("cholesky, qr, svd, solve", _decompositions, least=8)


# -- attention ------------------------------------------------------------------------------------------------


def _attention(backend: SDPBackend, **options: object) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        query, key, value = net.get_submodule("a")(x).view(2, 8, 2, 3, 8).permute(3, 0, 2, 1, 4)
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
OFTEN = {"math dropout", "math mask", "flash causal", "flash mask"}
for _backend, _which in BACKENDS.items():
    for _label, _options in ATTENTION.items():
        kind(
            f"attention {_backend} {_label}",
            _attention(_which, **_options),
            shape=(2, 8, 16),
            parts=lambda: {"a": nn.Linear(16, 48)},
            least=3,
            slow=f"{_backend} {_label}" not in OFTEN,
        )


def _multihead(net: Net, x: Tensor) -> Tensor:
    out, weights = net.get_submodule("a")(x, x, x, need_weights=True)
    return net.get_submodule("b")(out + weights.mean())


kind(
    "multi-head attention with its weights",
    _multihead,
    shape=(2, 8, 16),
    parts=lambda: {
        "a": nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True),
        "b": nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    },
    least=10,
)


# -- recurrent networks ---------------------------------------------------------------------------------------


def _recurrent(net: Net, x: Tensor) -> Tensor:
    out, state = net.get_submodule("a")(x)
    last = state[0] if isinstance(state, tuple) else state
    return out.exp().sum() + last.sin().sum()


def _packed(net: Net, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 2]), batch_first=True)
    out, _ = net.get_submodule("a")(packed)
    return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].exp()


def _cells(net: Net, x: Tensor) -> Tensor:
    hidden = memory = x.new_zeros(3, 16)
    state = x.new_zeros(3, 16)
    for step in x.unbind(1):
        hidden, memory = net.get_submodule("a")(step, (hidden, memory))
        state = net.get_submodule("b")(hidden, state)
    return state.exp() * memory


SERIES = (3, 7, 16)
_DEEP = {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True}
_GONE = ("is gone before backward",)
"""The batch sizes of a packed sequence, from outside torch."""


def _recurrent_kinds(
    name: str, layer: Callable[..., nn.Module], least: tuple[int, int, int], refused: tuple[str, ...]
) -> None:
    one, deep, packed = least
    kind(
        name, _recurrent, shape=SERIES, parts=lambda: {"a": layer(16, 16, batch_first=True)}, least=one, refused=refused
    )
    kind(
        f"{name}, deep",
        _recurrent,
        shape=SERIES,
        parts=lambda: {"a": layer(16, 12, **_DEEP)},
        least=deep,
        refused=refused,
        slow=True,
    )
    rest = (*WRITTEN_LATER, *_GONE)
    kind(
        f"{name}, packed",
        _packed,
        shape=SERIES,
        parts=lambda: {"a": layer(16, 12, **_DEEP)},
        least=packed,
        refused=rest,
        slow=True,
    )


_recurrent_kinds("lstm", nn.LSTM, (9, 17, 20), ONEDNN)
_recurrent_kinds("gru", nn.GRU, (10, 30, 30), WRITTEN_LATER)
_recurrent_kinds("rnn", nn.RNN, (12, 36, 36), ())
kind(
    "lstm with projections",
    _recurrent,
    shape=SERIES,
    parts=lambda: {"a": nn.LSTM(16, 16, proj_size=4, batch_first=True)},
    least=15,
    refused=WRITTEN_LATER,
    slow=True,
)
kind(
    "lstm and gru cells",
    _cells,
    shape=SERIES,
    parts=lambda: {"a": nn.LSTMCell(16, 16), "b": nn.GRUCell(16, 16)},
    least=15,
    refused=WRITTEN_LATER,
)


# -- embedding and indexing -----------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, 4, 0, 2, 2, 7], [3, 0, 5, 6, 1, 1]])


def _embedded(net: Net, x: Tensor) -> Tensor:
    return net.get_submodule("a")(TOKENS + 0).sin() * x[:2, None].exp()


def _embedded_twice(net: Net, x: Tensor) -> Tensor:
    again = net.get_submodule("a")(TOKENS.flip(0) % 5)
    return _embedded(net, x) * again.exp()


def _bags(net: Net, x: Tensor) -> Tensor:
    weights = (x[:2, :6] * 2).contiguous()
    return net.get_submodule("a")(TOKENS).exp() * net.get_submodule("b")(TOKENS, per_sample_weights=weights).sin()


def _embedding(**options: object) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"a": nn.Embedding(8, 16, **options)}  # type: ignore[arg-type]


kind("embedding", _embedded, parts=_embedding(padding_idx=0), least=3)
kind("embedding, sparse gradient", _embedded, parts=_embedding(sparse=True), least=3)
kind("embedding, renormalised", _embedded, parts=_embedding(max_norm=1.0), least=3)
kind(
    "embedding, renormalised between readers",
    _embedded_twice,
    parts=_embedding(max_norm=1.0),
    least=5,
    refused=("was written in place since it was read",),
)
kind(
    "embedding bag",
    _bags,
    parts=lambda: {"a": nn.EmbeddingBag(8, 16, mode="max"), "b": nn.EmbeddingBag(8, 16, mode="sum")},
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


kind("index_select, gather, indexing", _picked, least=6)
kind("scatter, index_put, masked_scatter", _put, least=4)
kind("where, cumsum, one_hot, roll", _chosen, least=8)


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
kind("pooling with indices", _pooled, shape=IMAGE, least=6, slow=True)
# What lies beyond the lengths is left uninitialised; the lengths come from outside torch.
kind(
    "ctc loss", _ctc, shape=(9, 2, 6), least=2, refused=("its replay gave other bits", "an input of the replay is gone")
)
kind("losses", _losses, least=6)
# A lazily conjugated tensor is not rebuilt.
kind("fft and complex numbers", _spectrum, least=6, refused=("an input of the replay is gone",))
kind(
    "einsum, bilinear, weight norm",
    lambda net, x: (
        torch.einsum("ij,kj->ik", x.exp(), x.sin())
        * net.get_submodule("a")(x, x.cos())
        @ net.get_submodule("b")(x).exp()
    ),
    shape=(6, 6),
    parts=lambda: {"a": nn.Bilinear(6, 6, 6), "b": nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))},
    least=6,
)
kind(
    "spectral norm",
    lambda net, x: net.get_submodule("a")(x).exp(),
    parts=lambda: {"a": nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))},
    least=1,
)
