"""Sessions and arenas with their parts from outside the runtime, which does not know the planner; and certificates:
digests of the results of steps, for a comparison of two runs or for one session.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.run_record import Certificate, StepDigests
from poochplan.peak import explain_peak
from poochplan.planner.arena.packing import packed
from poochplan.runtime.applying import Planner
from poochplan.runtime.applying import apply as runtime_apply
from poochplan.runtime.arena.library import why_not_loaded, why_unavailable
from poochplan.runtime.arena.pass_arena import PassArena
from poochplan.runtime.attachment import around_optimizer_steps, check_no_session
from poochplan.runtime.messages import users_line
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.session import Session
from poochplan.tensors.signatures import torch_switches
from poochplan.tensors.storages import own_tensors
from poochplan.torch_private.tensor_internals import in_backward, intercept_autograd, without_modes

if TYPE_CHECKING:
    from poochplan.online.ranks import Ranks

REPLAN_S = 10.0
"""Seconds that the search for a new plan may take while the training waits."""


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
    check_no_session("arena()", [model])
    reason = _why_no_arena(model)
    if reason:
        warnings.warn(
            f"poochplan: arena() allocates nothing, and calls of the model are ordinary: {reason}",
            RuntimeWarning,
            stacklevel=users_line(),
        )
    return PassArena(model, packed, reason)


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

    changed = with_bytes_beside(profile, beside_bytes)
    seconds = min(REPLAN_S, max(1.0, plan.solve.wall_s))
    return make_plan(changed, plan.budget_bytes, time_limit_s=seconds, workload=plan.workload, seed=plan.solve.seed)


def explained(profile: Profile, plan: Plan | None, measured_peak_bytes: int | None) -> str:
    """See :func:`poochplan.explain_peak`."""
    return str(explain_peak(profile, plan, measured_peak_bytes=measured_peak_bytes))


def certificate(plan: Plan | None, device: str, **found: Any) -> Certificate:
    """A certificate of the steps in ``found``, with versions and settings that can change their bits."""
    from poochplan.profiler.assembly.assemble import this_host, versions_here  # here, because few sessions need it

    return Certificate(
        workload="" if plan is None else plan.workload,
        plan_fingerprint="" if plan is None else plan.fingerprint,
        versions=versions_here(device),
        host=this_host(),
        flags={**torch_switches(), "threads": str(torch.get_num_threads())},
        **found,
    )


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes, rows in order."""
    with without_modes(), aside():  # otherwise a meter would count the copies as part of the step
        host = tensor.detach().to("cpu", copy=True)  # a zero tensor of autograd has no bytes before
        dense = host.to_dense() if host.layout is not torch.strided else host
        plain = dense.resolve_conj().resolve_neg().contiguous()
        total = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}".encode())
        if plain.numel():
            total.update(plain.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors}


def generators(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """States of torch's random number generators, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if any(parameter.is_cuda for parameter in model.parameters()):
        states["cuda"] = torch.cuda.get_rng_state()
    return states


class SessionDigests:
    """A context manager that observes each optimizer step on this thread, in a session and while it is away.

    State: digests of ended steps, separately of those away. Of the running step: the tensors that ``backward()`` was
    called on, the gradients, and its plan ("" for none, None while away).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._seed, self._thread = model, torch.initial_seed(), threading.get_ident()
        self._in_core: list[StepDigests] = []
        self._planned: list[StepDigests] = []
        self._followed: list[str] = []
        self._roots: list[str] = []
        self._gradients: dict[str, str] = {}
        self._follows: str | None = None

    def __enter__(self) -> SessionDigests:
        with ExitStack() as stack:
            stack.enter_context(intercept_autograd(self._around_backward))
            stack.enter_context(around_optimizer_steps(self._model, self._optimizer_steps, self._optimizer_stepped))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def follows(self, plan: Plan | None) -> None:
        """Sets the plan of the step that the optimizer is about to end. The session calls it unless it is away."""
        self._follows = "" if plan is None else plan.fingerprint

    def certificate(self, plan: Plan | None, device: str) -> Certificate:
        """The certificate of the steps so far."""
        return certificate(
            plan,
            device,
            seed=self._seed,
            equal=None,
            in_core=tuple(self._in_core),
            planned=tuple(self._planned),
            followed=tuple(self._followed),
        )

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad") and threading.get_ident() == self._thread and not in_backward():
                self._roots += map(digest, roots)
            return run(roots, *args, **kwargs)

        return backward

    def _optimizer_steps(self, _: torch.optim.Optimizer) -> None:
        if threading.get_ident() == self._thread:
            named = self._model.named_parameters()
            self._gradients = digests((name, one.grad) for name, one in named if one.grad is not None)

    def _optimizer_stepped(self, _: torch.optim.Optimizer) -> None:
        if threading.get_ident() != self._thread:
            return
        roots, self._roots, follows, self._follows = self._roots, [], self._follows, None
        step = StepDigests(
            loss=roots[0] if len(roots) == 1 else hashlib.sha256(" ".join(roots).encode()).hexdigest(),
            gradients=self._gradients,
            buffers=digests(self._model.named_buffers()),
            parameters=digests(self._model.named_parameters()),
            generators=digests(generators(self._model).items()),
        )
        if follows is None:
            self._in_core.append(step)
        else:
            self._planned.append(step)
            self._followed.append(follows)


def ranks_of(models: Iterable[torch.nn.Module]) -> Ranks | None:
    """The processes that train these models together; None if this one trains them alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from poochplan.online.ranks import Ranks  # here, because few sessions need it

    return Ranks.of(models)


PLANNER = Planner(replanned, packed, explained, SessionDigests, ranks_of)
