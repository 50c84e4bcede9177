"""Plans of a case by decisions that are given, also about sources and bits, and the bits of the gradients they give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import torch
from torch import nn

import poochplan
from poochplan.formats.narrow import with_smaller
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import LinkDirection, Profile
from poochplan.planner.policies import PolicyInput
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.simulate import STYLES, Candidate, try_style
from poochplan.planner.writing import write_plan
from tests.runtime.nets import Case, as_bytes

KEEP, _, RECOMPUTE = Decision


def planned(
    case: Case, wish: list[Decision], budget_share: float = 0.0, style: int = 0, *, is_laid_out: bool = False
) -> tuple[Plan, Candidate]:
    profile = with_smaller(case.profile())
    budget_bytes = int(budget_share * profile.in_core_peak_bytes)
    found = try_style(build_problem(profile), "by hand", wish, budget_bytes, STYLES[style])
    given = PolicyInput.of(profile, 1 << 40)
    return write_plan(given, Optimum(found, "by hand"), 0.0, is_laid_out=is_laid_out), found


def problem_of(case: Case) -> Problem:
    return build_problem(with_smaller(case.profile()))


def held(problem: Problem, of_sources: Decision, others: Decision = KEEP) -> list[Decision]:
    """Every copy that can be is recomputed, and its source, or a mask's bits, is decided so."""
    wish = [KEEP if reason else others for reason in problem.must_keep]
    for source, copy in problem.copies.items():
        if problem.replay.replays[copy] is not None:
            possible = of_sources is not RECOMPUTE or problem.replay.replays[source] is not None
            wish[copy], wish[source] = RECOMPUTE, of_sources if possible else KEEP
    return wish


def with_slow_copies(profile: Profile) -> Profile:
    slow = LinkDirection(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    line = msgspec.structs.replace(profile.link, outward=slow, inward=slow)
    return msgspec.structs.replace(profile, link=line, runtime=None)


def gradient_bits(
    model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], plan: Plan | None = None, fallbacks: int = 0
) -> list[bytes]:
    """Of one step, in-core or under a plan that falls back so often."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    with contextlib.nullcontext() if plan is None else poochplan.apply(plan, model) as session:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
    assert session is None or session.report().total.fallbacks == fallbacks
    return [as_bytes(one.grad) for one in model.parameters() if one.grad is not None]
