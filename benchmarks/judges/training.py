"""A training of anybody's network, plain and under plans of four kinds, compared by the bytes of all that it leaves."""

from __future__ import annotations

import gc
import hashlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import nn

import poochplan
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Layout, Plan
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, Link, LinkDirection
from poochplan.verify import seed_everything
from tests.runtime.random_plans import random_plan

STEPS = 5
"""An arena serves from the third step of a plan on."""
AUTO_STEPS, AUTO_BUDGET, WAIT_S = 24, "90%", 60
"""The steps are so small that digests of what they leave are a good part of the peak."""
AGAIN, ANY_BYTES = 8, 1 << 40
LINE = LinkDirection(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
LINK = Link(name="none", outward=LINE, inward=LINE)
WEIGHTS = {"swap": (0, 1, 0), "recompute": (0, 0, 1), "mixed": (1, 2, 2)}


MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


@dataclass
class Training:
    """A model, and what gives its loss."""

    model: nn.Module
    loss_of: Callable[[], torch.Tensor]
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = MOMENTUM


Make = Callable[[], Training]
"""Gives the same training again."""


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the bytes as they lie: a NaN's payload and the sign of a zero count."""
    total = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().to("cpu", copy=True)  # a gradient that is known to be zero has no bytes before
        if plain.is_sparse:
            plain = plain.to_dense()
        plain = plain.resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            total.update(plain.view(-1).view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def run(
    make: Make, plan: Plan | Literal["auto"] | None = None, steps: int = STEPS, **options: Any
) -> tuple[list[dict[str, str]], Any]:
    """Digests of what each step leaves, and the session's report. ``auto`` steps wait for a plan in the making."""
    seed_everything(0)
    training = make()
    optimizer = training.optimizer_of(training.model.parameters())
    seed_everything(1)
    seen: list[dict[str, str]] = []

    def go(settle: Callable[[], object] = lambda: None) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = training.loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [one.grad for one in training.model.parameters() if one.grad is not None]
            seen.append(
                {
                    "loss": digest([loss]),
                    "gradients": digest(gradients),
                    "buffers": digest(training.model.buffers()),
                    "generator": digest([torch.get_rng_state()]),
                }
            )
            del gradients, loss
            optimizer.step()
            seen[-1]["parameters"] = digest(training.model.parameters())
            settle()

    if plan is None:
        go()
        return seen, None
    if plan == "auto":
        with poochplan.auto(training.model, optimizer, **options) as session:
            go(partial(session.wait_until_planned, WAIT_S))
    else:
        with poochplan.apply(plan, training.model, **options) as session:
            go()
    return seen, session.report()


def profile_of(make: Make) -> Profile:
    """Of one step."""
    seed_everything(0)
    training = make()
    optimizer = training.optimizer_of(training.model.parameters())
    return poochplan.profile(
        training.loss_of, model=training.model, optimizer=optimizer, iterations=1, link=LINK, workload="judged"
    )


def plans_of(profile: Profile, seed: int = 0) -> dict[str, Plan]:
    """Swap all, recompute all that may be, mixed, and solved for 70%, or else the smallest budget.

    All but the last have room for an arena of any size; so has a solved one that lays none out.
    """
    plans = {kind: roomy(random_plan(profile, seed, weights)) for kind, weights in WEIGHTS.items()}
    try:
        solved = poochplan.plan(profile, "70%", evaluations=100)
    except InfeasibleError:
        solved = poochplan.plan(profile, poochplan.smallest_budget(profile), evaluations=100)
    return plans | {"solved": solved if solved.prediction.arena_bytes else roomy(solved)}


def roomy(plan: Plan) -> Plan:
    """The same with room for an arena of any size, in which the smallest blocks lie too."""
    layout = Layout(arena_bytes=0, least_bytes=LEAST_COUNTED_BYTES, places=())
    prediction = msgspec.structs.replace(plan.prediction, arena_bytes=0, arena_peak_bytes=0)
    return msgspec.structs.replace(plan, layout=layout, prediction=prediction, budget_bytes=ANY_BYTES)


def judged(make: Make, seed: int = 0) -> dict[str, Any]:
    """What is found of one network: its ``status`` (equal, different, unsteady), and facts of each plan."""
    plain, _ = run(make)
    gc.collect()
    profile = profile_of(make)
    found: dict[str, Any] = {"status": "equal", "values": len(profile.values), "plans": {}}
    plans = plans_of(profile, seed)
    for kind in (*plans, "solved, with room"):
        if kind not in plans and found["plans"]["solved"]["served_bytes"]:
            continue  # its own budget had room for the arena
        plan = plans.get(kind) or roomy(plans["solved"])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            planned, report = run(make, plan)
        facts = _facts(plan, report)
        over = [str(one.message) for one in told if "more than its budget" in str(one.message)]
        if over:
            facts["over_budget"] = over[0][:300]
        if planned != plain:
            found["status"] = "different"
            facts["difference"] = _difference(plain, planned)
        found["plans"][kind] = facts
        gc.collect()
    return found | _unsteady(make, plain, found["status"])


def _unsteady(make: Make, plain: list[dict[str, str]], status: str) -> dict[str, Any]:
    """Where bits differ: whether those of another plain run do, too."""
    for _ in range(AGAIN if status == "different" else 0):
        again, _ = run(make, steps=len(plain))
        if again != plain:
            return {"status": "unsteady", "reason": f"two plain runs differ: {_difference(plain, again)}"}
    return {}


def judged_under_auto(make: Make, seed: int = 0) -> dict[str, Any]:
    """The same of a session that profiles, plans in its second process, and follows."""
    plain, _ = run(make, steps=AUTO_STEPS)
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = {"budget": AUTO_BUDGET, "cache": cache, "link": LINK, "quiet": True, "time_limit_s": 0.3}
        found, report = run(make, "auto", AUTO_STEPS, on_refusal="swap", **asked)
    facts = _facts_of(report) | {"followed": report.steps_followed}
    status = "equal" if found == plain else "different"
    if status == "different":
        facts["difference"] = _difference(plain, found)
    return {"status": status, "plans": {"auto": facts}} | _unsteady(make, plain, status)


def _facts(plan: Plan, report: Any) -> dict[str, Any]:
    return {"decisions": dict(Counter(str(value.decision) for value in plan.values))} | _facts_of(report)


def _facts_of(report: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"served_bytes": report.total.served_bytes, "fallbacks": report.total.fallbacks}
    if report.total.fallbacks:
        facts["fallback"] = next(iter(map(str, report.total.fallback_reasons)), "")[:300]
    return facts


def _difference(left: list[dict[str, str]], right: list[dict[str, str]]) -> str:
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        parts = [part for part in a if a[part] != b[part]]
        if parts:
            return f"step {number + 1}: {', '.join(parts)}"
    return "none"
