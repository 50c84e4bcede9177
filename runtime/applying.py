"""apply: makes a session from a plan and a model, inside which training steps follow the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args

import torch

from poochplan.errors import ModelMismatchError, UsageError, check_choice
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet, check_alike, plans_of
from poochplan.formats.profile import ModelSignature, Profile
from poochplan.runtime.compiled_hooks import hooks_for
from poochplan.runtime.devices.cpu import choose_spill_dir
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.devices.opening import check_cap, model_device, open_device
from poochplan.runtime.engine.audit import OnAudit
from poochplan.runtime.messages import Messages, warn
from poochplan.runtime.metering.step_meter import When
from poochplan.runtime.step_policies.follow import DivergencePolicy
from poochplan.tensors.optimizers import Optimizers, listed
from poochplan.tensors.signatures import kernel_switches, model_tensors, passing_buffers

from .active_plan import OverBudget
from .arena.step_arena import ArenaMode, step_arena_for
from .attachment import together
from .plan_source import GivenPlans, Planner
from .session import Session


def apply(
    plan: Plan | PlanSet | Mapping[str, Plan | PlanSet],
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizer: Optimizers = None,
    *,
    spill_dir: str | Path | None = None,
    on_divergence: Literal["warn", "error"] = "warn",
    on_over_budget: Literal["warn", "error", "replan"] | None = None,
    profile: Profile | Mapping[str, Profile] | None = None,
    meter: When = "first-steps",
    cap_bytes: int | None = None,
    host_limit_bytes: int | None = None,
    nvtx: bool = False,
    device: Callable[[], ComputeDevice] | None = None,
    force: bool = False,
    arena: ArenaMode = "auto",
    on_audit: Literal["warn", "error", "off"] = "warn",
    quiet: bool = False,
    planner: Planner | None = None,
) -> Session:
    """A session: within ``with apply(plan, model) as session:`` every training step of ``model`` follows the plan.

    Parameters
    ----------
    plan: made for this model; see :func:`poochplan.plan`. With a :class:`~poochplan.PlanSet` each step follows the
        plan for the model's inputs, otherwise the nearest larger one; without such a plan it swaps every saved
        value.
    model: unmodified; it has hooks during the block. For several models, such as the two of a GAN, give two
        dictionaries with the same keys. A step belongs to the model called first, or to the one named by
        ``session.step("d")``.
    optimizer: those whose state the plan streams, if it does (``docs/optimizer-state.md``). Their state then leaves the
        device before the first step; that of others when they first step, and until then no step is judged.
    spill_dir: directory of the spill file (CPU device); by default ``$POOCH_SPILL_DIR``, then a disk-backed
        temporary directory. It takes about ``plan.prediction.host_bytes`` (for a set, the most of any plan).
    on_divergence: if a step diverges from its plan, ``"warn"`` swaps every saved value from there on, and
        ``"error"`` raises :class:`~poochplan.errors.DivergenceError`. If several ranks train the models and one
        diverges in its first step, all of them warn or raise after it, in the same words.
    on_over_budget: if a step that follows its plan exceeds the budget, ``"warn"`` reports once the moment and what
        holds the excess. ``"error"`` raises :class:`~poochplan.errors.BudgetExceededError` at the end of the step.
        ``"replan"`` makes a new plan from ``profile`` with the measured bytes, while the training waits, and uses it
        from the next step on. The default is ``"replan"`` if ``profile`` is given, and otherwise, or for a plan set,
        ``"warn"``.
    profile: the plan's (for several models, by the same keys), for ``"replan"`` and ``session.explain_peak()``.
    meter: when to take a census of all tensors and check the step's peak: ``"first-steps"`` in the first two steps, in
        later ones as long as peaks exceed the prediction and all earlier steps, in one of fifty, and after a step that
        seemed above its budget; ``"always"`` in every step; ``"never"`` meters nothing. Allocators that report peaks
        (CUDA, and the compiled one) meter the other steps too; without one only these steps are metered.
        ``torch.cuda.max_memory_allocated`` and similar functions return what they would without a session.
    cap_bytes: hard limit of the CUDA allocator within the block, such as the budget and a margin for fragmentation.
        A step that needs more is an out-of-memory error.
    host_limit_bytes: the most pinned memory besides the planned one, for steps that diverge; by default three quarters
        of the host memory available when the first such value comes. Values that do not fit are kept.
        On the CPU device the disk limits the spill file.
    nvtx: on CUDA, name each copy and replay in an NVTX range, for Nsight Systems; some microseconds each.
    device: opens the device to run on, instead of the model's; the session closes it.
    arena: on the CPU, whether steps that follow the plan allocate from one arena. It needs the compiled allocator.
        ``"auto"``: if that can be built; ``"on"``: it is an error if not; ``"off"``: no arena.
    on_audit: in each step some of the released values are compared with what comes back for them. If one differs,
        ``"warn"`` reports it once and keeps it from then on, and ``"error"`` raises
        :class:`~poochplan.errors.AuditError` at the end of the step; ``"off"`` compares nothing.
    force: run the plan even if its times are those of another device's roofline (``plan.roofline``).
    quiet: print nothing on stderr but warnings.
    planner: ``poochplan.apply`` fills it in.

    If anything of ours fails, the session stands aside: steps are plain from there on, and one line says why.

    Warns if the plan was made for another machine (``plan.assumed``), or profiled under other settings of torch
    (``plan.switches``); once if a metered step that followed the plan exceeded its budget; and at the end of the
    block if no step was seen or followed.

    Raises
    ------
    ModelMismatchError
        The plan is for another model; names the first parameter or buffer that differs.
    UsageError
        The model is not on the plan's device, there is no such device, or the plan's times are a roofline's. The
        plan is for a model that :func:`poochplan.compile` has compiled, and this one is not. The keys of plans and
        models differ, or ``"replan"`` lacks its profile. On entering: there is a session on this thread or for this
        model, several ranks have different plans, or a part of the model is compiled to CUDA graphs. The model is
        TorchScript as a whole, which takes no hooks. Capturing a step as a CUDA graph is such an error too.
    SpillError
        The spill directory cannot be used.
    """
    check_choice("on_divergence", on_divergence, tuple(DivergencePolicy))
    check_choice("on_over_budget", on_over_budget or OverBudget.WARN, tuple(OverBudget))
    check_choice("meter", meter, get_args(When))
    check_choice("arena", arena, get_args(ArenaMode))
    check_choice("on_audit", on_audit, tuple(OnAudit))
    plans, models = by_name(plan, model)
    every = [one for given in plans.values() for one in plans_of(given)]
    firsts = {name: plans_of(given)[0] for name, given in plans.items()}  # a set is for one model and one device
    for name, given in plans.items():
        check_model(firsts[name].model, models[name], "plan")
        check_graphs(given, models[name])
    can_replan = profile is not None and planner is not None and not any(isinstance(x, PlanSet) for x in plans.values())
    policy = OverBudget(on_over_budget or ("replan" if can_replan else "warn"))
    profiles = profiles_for(plans, profile, planner) if policy is OverBudget.REPLAN or can_replan else {}
    first = every[0]
    check_alike("plans", {repr(name): one for name, one in firsts.items()})
    where = model_device(together(models), first.device)
    _check_times(every, force)
    _check_switches(every)
    check_cap(cap_bytes, where)
    if host_limit_bytes is not None and where.type == "cpu":
        raise UsageError(
            f"host_limit_bytes: expected a plan for cuda, found one for {where.type}, where only the disk limits "
            "swapping; leave it out"
        )
    spill_dir = choose_spill_dir(spill_dir) if where.type == "cpu" else None

    def opened() -> ComputeDevice:
        return open_device(where, spill_dir, first.link.throttle_bytes_per_s, host_limit_bytes, spans=nvtx)

    return Session(
        models,
        where,
        device or opened,
        GivenPlans(plans, models, DivergencePolicy(on_divergence), profiles, planner),
        on_over_budget=policy,
        meter=meter,
        cap_bytes=cap_bytes,
        planner=planner,
        step_arena=step_arena_for(arena, where.type, planner.pack if planner is not None else None, every),
        messages=Messages(is_quiet=quiet),
        on_audit=OnAudit(on_audit),
        optimizers=listed(optimizer),
    )


def _check_times(plans: Sequence[Plan], force: bool) -> None:
    """Raises ``UsageError`` if a plan's times are those of another device; see :func:`apply`."""
    roofline = next((one.roofline for one in plans if one.roofline), "")
    if roofline and not force:
        raise UsageError(
            f"plan: expected times of this device, found times computed from the rates of {roofline} (its roofline); "
            "profile here, in mode fake without a roofline if the step does not fit, or pass force=True (pooch run "
            "--force)"
        )
    assumed = dict.fromkeys(what for one in plans for what in one.assumed)
    if assumed:
        warn(
            f"this plan is for another machine ({'; '.join(assumed)}): its memory holds, its predicted times do not; "
            "plan from the profile as measured for the best plan here"
        )


def _check_switches(every: Sequence[Plan]) -> None:
    """Warns about switches that differ from those of the profiled step, because other kernels then run."""
    now = kernel_switches(every[0].device)
    planned = {item for plan in every for item in plan.switches.items()}
    others = [f"{name} {was}, now {now[name]}" for name, was in sorted(planned) if now.get(name, was) != was]
    if others:
        warn(
            f"the step was profiled under other switches of torch ({'; '.join(others)}): its kernels may differ in "
            "time, memory and bits, and their replays were not verified; restore the switches, or profile again"
        )


def model_signature(model: torch.nn.Module) -> ModelSignature:
    """The signature that profile and plan hold: all parameters and buffers, and their digest."""
    tensors = model_tensors(model)
    return ModelSignature(fingerprint=hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16], tensors=tensors)


def check_model(expected: ModelSignature, model: torch.nn.Module, what: str) -> None:
    """Raises ``ModelMismatchError`` naming the first parameter or buffer that differs.

    ``what`` is "plan" or "profile", for the message. Buffers that are in no state dict may differ: a forward may
    replace them, and the first step of a fresh model then differs from the planned one.
    """
    found = model_signature(model)
    if found.fingerprint == expected.fingerprint:
        return
    passing = passing_buffers(model)
    lasting = ([line for line in one.tensors if line.partition(" ")[0] not in passing] for one in (expected, found))
    for wanted, seen in zip_longest(*lasting):
        if wanted != seen:
            raise ModelMismatchError(
                f"this {what} is for another model: expected {wanted or 'no further tensor'}, "
                f"found {seen or 'no further tensor'}; make a new profile and plan for this model"
            )


def check_graphs(plan: Plan | PlanSet, model: torch.nn.Module) -> None:
    """Raises ``UsageError`` if a plan recomputes inside compiled graphs, but the model's graphs lack its replays."""
    for one in plans_of(plan):
        if one.replays and hooks_for(model).written_replays(model) != frozenset(one.replays):
            raise UsageError(
                "plan: this plan is for a model that poochplan.compile has compiled: expected the "
                f"{len(one.replays)} tensors that it recomputes inside compiled code, found a model without them; call "
                "poochplan.compile(model, plan=plan) (pooch run --compile)"
            )


def by_name(
    plan: Plan | PlanSet | Mapping[str, Plan | PlanSet], model: torch.nn.Module | Mapping[str, torch.nn.Module]
) -> tuple[dict[str, Plan | PlanSet], dict[str, torch.nn.Module]]:
    """Plans and models by the same names; lone ones have the name "".

    Raises ``UsageError`` if only one is a dictionary, or their keys differ.
    """
    if isinstance(model, torch.nn.Module) and isinstance(plan, Plan | PlanSet):
        return {"": plan}, {"": model}
    if isinstance(plan, Mapping) and isinstance(model, Mapping) and set(plan) == set(model) and plan and "" not in plan:
        return dict(plan), dict(model)
    raise UsageError(
        "plans and models: expected a plan and a model, or two dictionaries with the same keys, found plans "
        f"{_keys_of(plan)} and models {_keys_of(model)}; give each model its plan under its name"
    )


def _keys_of(given: object) -> str:
    return str(sorted(map(str, given))) if isinstance(given, Mapping) else f"as one {type(given).__name__}"


def profiles_for(
    plans: Mapping[str, Plan | PlanSet], profile: Profile | Mapping[str, Profile] | None, planner: object
) -> dict[str, Profile]:
    """The profile of each model's plan, for new plans. Raises ``UsageError`` if one is missing or is another's."""
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
