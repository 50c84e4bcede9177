"""Sessions and arenas with their parts from outside the runtime, which does not know the planner."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import torch

from poochplan.errors import named_line
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.guard import is_about_arguments, is_ours
from poochplan.peak import explain_peak
from poochplan.planner.arena.packing import packed
from poochplan.runtime.applying import apply as runtime_apply
from poochplan.runtime.arena.library import why_not_loaded, why_unavailable
from poochplan.runtime.arena.pass_arena import PassArena
from poochplan.runtime.devices.backend import backend_of
from poochplan.runtime.messages import warn
from poochplan.runtime.open_sessions import check_no_session
from poochplan.runtime.plan_source import Planner, PlanSource
from poochplan.runtime.session import Session
from poochplan.tensors.storages import own_tensors

if TYPE_CHECKING:
    from poochplan.online.ranks import Ranks

P = ParamSpec("P")
REPLAN_S = 10.0
"""Seconds that the search for a new plan may take while the training waits."""


def made_in_any_case(make: Callable[P, Session]) -> Callable[P, Session]:
    """``make``, whose failure ends no loop either: the session that it then returns stands aside when it is entered.
    Errors about arguments are raised.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Session:
        model = signature.bind(*args, **kwargs).arguments["model"]
        try:
            return make(*args, **kwargs)
        except Exception as error:
            if is_about_arguments(error) or not is_ours(error):
                raise
            failure = error
        models = model if isinstance(model, Mapping) else {"": model}
        return Session(models, torch.device("cpu"), functools.partial(_raise, failure), PlanSource())

    return made


def _raise(error: Exception) -> NoReturn:
    raise error


@made_in_any_case
@functools.wraps(runtime_apply)
def apply(*args: Any, **kwargs: Any) -> Session:
    return runtime_apply(*args, **({"planner": PLANNER} | kwargs))


def arena(model: torch.nn.Module) -> PassArena:
    """An arena for inference: within ``with poochplan.arena(model) as arena:`` the blocks of each call of ``model``
    come from a single block of memory, by the layout of an earlier call.

    It works from this call on, until the ``with`` block ends or ``close()``. Of each kind of call the first two take
    ordinary memory, and the second is recorded. Later ones come from the arena. Kinds differ in shapes and types of the
    inputs, train mode, autocast and inference mode. The eight kinds used last share one arena, as large as the largest
    needs. Results and kept values lie outside. Bytes in use are never handed out. Calls with gradients do not use it,
    nor do calls on another thread while one uses it, nor those inside a session of :func:`poochplan.apply`.

    Parameters
    ----------
    model: on the CPU; called as ``model(x)``, because ``model.forward(x)`` is not seen.

    Returns an object with ``report()``: the arena's bytes, what was served of the last such call, what was not and
    why. For comparison it has the sum of the call's blocks, and the most of them that live at once.

    Warns, in one line, if nothing can be served: there is no compiler, or the model is not on the CPU. Calls are
    then ordinary.

    Raises
    ------
    UsageError
        There is a session on this thread or for this model; or the model is itself a
        ``torch.nn.TransformerEncoderLayer``, which uses other kernels if it has hooks.
    """
    try:
        check_no_session("arena()", [model])
        reason = _why_no_arena(model)
        made = PassArena(model, packed, reason)
    except Exception as error:
        if is_about_arguments(error) or not is_ours(error):
            raise
        reason = named_line(error)
        made = PassArena(model, packed, reason)
    if reason:
        warn(f"arena() allocates nothing, and calls of the model are ordinary: {reason}")
    return made


def _why_no_arena(model: torch.nn.Module) -> str:
    elsewhere = next((one.device for one in own_tensors(model) if one.device.type != "cpu"), None)
    if elsewhere is not None:
        return f"a model on {elsewhere}, whose allocator takes no arena"
    return why_unavailable() or why_not_loaded()


def replanned(profile: Profile, plan: Plan, beside_bytes: int) -> Plan:
    """A plan for the budget of ``plan``, from its profile with ``beside_bytes`` more bytes outside the step.

    The search takes as long as that of ``plan``, and at most :data:`REPLAN_S`. Raises ``InfeasibleError``.
    """
    from poochplan.planner.planning import plan as make_plan  # here, because training does not need the planner
    from poochplan.planner.whatif import with_bytes_beside

    options: dict[str, Any] = {"workload": plan.workload, "seed": plan.solve.seed, "on": plan.on}
    options["time_limit_s"] = min(REPLAN_S, max(1.0, plan.solve.wall_s))
    return make_plan(with_bytes_beside(profile, beside_bytes), plan.budget_bytes, **options)


def explained(profile: Profile, plan: Plan | None, measured_peak_bytes: int | None) -> str:
    """See :func:`poochplan.explain_peak`."""
    return str(explain_peak(profile, plan, measured_peak_bytes=measured_peak_bytes))


def generators(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """States of torch's random number generators: the CPU's, and those of the accelerators that the model is on."""
    places = {tensor.device for tensor in own_tensors(model) if tensor.device.type not in ("cpu", "meta")}
    return {"cpu": torch.get_rng_state()} | {str(one): backend_of(one).generator().get_state() for one in places}


def ranks_of(models: Iterable[torch.nn.Module]) -> Ranks | None:
    """The processes that train these models together; None if this one trains them alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from poochplan.online.ranks import Ranks  # here, because few sessions need it

    return Ranks.of(models)


PLANNER = Planner(replanned, packed, explained, ranks_of)
