"""apply: a plan and a model in, a session out, inside which training steps follow the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.opening import model_device, open_device
from poochplan.runtime.devices.spill import choose_spill_dir
from poochplan.runtime.drivers.follow import DivergencePolicy

from .model_check import check_model
from .session import Session


def apply(
    plan: Plan | PlanSet,
    model: torch.nn.Module,
    *,
    spill_dir: str | Path | None = None,
    on_divergence: Literal["warn", "error"] = "warn",
    meter: Literal["first-steps", "always", "never"] = "first-steps",
    cap_bytes: int | None = None,
    host_limit_bytes: int | None = None,
    nvtx: bool = False,
    device: Callable[[], Device] | None = None,
    force: bool = False,
) -> Session:
    """A session: within ``with apply(plan, model) as session:`` every training step of ``model`` follows the plan.

    Parameters
    ----------
    plan: made for this model; see :func:`poochplan.plan`. Of a :class:`~poochplan.PlanSet` each step follows the plan
        for the model's inputs, else the nearest larger one; when there is none it swaps every saved value.
    model: unmodified; hooks are put on it for the length of the block.
    spill_dir: directory of the spill file (CPU device); by default ``$POOCH_SPILL_DIR``, then a disk-backed
        temporary directory. About ``plan.prediction.host_bytes`` (of a set: the most of any plan) are used there.
    on_divergence: when a step is not the planned one, ``"warn"`` falls back to swapping every saved value,
        ``"error"`` raises :class:`~poochplan.errors.DivergenceError`.
    meter: when to meter the real peak of live bytes. It takes some 20 us per op; by default the first two steps, which
        differ (optimizer state) and after which every step is the same. Where they take more than was predicted, so
        are those that follow, until one takes no more than the step before it. On CUDA the allocator's peaks, which
        ``session.report().memory`` gives, begin anew when the block is entered.
    cap_bytes: hard limit of the CUDA allocator within the block, such as the budget and a margin for fragmentation:
        what would break the promise is an out-of-memory error then.
    host_limit_bytes: on CUDA, the most pinned memory beside the planned, for steps that are not the planned one; by
        default three quarters of the host memory that is available when the first such value comes. Values that do not
        fit are kept. The spill file of the CPU device is limited by its disk.
    nvtx: on CUDA, name each copy and replay in an NVTX range, for Nsight Systems; some microseconds each.
    device: opens the device to run on, in place of the one on which the model lies; the session closes it.
    force: run a plan all the same whose times are those of a device that is not there (``plan.roofline``).

    Warns when the plan was made for another machine (``plan.assumed``), and once when a metered step that followed the
    plan has taken more than its budget.

    Raises
    ------
    ModelMismatchError
        The plan is for another model; names the first parameter or buffer that differs.
    UsageError
        The model is not on the plan's device, there is no such device, or the plan's times are a roofline's. On
        entering: there is a session on this thread, or one for this model; or a part of it is compiled to CUDA graphs.
        A step that is captured as a CUDA graph is such an error too.
    SpillError
        The spill directory cannot be used.
    """
    if on_divergence not in tuple(DivergencePolicy):
        raise UsageError(f'on_divergence: expected "warn" or "error", found {on_divergence!r}')
    if meter not in ("first-steps", "always", "never"):
        raise UsageError(f'meter: expected "first-steps", "always" or "never", found {meter!r}')
    first, *others = plan.plans if isinstance(plan, PlanSet) else (plan,)  # a set is for one model and one device
    check_model(first.model, model, "plan")
    where = model_device(model, first.device)
    roofline = next((one.roofline for one in (first, *others) if one.roofline), "")
    if roofline and not force:
        raise UsageError(
            f"plan: expected one for this device, found one whose times are a roofline's ({roofline}); profile here, "
            "in mode fake without a roofline if the step does not fit, or pass force=True (pooch run --force)"
        )
    assumed = dict.fromkeys(what for one in (first, *others) for what in one.assumed)
    if assumed:
        warnings.warn(
            f"poochplan: this plan is for another machine ({'; '.join(assumed)}): its memory holds, its predicted "
            "times do not; plan from the profile as measured for the best plan here",
            RuntimeWarning,
            stacklevel=2,
        )
    if cap_bytes is not None and where.type != "cuda":
        raise UsageError(f"cap: expected a plan for cuda, whose allocator takes a limit, found one for {where.type}")
    if host_limit_bytes is not None and where.type != "cuda":
        raise UsageError(f"host limit: expected a plan for cuda, found one for {where.type}; there the disk limits it")
    spill_dir = choose_spill_dir(spill_dir) if where.type == "cpu" else None

    def opened() -> Device:
        return open_device(where, spill_dir, first.link.throttle_bytes_per_s, host_limit_bytes, spans=nvtx)

    return Session(
        plan, model, device or opened, on_divergence=DivergencePolicy(on_divergence), meter=meter, cap_bytes=cap_bytes
    )
