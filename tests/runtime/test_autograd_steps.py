"""What torch's own tests of autograd try gives under every plan the bits of plain steps."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from tests.runtime import autograd_backwards
from tests.runtime.autograd_steps import WIDTH, Forward, Net
from tests.runtime.nets import as_bytes, taken
from tests.runtime.random_plans import random_plan

CASES = autograd_backwards.CASES
STEPS = 3
WEIGHTS = {"keep": (1, 0, 0), "swap": (0, 1, 0), "recompute": (0, 0, 1), "mixed": (1, 2, 2)}


def fresh(name: str) -> tuple[Net, Forward]:
    torch.manual_seed(0)
    net, rows = Net(CASES[name].body), torch.randn(8, WIDTH)
    return net, lambda: net(rows)


@functools.cache
def profile_of(name: str) -> Profile:
    """Of its forward, whose backward is a plain one."""
    with torch.random.fork_rng(devices=[]):
        net, forward = fresh(name)
        return taken(lambda: forward().square().mean(), net)


@functools.cache
def plain(name: str) -> list[list[bytes]]:
    return trained(name, None)


def trained(name: str, plan: Plan | None) -> list[list[bytes]]:
    """Bits of what each step gives, its gradients, the parameters behind it and the generator."""
    net, forward = fresh(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(1)
    seen = []
    with contextlib.nullcontext() if plan is None else poochplan.apply(plan, net) as session:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            given = CASES[name].backward(net, forward)
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            seen.append([as_bytes(one) for one in (*given, *gradients, *net.parameters(), torch.get_rng_state())])
            optimizer.step()
    if session is not None and CASES[name].is_planned:
        assert session.report().total.fallbacks == 0, session.report().total.fallback_reasons
    return seen


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_gives_under_a_plan_the_bits_of_a_plain_one(name: str, kind: str) -> None:
    plan = random_plan(profile_of(name), 0, WEIGHTS[kind])
    assert trained(name, plan) == plain(name)
