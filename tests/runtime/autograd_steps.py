"""What torch's own tests of autograd try, as steps of a small network: hooks, checkpoints, functions, double backward.

Read beside ``test/test_autograd.py`` of torch: its classes on saved-tensors hooks, nested checkpoints, forward mode,
custom functions, anomaly mode and threads. Each is a body amid the network, or a way to go backward, or both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

Tensor = torch.Tensor
WIDTH = 16
Body = Callable[["Net", Tensor], Tensor]
Forward = Callable[[], Tensor]
Backward = Callable[["Net", Forward], list[Tensor]]


class Net(nn.Module):
    """Linear layers around ``body``, which may call ``inner`` and draws random numbers there."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(self, self.first(rows).tanh()).sigmoid())
        return found


def through(net: Net, hidden: Tensor) -> Tensor:
    found: Tensor = net.inner(hidden) * hidden.exp()
    return found


def once(net: Net, forward: Forward) -> list[Tensor]:
    loss = forward().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss]


@dataclass(frozen=True)
class Case:
    body: Body = through
    backward: Backward = once
    """What a step runs, given the model and its forward: returns what is compared beside gradients and buffers."""
    is_planned: bool = True
    """Whether it saves and uses what a plain backward does, so that a plan is followed to the end."""


CASES: dict[str, Case] = {}


def body(run: Body) -> Body:
    """Enters a case that is a body."""
    CASES[run.__name__.replace("_", " ")] = Case(body=run)
    return run


# --- Hooks on saved tensors -------------------------------------------------------------------------------------------


@body
def hooks_within_hooks(net: Net, hidden: Tensor) -> Tensor:
    """The innermost alone are called; the outer ones save what comes behind."""
    with saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        hidden = hidden.sin()
        with saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
            hidden = hidden.exp() * hidden
        return hidden.cos() * net.inner(hidden)


def within(hooks: Callable[[], contextlib.AbstractContextManager[None]]) -> Body:
    def run(net: Net, hidden: Tensor) -> Tensor:
        with hooks():
            hidden = net.inner(hidden).exp() * hidden
        return hidden * hidden.sin()

    return run


HOOKS: dict[str, Callable[[], Any]] = {
    "hooks that lose bits": lambda: saved_tensors_hooks(lambda x: x.to(torch.bfloat16), lambda x: x.to(torch.float32)),
    "hooks that pack a tuple": lambda: saved_tensors_hooks(
        lambda x: (x.shape, x.detach().reshape(-1) + 0), lambda kept: kept[1].view(kept[0])
    ),
    "save on cpu within": save_on_cpu,
}
CASES |= {name: Case(body=within(hooks)) for name, hooks in HOOKS.items()}


@body
def save_on_cpu_in_a_checkpoint(net: Net, hidden: Tensor) -> Tensor:
    def run(rows: Tensor) -> Tensor:
        with save_on_cpu():
            return through(net, rows)

    found: Tensor = checkpoint(run, hidden, use_reentrant=False)
    return found.sin() * hidden


@body
def a_checkpoint_in_save_on_cpu(net: Net, hidden: Tensor) -> Tensor:
    with save_on_cpu():
        found: Tensor = checkpoint(through, net, hidden, use_reentrant=False)
        return found.sin() * hidden


@body
def hooks_left_by_an_exception(net: Net, hidden: Tensor) -> Tensor:
    with contextlib.suppress(ZeroDivisionError), saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        hidden = hidden.exp()
        raise ZeroDivisionError
    return through(net, hidden)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def nested(net: Net, hidden: Tensor, *, depth: int, early: bool) -> Tensor:
    def run(rows: Tensor) -> Tensor:
        return (nested(net, rows.sin(), depth=depth - 1, early=early) if depth else through(net, rows)).cos()

    with set_checkpoint_early_stop(early):
        found: Tensor = checkpoint(run, hidden, use_reentrant=False)
    return found


CASES["nested checkpoints that stop early"] = Case(lambda net, hidden: nested(net, hidden, depth=2, early=True))
CASES["nested checkpoints to the end"] = Case(lambda net, hidden: nested(net, hidden, depth=2, early=False))


@body
def reentrant_in_another(net: Net, hidden: Tensor) -> Tensor:
    def run(rows: Tensor) -> Tensor:
        found: Tensor = checkpoint(through, net, rows.exp(), use_reentrant=True)
        return found.sin()

    found: Tensor = checkpoint(run, hidden, use_reentrant=False)
    return found * hidden


@body
def two_in_a_reentrant_one(net: Net, hidden: Tensor) -> Tensor:
    def run(rows: Tensor) -> Tensor:
        left = checkpoint(through, net, rows, use_reentrant=False)
        right = checkpoint(torch.sin, rows, use_reentrant=True)
        return left * right  # type: ignore[no-any-return]

    found: Tensor = checkpoint(run, hidden, use_reentrant=True)
    return found * hidden


@body
def a_checkpoint_that_chooses(net: Net, hidden: Tensor) -> Tensor:
    """Products are saved, all else runs again: torch's selective checkpointing."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    found: Tensor = checkpoint(
        through, net, hidden, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    return found.sin()


@body
def a_checkpoint_that_draws_anew(net: Net, hidden: Tensor) -> Tensor:
    """``preserve_rng_state=False``, of what draws nothing."""
    found: Tensor = checkpoint(lambda x: x.exp().sin() * x, hidden, use_reentrant=False, preserve_rng_state=False)
    return net.inner(found)  # type: ignore[no-any-return]


@body
def a_checkpoint_of_many_outputs(net: Net, hidden: Tensor) -> Tensor:
    def run(rows: Tensor, *, scale: float, gone: None) -> tuple[Tensor, str, Tensor]:
        return rows.sin() * scale, "a word", net.inner(rows).exp()

    found, _, other = checkpoint(run, hidden, scale=2.0, gone=None, use_reentrant=False)
    return found * other  # type: ignore[no-any-return]


# --- Functions of one's own -------------------------------------------------------------------------------------------


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


def _payloads(net: Net, hidden: Tensor) -> Tensor:
    """NaN with a payload, and negative zeros, in what ops save and in the gradients themselves."""
    marks = torch.zeros_like(hidden, dtype=torch.int32)
    marks[0, 0], marks[0, 1] = 0x7FC01234, -0x80000000
    found: Tensor = (hidden * (marks.view(torch.float32) + 1)).exp() * net.inner(hidden)
    return torch.where(found.isnan(), hidden * marks.view(torch.float32), found)


def _mapped(net: Net, hidden: Tensor) -> Tensor:
    found: Tensor = torch.vmap(lambda row: Cube.apply(row)[0].sum() * row)(hidden)
    return net.inner(found)  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Body] = {
    "a function that writes its input": lambda net, hidden: net.inner(Doubled.apply(hidden * 1.5)) * 0.5,
    "a function that writes a view": lambda net, hidden: net.inner(
        Doubled.apply((hidden + 0).view(-1)).view_as(hidden)
    ),
    "a function without some gradients": lambda net, hidden: net.inner(Sparing.apply(hidden)[0]),
    "a function that is differentiable once": lambda net, hidden: Once.apply(net.inner(hidden), net.inner[0].weight),
    "a function of two outputs": lambda net, hidden: net.inner(Cube.apply(hidden)[0]) + Cube.apply(hidden)[1],
    "a function that is mapped": _mapped,
    "a function that saves many views": lambda net, hidden: net.inner(Hidden.apply(hidden * 1)),
    "a function that goes back within": lambda net, hidden: net.inner(Within.apply(hidden)),
    "a function that returns its input": lambda net, hidden: net.inner(Same.apply(net.inner(hidden))),
    "a function of numpy's": lambda net, hidden: net.inner(PastTheDispatcher.apply(hidden)),
    "payloads of NaN and negative zeros": _payloads,
    "a sequence of checkpoints": lambda net, hidden: (
        hidden * checkpoint_sequential(net.inner, 2, hidden, use_reentrant=False)
    ),
    "mapped over rows": lambda net, hidden: net.inner(torch.vmap(lambda row: row.sin() * (row * row).sum())(hidden)),
    "mapped with random numbers": lambda net, hidden: net.inner(
        torch.vmap(nn.functional.dropout, randomness="different")(hidden).exp()
    ),
}
CASES |= {name: Case(body=run) for name, run in FUNCTIONS.items()}


# --- Transforms, and forward mode -------------------------------------------------------------------------------------


@body
def forward_mode_amid_forward(net: Net, hidden: Tensor) -> Tensor:
    """A directional derivative is a part of what forward gives: reverse over forward."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden, hidden.detach().cos())
        primal, tangent = forward_ad.unpack_dual(dual.sin() * dual.exp())
        return net.inner(primal) + tangent.tanh()  # type: ignore[no-any-return]


@body
def a_product_with_a_jacobian(net: Net, hidden: Tensor) -> Tensor:
    found, tangent = torch.func.jvp(lambda rows: rows.sin() * rows, (hidden,), (hidden.detach().cos(),))
    return net.inner(found) + tangent  # type: ignore[no-any-return]


# --- Hooks on gradients -----------------------------------------------------------------------------------------------


def hooked(net: Net, hidden: Tensor) -> Tensor:
    """Gradients are changed by hooks of tensors, nodes and modules, one of them in place."""
    found = through(net, hidden)
    found.register_hook(lambda gradient: gradient * 0.5)
    found.register_hook(lambda gradient: gradient.add_(0.25))
    found.grad_fn.register_prehook(lambda gradients: tuple(one * 3 for one in gradients))
    found.grad_fn.register_hook(lambda taken, _: tuple(one if one is None else one.flip(0) for one in taken))
    return found


CASES["hooks that change gradients"] = Case(body=hooked)


# --- Threads ----------------------------------------------------------------------------------------------------------


def together(*runs: Callable[[], Any]) -> None:
    """Each on a thread of its own; what one raises is raised."""
    raised: list[BaseException] = []

    def guarded(run: Callable[[], Any]) -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error


@body
def a_part_of_forward_on_another_thread(net: Net, hidden: Tensor) -> Tensor:
    """Hooks are a thread's own: what is saved there is none of the session's, and goes backward with the rest."""
    seen: list[Tensor] = []
    together(lambda: seen.append(hidden.sin() * hidden.exp()))
    return net.inner(seen[0]) * hidden  # type: ignore[no-any-return]


@body
def a_branch_by_torch_cond(net: Net, hidden: Tensor) -> Tensor:
    """A higher-order operator, which a dispatch mode is handed as one op."""
    found: Tensor = torch.cond(hidden.sum() > 0, lambda rows: rows.sin() * rows, lambda rows: rows.cos(), (hidden,))
    return net.inner(found.exp()) * found  # type: ignore[no-any-return]
