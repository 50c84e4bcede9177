"""Which model is this: its signature, where it differs from the one that a plan is for, and which plan is for which."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest

import torch

from poochplan.errors import ModelMismatchError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.formats.profile import ModelSignature, Profile
from poochplan.runtime.compiled.inductor import written_replays
from poochplan.tensors.signatures import model_tensors


def model_signature(model: torch.nn.Module) -> ModelSignature:
    """The signature that profile and plan hold: all parameters and buffers, and their digest."""
    tensors = model_tensors(model)
    return ModelSignature(fingerprint=hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16], tensors=tensors)


def check_model(expected: ModelSignature, model: torch.nn.Module, what: str) -> None:
    """Raises ``ModelMismatchError`` naming the first parameter or buffer that differs.

    ``what`` is "plan" or "profile", for the message.
    """
    found = model_signature(model)
    if found.fingerprint == expected.fingerprint:
        return
    for wanted, seen in zip_longest(expected.tensors, found.tensors):
        if wanted != seen:
            raise ModelMismatchError(
                f"this {what} is for another model: expected {wanted or 'no further tensor'}, "
                f"found {seen or 'no further tensor'}; make a new profile and plan for this model"
            )


def check_graphs(plan: Plan | PlanSet, model: torch.nn.Module) -> None:
    """Raises ``UsageError`` where a plan recomputes inside compiled graphs, and the model's have not got these replays
    in them.
    """
    for one in plan.plans if isinstance(plan, PlanSet) else (plan,):
        if one.replays and written_replays(model) != frozenset(one.replays):
            raise UsageError(
                "plan: this plan is for a model that poochplan.compile has compiled: expected the "
                f"{len(one.replays)} replays that it has inside compiled graphs, found a model without them; call "
                "poochplan.compile(model, plan=plan) (pooch run --compile)"
            )


def by_name(
    plan: Plan | PlanSet | Mapping[str, Plan | PlanSet], model: torch.nn.Module | Mapping[str, torch.nn.Module]
) -> tuple[dict[str, Plan | PlanSet], dict[str, torch.nn.Module]]:
    """Plans and models by the same names; lone ones have the name "".

    Raises ``UsageError`` where there is a dictionary of one and not of the other, or their keys differ.
    """
    if isinstance(model, torch.nn.Module) and not isinstance(plan, Mapping):
        return {"": plan}, {"": model}
    if isinstance(plan, Mapping) and isinstance(model, Mapping) and set(plan) == set(model) and plan and "" not in plan:
        return dict(plan), dict(model)
    raise UsageError(
        "plans and models: expected a plan and a model, or two dictionaries with the same keys, found plans "
        f"{_keys_of(plan)} and models {_keys_of(model)}; give each model its plan under its name"
    )


def _keys_of(given: object) -> str:
    return str(sorted(map(str, given))) if isinstance(given, Mapping) else f"as one {type(given).__name__}"


def check_alike(plans: Mapping[str, Plan | PlanSet]) -> None:
    """Raises ``UsageError`` where the plans of one session differ in what it has one of."""
    every = {name: given.plans[0] if isinstance(given, PlanSet) else given for name, given in plans.items()}
    (first_name, first), *others = every.items()
    for name, plan in others:
        for what, expected, found in (
            ("device", first.device, plan.device),
            ("throttle", first.link.throttle_bytes_per_s, plan.link.throttle_bytes_per_s),
        ):
            if expected != found:
                raise UsageError(
                    f"plans: expected plans for one {what}, found {expected} in {first_name!r} and {found} in "
                    f"{name!r}; profile all of them with the same settings"
                )


def profiles_for(
    plans: Mapping[str, Plan | PlanSet], profile: Profile | Mapping[str, Profile] | None, planner: object
) -> dict[str, Profile]:
    """The profile of each model's plan, to plan anew from; raises ``UsageError`` where one is missing or another's."""
    found = dict(profile) if isinstance(profile, Mapping) else {} if profile is None else dict.fromkeys(plans, profile)
    if planner is None:
        raise UsageError('on_over_budget: "replan" needs the planner; call poochplan.apply')
    for name, plan in plans.items():
        if isinstance(plan, PlanSet):
            raise UsageError('on_over_budget: "replan" expected one plan, found a set; take "warn" or "error"')
        if name not in found or found[name].ops_fingerprint != plan.profile_fingerprint:
            wrong = "none" if name not in found else "that of another step"
            whose = f" of {name!r}" if name else ""
            raise UsageError(
                f'on_over_budget: "replan" expected the profile{whose} that the plan was made from, found {wrong}; '
                "pass it as profile="
            )
    return found
