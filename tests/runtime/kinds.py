"""What a kind of op is to the tests of replays: a small network by name. These that share or overwrite storages,
or draw at random; ``kinds_layers.py`` has the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.nets import Case, Net

Tensor = torch.Tensor
Body = Callable[[Net, Tensor], Tensor]
"""``net.a`` and ``net.b`` are the modules that it calls."""
TOKENS = torch.tensor([[1, 4, 0, 2, 2, 7], [3, 0, 5, 6, 1, 1]])


@dataclass
class Kind(Case):
    """A case whose replays are counted, and what must not be replayed in it."""

    least: int = 1
    """Values that are replayed in a step that recomputes all it may, at least."""
    refused: tuple[str, ...] = ()
    """What the reasons say for which values that the step bears are not recomputed."""
    mode_bytes: int = 0
    """What its backward takes more, at most, under a dispatch mode, where autograd has other formulas."""


KINDS: dict[str, Kind] = {}
IMAGE, VOLUME = (4, 6, 8, 8), (2, 4, 4, 6, 6)
WRITTEN_LATER = ("written in place after it was saved",)
"""Gates of recurrent cells: chunks of one storage, each written in place and saved before the next is written."""
ONEDNN = ("leaves some of its bytes unwritten",)
"""The padding of oneDNN's workspace."""


def kind(
    name: str,
    body: Body,
    *,
    shape: tuple[int, ...] = (6, 16),
    parts: Callable[[], tuple[nn.Module, ...]] = tuple,
    around: Callable[[], object] | None = None,
    memory_format: torch.memory_format | None = None,
    least: int = 1,
    refused: tuple[str, ...] = (),
    mode_bytes: int = 0,
) -> None:
    """Enters a network: ``body`` between a linear layer on the last dimension of ``shape`` and a sum of squares."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        named: dict[str, Any] = dict(zip("ab", parts(), strict=False))
        named |= {"generator": torch.Generator().manual_seed(7), "tokens": TOKENS.clone()}
        net = Net(lambda net, batch: body(net, net.first(batch).tanh()), first=nn.Linear(shape[-1], shape[-1]), **named)
        batch = torch.randn(shape)
        if memory_format is not None:
            net, batch = net.to(memory_format=memory_format), batch.to(memory_format=memory_format)

        def loss_of(model: nn.Module) -> Tensor:
            if around is None:
                return model(batch).square().mean()
            with around():  # type: ignore[attr-defined]
                return model(batch).float().square().mean()

        return net, loss_of

    KINDS[name] = Kind(
        make, functools.partial(torch.optim.SGD, lr=1e-3), least=least, refused=refused, mode_bytes=mode_bytes
    )


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


kind("several saved views", _several_views, least=3)
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
kind("rrelu", _leaky_at_random, refused=("the step writes that after it was read",))
kind("multinomial, randperm, randint", _drawn_indices, least=4)
kind("an explicit generator", _own_generator, least=4)
