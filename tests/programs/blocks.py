"""The blocks of random programs: modules from ``[rows, width]`` to the same, and what may be around one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .late_writes import LATE, Late

Tensor = torch.Tensor
Body = Callable[["OneLinear", Tensor], Tensor]


class OneLinear(nn.Module):
    """A linear layer ``widening`` times as wide as its input, and what ``body`` makes of it."""

    def __init__(self, width: int, body: Body, widening: int = 1, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, widening * width)
        self.inner = inner if inner is not None else nn.Identity()
        self.generator = torch.Generator().manual_seed(width)
        self._body = body
        self.width = width

    def forward(self, hidden: Tensor) -> Tensor:
        return self._body(self, hidden)


class WithBuffers(nn.Module):
    """Counts its calls and keeps a running mean; both are read in forward behind their writes."""

    count: Tensor
    mean: Tensor

    def __init__(self, width: int, *, averages: bool) -> None:
        super().__init__()
        self.averages = averages
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count.add_(1)
        hidden = self.linear(hidden)
        if self.averages:
            self.mean.mul_(0.9).add_(hidden.detach().float().mean(0), alpha=0.1)
            return (hidden - self.mean).tanh()
        return hidden.tanh() * (1 / self.count.clone())


class Hooked(nn.Module):
    """Hooks on its hidden tensor and on the gradient of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 1.5)
            hidden.retain_grad()
        return hidden.sigmoid() * hidden


class Tied(nn.Module):
    """The weights of another linear layer, once as they are and once transposed."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(self.other(hidden).tanh(), self.other.weight.t()).tanh()


class GruCell(nn.Module):
    """Chunks of one storage that have version counters of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.cell(hidden, self.cell(hidden))


def _attention(self: OneLinear, hidden: Tensor) -> Tensor:
    query, key, value = self.linear(hidden).view(hidden.shape[0], 3, 2, -1).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(query, key, value)
    return hidden + mixed.transpose(0, 1).reshape(hidden.shape)


def _recurrent(self: OneLinear, hidden: Tensor) -> Tensor:
    return self.linear(self.inner(hidden.unsqueeze(0))[0].squeeze(0)).tanh()


def _convolution(self: OneLinear, hidden: Tensor) -> Tensor:
    images = self.linear(hidden).view(hidden.shape[0], 1, 4, -1)
    return self.inner(images).relu().mean(1).reshape(hidden.shape)


def _chunked(self: OneLinear, hidden: Tensor) -> Tensor:
    gate, value = self.linear(hidden).chunk(2, dim=-1)
    return gate.sigmoid() * value.tanh()


def _transposed(self: OneLinear, hidden: Tensor) -> Tensor:
    pairs = self.linear(hidden).view(hidden.shape[0], 4, -1)
    mixed = torch.bmm(pairs.transpose(1, 2), pairs.softmax(-1))
    return hidden + mixed.mean(1).repeat(1, hidden.shape[1] // mixed.shape[2])


def _interleaved(self: OneLinear, hidden: Tensor) -> Tensor:
    hidden = self.linear(hidden).tanh()
    first, second = hidden[:, ::2], hidden[:, 1::2]
    third, fourth = hidden.view(hidden.shape[0], 2, -1).unbind(1)
    return torch.cat([first * fourth, third.exp() * second.flip(0)], dim=-1)


def _windowed(self: OneLinear, hidden: Tensor) -> Tensor:
    hidden = self.linear(hidden).sin()
    windows = hidden.unfold(1, 4, 2) * hidden.narrow(1, 0, 4).unsqueeze(1)
    rest = hidden.as_strided((hidden.shape[0], 1), (hidden.stride(0), 1), 3).expand(-1, hidden.shape[1])
    return rest * F.pad(windows.sum(-1), (0, hidden.shape[1] - windows.shape[1])).cos()


def _activated_in_place(self: OneLinear, hidden: Tensor) -> Tensor:
    hidden = self.linear(hidden)
    hidden.mul_(1.25).add_(0.1)
    hidden = self.inner(hidden.relu_())
    return hidden.sigmoid_()


def _filled(self: OneLinear, hidden: Tensor) -> Tensor:
    half = hidden.shape[1] // 2
    value = self.linear(hidden)
    whole = torch.empty_like(value)
    whole[:, :half] = value[:, half:].tanh()
    whole[:, half:] = value[:, :half].sin()
    return whole * whole.sigmoid()


def _scattered(self: OneLinear, hidden: Tensor) -> Tensor:
    value = self.linear(hidden).tanh()
    order = torch.arange(value.shape[0]).flip(0)
    sums = torch.zeros_like(value).index_add_(0, order, value)
    sums.masked_fill_(value > 0.5, 0.25)
    return sums.square() + value


def _written_through_a_view(self: OneLinear, hidden: Tensor) -> Tensor:
    value = self.linear(hidden)
    value.view(-1)[::3].mul_(0.5)
    value[:, 1:3].exp_()
    return value.cos()


def _noise(self: OneLinear, hidden: Tensor) -> Tensor:
    hidden = self.linear(hidden)
    return (hidden * torch.rand_like(hidden)).tanh() + torch.randn(hidden.shape[1]) * 0.1


def _own_generator(self: OneLinear, hidden: Tensor) -> Tensor:
    mask = torch.empty(hidden.shape).bernoulli_(0.7, generator=self.generator)
    return self.linear(hidden).tanh() * mask


def _dropout_in_place(self: OneLinear, hidden: Tensor) -> Tensor:
    return F.dropout(self.linear(hidden), 0.3, inplace=True).tanh()


def _gated_without_gradients(self: OneLinear, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        gate = self.linear(hidden).sigmoid()
        gate[:, ::2] = 1
    return self.linear(hidden * gate).tanh()


def _through(self: OneLinear, hidden: Tensor) -> Tensor:
    return self.inner(self.linear(hidden)).tanh()


def _normed_in_32_bits(self: OneLinear, hidden: Tensor) -> Tensor:
    narrow = self.linear(hidden).to(torch.bfloat16) * 0.5
    wide = narrow.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) + narrow.exp().to(hidden.dtype)


def _repeated(self: OneLinear, hidden: Tensor) -> Tensor:
    both = (self.linear(hidden) * 0.5).unsqueeze(1).expand(-1, 2, -1).clone()
    return (both * torch.stack([hidden, hidden.tanh()], 1)).sum(1)


def _narrow_written_later(self: OneLinear, hidden: Tensor) -> Tensor:
    narrow = self.linear(hidden).to(torch.bfloat16) * 0.5
    squared = narrow.float().square()
    narrow.mul_(2)
    return (squared + narrow.float()).tanh()


def bare_block(kind: str, width: int, others: list[nn.Linear]) -> nn.Module:
    """A block of that kind; ``others`` are linear layers whose weights one may share."""
    of_linear: dict[str, tuple[Body, int, Callable[[], nn.Module | None]]] = {
        "linear": (_through, 1, lambda: None),
        "attention": (_attention, 3, lambda: None),
        "normalised": (_through, 1, lambda: nn.LayerNorm(width)),
        "recurrent": (_recurrent, 1, lambda: nn.LSTM(width, width, batch_first=True)),
        "convolution": (_convolution, 1, lambda: nn.Conv2d(1, 3, 3, padding=1)),
        "chunked": (_chunked, 2, lambda: None),
        "transposed": (_transposed, 1, lambda: None),
        "interleaved": (_interleaved, 1, lambda: None),
        "windowed": (_windowed, 1, lambda: None),
        "activated in place": (_activated_in_place, 1, lambda: nn.Linear(width, width)),
        "filled": (_filled, 1, lambda: None),
        "scattered": (_scattered, 1, lambda: None),
        "written through a view": (_written_through_a_view, 1, lambda: None),
        "dropout": (_through, 1, lambda: nn.Dropout(0.2)),
        "noise": (_noise, 1, lambda: None),
        "own generator": (_own_generator, 1, lambda: None),
        "dropout in place": (_dropout_in_place, 1, lambda: None),
        "batch norm": (_through, 1, lambda: nn.BatchNorm1d(width)),
        "gated without gradients": (_gated_without_gradients, 1, lambda: None),
        "normed in 32 bits": (_normed_in_32_bits, 1, lambda: None),
        "repeated": (_repeated, 1, lambda: None),
        "narrow written later": (_narrow_written_later, 1, lambda: None),
    }
    if kind in LATE:
        return Late(kind, width)
    if kind in of_linear:
        body, widening, inner = of_linear[kind]
        return OneLinear(width, body, widening, inner())
    if kind in ("counted", "averaged"):
        return WithBuffers(width, averages=kind == "averaged")
    if kind == "tied":
        return Tied(others[0])
    return {"hooked": Hooked, "gru cell": GruCell}[kind](width)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, hidden, use_reentrant=self.reentrant)
        return found


class Saving(nn.Module):
    """The user's own saved-tensors hooks: copies, or values that forward and backward see at half their size."""

    def __init__(self, inner: nn.Module, *, halves: bool) -> None:
        super().__init__()
        self.inner, self.halves = inner, halves

    def forward(self, hidden: Tensor) -> Tensor:
        with self._hooks():
            return self.inner(hidden)

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        def pack(tensor: Tensor) -> Any:
            return tensor.detach() * 0.5 if self.halves and tensor.is_floating_point() else tensor.detach().clone()

        def unpack(packed: Tensor) -> Tensor:
            return packed * 2 if self.halves and packed.is_floating_point() else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def _with_module_hooks(inner: nn.Module) -> nn.Module:
    inner.register_forward_pre_hook(lambda module, given: (given[0] * 0.9,))
    inner.register_forward_hook(lambda module, given, found: found * 1.1 + 0.01)
    inner.register_full_backward_hook(lambda module, taken, given: (taken[0] * 1.05,))
    return inner


def wrapped(wrapper: str, inner: nn.Module) -> nn.Module:
    """The block with what is around it."""
    if wrapper == "module hooks":
        return _with_module_hooks(inner)
    if wrapper in ("checkpoint", "reentrant checkpoint"):
        return Checkpointed(inner, reentrant=wrapper != "checkpoint")
    return Saving(inner, halves=wrapper == "saved as halves") if wrapper else inner
