"""Functions of one's own, with all that a context can be told, as bodies of ``autograd_steps.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor
Body = Callable[[nn.Module, Tensor], Tensor]


class Doubled(torch.autograd.Function):
    """Writes its input in place, says so, and saves what it wrote."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        rows.mul_(2)
        ctx.mark_dirty(rows)
        ctx.save_for_backward(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return gradient * 2 + rows.sign() * 0


class Sparing(torch.autograd.Function):
    """Two outputs of which one is not used, so that its gradient is none; one more that has none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ranks = rows.argsort(1)
        ctx.mark_non_differentiable(ranks)
        used = rows.exp()
        ctx.save_for_backward(used, None, ranks)
        return used, rows.sin(), ranks

    @staticmethod
    def backward(ctx: Any, used: Tensor, other: Tensor | None, ranks: Tensor | None) -> Tensor:
        assert other is None
        result, nothing, _ = ctx.saved_tensors
        assert nothing is None
        return used * result


class Once(torch.autograd.Function):
    """Its backward reads what it saved twice, and is not differentiable."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        middle = rows @ weight.t()
        ctx.save_for_backward(rows, weight, middle)
        return middle.tanh()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weight, _ = ctx.saved_tensors
        inner = gradient * (1 - ctx.saved_tensors[2].tanh().square())
        return inner @ weight, inner.t() @ rows if ctx.needs_input_grad[1] else None


class Cube(torch.autograd.Function):
    """With a context of its own, a rule for ``vmap``, and a backward that can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        slope = 3 * rows.square()
        return rows**3, slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, slope_gradient: Tensor) -> Tensor:
        rows, slope = ctx.saved_tensors
        return gradient * slope + slope_gradient * 6 * rows

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        rows, slope = ctx.saved_tensors
        return tangent * slope, tangent * 6 * rows


class Hidden(torch.autograd.Function):
    """Keeps a tensor as an attribute, past all hooks, and saves one input in three shapes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.kept = rows.detach().cos()
        ctx.save_for_backward(rows, rows.t(), rows[:, ::2], rows[:0], rows[:1].expand(4, -1))
        return rows.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        rows, turned, every_second, none, spread = ctx.saved_tensors
        assert turned.is_same_size(rows.t())
        assert not none.numel()
        assert spread.stride(0) == 0
        extra = (turned.t() - rows).sum() + (every_second - rows[:, ::2]).sum() + (spread[1] - rows[0]).sum()
        return gradient * ctx.kept + extra


class Within(torch.autograd.Function):
    """Its backward builds a graph of its own and goes back in it, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return (rows.sin() * rows).exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            rows = ctx.saved_tensors[0].detach().requires_grad_()
            found = (rows.sin() * rows).exp()
        (inner,) = torch.autograd.grad(found, [rows], gradient)
        return inner


class Same(torch.autograd.Function):
    """Returns its input as it is, and saves it as output."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return gradient * rows.cos()


class PastTheDispatcher(torch.autograd.Function):
    """Numpy computes and writes what is saved; negative zeros and a NaN with a payload are among it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        kept = rows.detach().clone()
        bits = kept.numpy().view("int32")
        bits[0, 0], bits[0, 1] = 0x7FC01234, -0x80000000
        ctx.save_for_backward(kept)
        return rows * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        bits = kept.view(torch.int32)
        assert [int(bits[0, 0]), int(bits[0, 1])] == [0x7FC01234, -0x80000000]
        return gradient * 2 + kept.nan_to_num().detach() * 0


def _payloads(inner: nn.Module, hidden: Tensor) -> Tensor:
    """NaN with a payload, and negative zeros, in what ops save and in the gradients themselves."""
    marks = torch.zeros_like(hidden, dtype=torch.int32)
    marks[0, 0], marks[0, 1] = 0x7FC01234, -0x80000000
    found: Tensor = (hidden * (marks.view(torch.float32) + 1)).exp() * inner(hidden)
    return torch.where(found.isnan(), hidden * marks.view(torch.float32), found)


def _mapped(inner: nn.Module, hidden: Tensor) -> Tensor:
    found: Tensor = torch.vmap(lambda row: Cube.apply(row)[0].sum() * row)(hidden)
    return inner(found)  # type: ignore[no-any-return]


BODIES: dict[str, Body] = {
    "a function that writes its input": lambda inner, hidden: inner(Doubled.apply(hidden * 1.5)) * 0.5,
    "a function that writes a view": lambda inner, hidden: inner(Doubled.apply((hidden + 0).view(-1)).view_as(hidden)),
    "a function without some gradients": lambda inner, hidden: inner(Sparing.apply(hidden)[0]),
    "a function that is differentiable once": lambda inner, hidden: Once.apply(inner(hidden), inner[0].weight),
    "a function of two outputs": lambda inner, hidden: inner(Cube.apply(hidden)[0]) + Cube.apply(hidden)[1],
    "a function that is mapped": _mapped,
    "a function that saves many views": lambda inner, hidden: inner(Hidden.apply(hidden * 1)),
    "a function that goes back within": lambda inner, hidden: inner(Within.apply(hidden)),
    "a function that returns its input": lambda inner, hidden: inner(Same.apply(inner(hidden))),
    "a function of numpy's": lambda inner, hidden: inner(PastTheDispatcher.apply(hidden)),
    "payloads of NaN and negative zeros": _payloads,
}
