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
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.runtime import autograd_functions as functions

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


@body
def hooks_that_lose_bits(net: Net, hidden: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda x: x.to(torch.bfloat16), lambda x: x.to(torch.float32)):
        return net.inner(hidden) * hidden.exp()


@body
def hooks_that_pack_a_tuple(net: Net, hidden: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda x: (x.shape, x.detach().reshape(-1) + 0), lambda kept: kept[1].view(kept[0])):
        return net.inner(hidden).sigmoid() * hidden


@body
def save_on_cpu_within(net: Net, hidden: Tensor) -> Tensor:
    with save_on_cpu():
        hidden = net.inner(hidden).exp()
    return hidden * hidden.sin()


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
def a_sequence_of_checkpoints(net: Net, hidden: Tensor) -> Tensor:
    found: Tensor = checkpoint_sequential(net.inner, 2, hidden, use_reentrant=False)
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

for name, run in functions.BODIES.items():
    CASES[name] = Case(body=lambda net, hidden, run=run: run(net.inner, hidden))  # type: ignore[misc]


# --- Transforms, and forward mode -------------------------------------------------------------------------------------


@body
def mapped_over_rows(net: Net, hidden: Tensor) -> Tensor:
    found: Tensor = torch.vmap(lambda row: row.sin() * (row * row).sum(), in_dims=0)(hidden)
    return net.inner(found)  # type: ignore[no-any-return]


@body
def mapped_with_random_numbers(net: Net, hidden: Tensor) -> Tensor:
    found: Tensor = torch.vmap(nn.functional.dropout, randomness="different")(hidden)
    return net.inner(found.exp())  # type: ignore[no-any-return]


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
    assert found.grad_fn is not None
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
