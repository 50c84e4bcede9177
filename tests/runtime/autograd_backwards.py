"""Ways to go backward, as cases of ``autograd_steps.py``: twice, in parts, mapped, with hooks, on threads."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import register_multi_grad_hook

from tests.runtime.autograd_steps import CASES, WIDTH, Backward, Case, Forward, Net, once, together

Tensor = torch.Tensor


def backward(run: Backward) -> Backward:
    """Enters a case that is a way to go backward, which may leave the plan."""
    CASES[run.__name__.replace("_", " ")] = Case(backward=run, is_planned=False)
    return run


@backward
def saved_tensors_read_by_hand(net: Net, forward: Forward) -> list[Tensor]:
    """As tools do that look at a graph; each look unpacks anew."""
    found = forward().exp()
    node: Any = found.grad_fn
    kept = [node._saved_result, node._saved_result]
    found.sum().backward()  # type: ignore[no-untyped-call]
    return kept


# --- Transforms, and forward mode -------------------------------------------------------------------------------------


@backward
def a_gradient_of_torch_func(net: Net, forward: Forward) -> list[Tensor]:
    """Torch refuses saved-tensors hooks there, so those of a session stand aside. It is a part of the graph."""
    found = forward()
    slope = torch.func.grad(lambda rows: (rows.sin() * rows).sum())(found)
    (found.square().mean() + slope.square().mean()).backward()
    return [slope]


@backward
def gradients_of_each_row(net: Net, forward: Forward) -> list[Tensor]:
    def loss_of(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(net.first, parameters, (row,)).square().sum()  # type: ignore[no-any-return]

    found = once(net, forward)
    rows = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    each = torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(dict(net.first.named_parameters()), rows)
    second = torch.func.hessian(lambda row: row.sin().prod())(rows[0])
    return [*found, *each.values(), second, *torch.func.vjp(torch.sin, rows)[1](rows)]


@backward
def forward_mode_beside_a_step(net: Net, forward: Forward) -> list[Tensor]:
    found = once(net, forward)
    with forward_ad.dual_level(), torch.no_grad():
        rows = torch.linspace(-1, 1, WIDTH).repeat(3, 1)
        tangent = forward_ad.unpack_dual(net.first(forward_ad.make_dual(rows, rows.cos())).tanh()).tangent
        return [*found, tangent]


# --- Backward, twice and otherwise ------------------------------------------------------------------------------------


@backward
def a_penalty_on_gradients(net: Net, forward: Forward) -> list[Tensor]:
    loss = forward().square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    (loss + sum(one.square().sum() for one in gradients)).backward()  # type: ignore[union-attr]
    return [loss, *gradients]


@backward
def a_product_with_the_hessian(net: Net, forward: Forward) -> list[Tensor]:
    weights = list(net.parameters())
    gradients = torch.autograd.grad(forward().square().mean(), weights, create_graph=True)
    directions = [one.detach().cos() for one in gradients]
    products = torch.autograd.grad(gradients, weights, directions, retain_graph=True)
    torch.autograd.backward(gradients, directions)
    return list(products)


@backward
def a_backward_of_a_backward_of_a_backward(net: Net, forward: Forward) -> list[Tensor]:
    found = forward().sin().sum()
    seen = []
    for _ in range(2):
        (gradient,) = torch.autograd.grad(found, [net.first.weight], create_graph=True)
        found = gradient.square().sum()
        seen.append(gradient)
    found.backward()  # type: ignore[no-untyped-call]
    return seen


@backward
def one_graph_three_times(net: Net, forward: Forward) -> list[Tensor]:
    loss = forward().square().mean()
    for _ in range(3):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return [loss]


@backward
def one_graph_in_parts(net: Net, forward: Forward) -> list[Tensor]:
    found = forward()
    first, last = [net.first.weight, net.first.bias], [net.last.weight]
    found.sum().backward(inputs=last, retain_graph=True)  # type: ignore[no-untyped-call]
    found.exp().sum().backward(inputs=first)  # type: ignore[no-untyped-call]
    return [found]


@backward
def several_roots_at_once(net: Net, forward: Forward) -> list[Tensor]:
    found = forward()
    torch.autograd.backward([found.sin().sum(), found.square()], [None, torch.ones_like(found)])
    return [found]


@backward
def many_directions_at_once(net: Net, forward: Forward) -> list[Tensor]:
    """``is_grads_batched``: backward runs mapped, and is handed what was saved."""
    found = forward()
    directions = torch.eye(3, found.shape[1]).unsqueeze(1).expand(3, *found.shape).contiguous()
    batched = torch.autograd.grad(found, [net.first.weight], directions, is_grads_batched=True, retain_graph=True)
    found.sum().backward()  # type: ignore[no-untyped-call]
    return list(batched)


@backward
def many_directions_mapped(net: Net, forward: Forward) -> list[Tensor]:
    """The same by ``vmap``, where random ops draw for each direction: those of forward, run again, must not."""
    found = forward()
    directions = torch.eye(3, found.shape[1]).unsqueeze(1).expand(3, *found.shape).contiguous()

    def back(direction: Tensor) -> Tensor:
        return torch.autograd.grad(found, [net.first.weight], direction, retain_graph=True)[0]

    batched = torch.vmap(back, randomness="different")(directions)
    found.sum().backward()  # type: ignore[no-untyped-call]
    return [batched]


@backward
def gradients_of_what_is_between(net: Net, forward: Forward) -> list[Tensor]:
    kept = []
    handle = net.first.register_forward_hook(lambda _, __, output: kept.append(output))
    found = forward()
    handle.remove()
    kept[0].retain_grad()
    found.square().sum().backward()  # type: ignore[no-untyped-call]
    return [kept[0].grad]


@backward
def a_backward_that_looks_for_anomalies(net: Net, forward: Forward) -> list[Tensor]:
    with torch.autograd.set_detect_anomaly(True):
        return once(net, forward)


@backward
def a_backward_that_finds_an_anomaly(net: Net, forward: Forward) -> list[Tensor]:
    """Then it raises, and another step follows."""
    said = ""
    try:
        with torch.autograd.set_detect_anomaly(True):
            (forward().sum() * 0).sqrt().backward()
    except RuntimeError as error:
        said = str(error)
    assert "returned nan values" in said
    net.zero_grad(set_to_none=True)
    return once(net, forward)


@backward
def an_exception_amid_backward(net: Net, forward: Forward) -> list[Tensor]:
    """A hook raises; the rest of the graph goes backward in a second call."""

    def stumble(_: Tensor) -> None:
        raise ZeroDivisionError

    found = forward()
    handle = found.register_hook(stumble)
    with contextlib.suppress(ZeroDivisionError):
        found.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    handle.remove()
    found.square().sum().backward()  # type: ignore[no-untyped-call]
    return [found]


# --- Hooks on gradients -----------------------------------------------------------------------------------------------


def _double(leaf: Tensor) -> None:
    leaf.grad.mul_(2)


@backward
def hooks_on_modules_and_leaves(net: Net, forward: Forward) -> list[Tensor]:
    seen: list[Tensor] = []
    leaves = [net.first.weight, net.last.weight]
    handles = [
        net.inner.register_full_backward_pre_hook(lambda _, given: (given[0] * 2,)),
        net.inner.register_full_backward_hook(lambda _, taken, __: (taken[0] + 1,)),
        register_multi_grad_hook(leaves, lambda gradients: seen.extend(g.clone() for g in gradients if g is not None)),
        register_multi_grad_hook(leaves, lambda gradient: seen.append(gradient.clone()), mode="any"),
        net.first.bias.register_post_accumulate_grad_hook(_double),
    ]
    found = once(net, forward)
    for handle in handles:
        handle.remove()
    return [*found, *seen]


@backward
def a_backward_within_a_hook(net: Net, forward: Forward) -> list[Tensor]:
    """Another graph goes backward amid this one's."""
    seen: list[Tensor] = []

    def inner(gradient: Tensor) -> None:
        with torch.enable_grad():
            leaf = gradient.detach().requires_grad_()
            seen.extend(torch.autograd.grad((leaf.exp() * leaf).sum(), [leaf]))

    found = forward()
    found.register_hook(inner)
    found.square().mean().backward()  # type: ignore[no-untyped-call]
    return seen


# --- Threads ----------------------------------------------------------------------------------------------------------


@backward
def one_graph_on_two_threads(net: Net, forward: Forward) -> list[Tensor]:
    """Each takes gradients of its own from the same saved tensors."""
    found, seen = forward(), [torch.empty(0)] * 2
    weights = list(net.parameters())

    def take(which: int) -> None:
        loss = found.square().mean() if which else found.exp().sum()
        seen[which] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)])

    together(lambda: take(0), lambda: take(1))
    found.sum().backward()  # type: ignore[no-untyped-call]
    return seen


@backward
def backward_on_a_thread_forward_on_another(net: Net, forward: Forward) -> list[Tensor]:
    loss = forward().square().mean()
    together(loss.backward)
    return [loss]
