"""Feasible plans that no planner made: random decisions and points, or decisions that are given, also about
sources; and the bits of the gradients that these give.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Decision, Plan, PlannedValue, PointActions, Prediction, Solve, SolveStatus
from poochplan.formats.profile import LinkDirection, PointKind, Profile
from poochplan.planner.policies import PolicyInput
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import STYLES, Candidate, try_style
from poochplan.planner.simulator.sources import with_sources
from poochplan.planner.writing import with_decisions, write_plan
from tests.runtime.nets import Case, as_bytes

SWITCHES = (0.15, 0.4, 0.8)
"""At how many of the save points recording goes on or off."""
NOT_SOLVED: dict[str, Any] = dict.fromkeys(("objective_s", "bound_s", "gap")) | {"wall_s": 0, "rounds": 0}
NOT_PREDICTED: dict[str, Any] = {one.name: 0 for one in msgspec.structs.fields(Prediction) if one.required}


def random_plan(profile: Profile, seed: int, weights: tuple[float, float, float] = (1, 2, 2)) -> Plan:
    """A plan whose decisions are drawn by ``weights`` (keep, swap, recompute) among those the profile allows."""
    chance = random.Random(seed)
    saves = [profile.handles[point.handle].value for point in profile.points if point.kind is PointKind.SAVE]
    position = {value: index for index, value in enumerate(saves)}
    uses = [point.handle for point in profile.points if point.kind is PointKind.USE]
    first_use = {position[profile.handles[handle].value]: index for index, handle in reversed([*enumerate(uses)])}
    decisions = [_decision(profile, value, chance, weights) for value in saves]
    measured = {"in_core_peak_bytes": profile.in_core_peak_bytes, "memory": profile.memory}
    return Plan(
        workload=profile.workload,
        profile_fingerprint=profile.ops_fingerprint,
        budget_bytes=1 << 40,
        device=profile.device.kind,
        solve=Solve(policy="random", solver="none", status=SolveStatus.NOT_NEEDED, **NOT_SOLVED),
        prediction=Prediction(**NOT_PREDICTED | measured),
        link=profile.link,
        record_from_start=Decision.RECOMPUTE in decisions,
        model=profile.model,
        inputs=profile.inputs,
        values=_values(profile, saves, decisions),
        handles=tuple(position[handle.value] for handle in profile.handles),
        uses=tuple(uses),
        schedule=random_actions(decisions, [first_use.get(index, 0) for index in position.values()], chance, 0.7),
    )


def random_actions(
    decisions: Sequence[Decision], first_use: Sequence[int], rng: random.Random, fetched: float
) -> tuple[PointActions, ...]:
    """Random points for each value; ``fetched`` is the share that is prefetched of those that have a first use."""
    at: dict[tuple[bool, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for value, (decision, use) in enumerate(zip(decisions, first_use, strict=True)):
        if decision is Decision.SWAP:
            at[False, value]["swap_out"].append(value)
            at[False, rng.randint(value, min(len(decisions) - 1, value + 6))]["release"].append(value)
            if use >= 0 and rng.random() < fetched:
                at[True, rng.randint(max(0, use - 5), use)]["prefetch"].append(value)
        if decision is Decision.RECOMPUTE and use >= 0 and rng.random() < 0.5:
            at[True, rng.randint(max(0, use - 3), use)]["replay"].append(value)
    return tuple(
        PointActions(
            at="use" if is_use else "save",
            index=index,
            **{name: tuple(values) for name, values in at[is_use, index].items()},  # type: ignore[arg-type]
        )
        for is_use, index in sorted(at)
    )


def _decision(profile: Profile, value: int, chance: random.Random, weights: tuple[float, float, float]) -> Decision:
    facts = profile.values[value]
    drawn = chance.choices(list(Decision), weights)[0]
    if facts.pinned or (drawn is Decision.RECOMPUTE and facts.unreplayable):
        return Decision.KEEP
    return drawn


def _values(profile: Profile, saves: list[int], decisions: list[Decision]) -> tuple[PlannedValue, ...]:
    values, end = [], 0
    for value, decision in zip(saves, decisions, strict=True):
        facts = profile.values[value]
        offset = end if decision is Decision.SWAP else -1
        end += -(-facts.size_bytes // 4096) * 4096 if decision is Decision.SWAP else 0
        same: Any = {name: getattr(facts, name) for name in ("name", "layer", "size_bytes", "dtype", "shape")}
        values.append(PlannedValue(decision=decision, host_offset=offset, **same))
    return tuple(values)


def decided(profile: Profile, wishes: Sequence[Decision], **options: Any) -> Plan:
    """Values are decided so in turn, where they can be; any peak and any arena are within the budget."""
    base = poochplan.plan(profile, "100%", evaluations=1, **options)
    base = msgspec.structs.replace(base, budget_bytes=poochplan.smallest_budget(profile, arena="off"))
    changes: dict[str, Decision | str] = {
        value.name: wishes[index % len(wishes)] for index, value in enumerate(base.values)
    }
    while True:
        try:
            return msgspec.structs.replace(with_decisions(profile, base, changes), budget_bytes=1 << 40)
        except UsageError as error:
            del changes[str(error).partition(": cannot be decided")[0]]


def gate_replayed_early(profile: Profile) -> Plan:
    """Of ``nets.gated``: the gate is recomputed at the first use, before what it is made of was used."""
    plan = random_plan(profile, 0, (1, 0, 0))
    values = tuple(
        msgspec.structs.replace(value, decision=Decision.RECOMPUTE) if "sigmoid" in value.name else value
        for value in plan.values
    )
    (gate,) = (index for index, value in enumerate(values) if value.decision is Decision.RECOMPUTE)
    at_first_use = PointActions(at="use", index=0, replay=(gate,))
    return msgspec.structs.replace(plan, values=values, schedule=(at_first_use,), record_from_start=True)


def fetched_early(plan: Plan) -> Plan:
    """The same plan, with everything prefetched at the first use."""
    swapped = tuple(index for actions in plan.schedule for index in actions.release)
    saves = tuple(actions for actions in plan.schedule if actions.at == "save")
    return msgspec.structs.replace(plan, schedule=(*saves, PointActions(at="use", index=0, prefetch=swapped)))


def windowed(plan: Plan, seed: int) -> Plan:
    """The plan with recording switched on and off at random save points."""
    chance = random.Random(seed)
    share, is_on = chance.choice(SWITCHES), chance.random() < 0.5
    points = {(actions.at, actions.index): actions for actions in plan.schedule}
    plan = msgspec.structs.replace(plan, record_from_start=is_on)
    for index in range(len(plan.values)):
        if chance.random() < share:
            is_on = not is_on
            actions = points.get(("save", index)) or PointActions(at="save", index=index)
            points["save", index] = msgspec.structs.replace(actions, record="on" if is_on else "off")
    ordered = sorted(points, key=lambda point: (point[0] == "use", point[1]))
    return msgspec.structs.replace(plan, schedule=tuple(points[point] for point in ordered))


KEEP, _, RECOMPUTE = Decision


def planned(
    case: Case, wish: list[Decision], budget_share: float = 0.0, style: int = 0, *, is_laid_out: bool = False
) -> tuple[Plan, Candidate]:
    profile = with_sources(case.profile())
    budget_bytes = int(budget_share * profile.in_core_peak_bytes)
    found = try_style(Problem.of(profile), "by hand", wish, budget_bytes, STYLES[style])
    given = PolicyInput(Problem.of(profile), 1 << 40)
    return write_plan(given, Optimum(found, "by hand"), 0.0, is_laid_out=is_laid_out), found


def problem_of(case: Case) -> Problem:
    return Problem.of(case.profile(), has_sources=True)


def held(problem: Problem, of_sources: Decision, others: Decision = KEEP) -> list[Decision]:
    """Every copy that can be is recomputed, and its source is decided so."""
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
