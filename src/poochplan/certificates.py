"""Certificates: digests of the results of steps, for a comparison of two runs or for one session."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.run_record import Certificate, StepDigests
from poochplan.runtime.attachment import around_optimizer_steps
from poochplan.runtime.metering.allocated import aside
from poochplan.tensors.signatures import torch_switches
from poochplan.torch_private.tensor_internals import in_backward, intercept_autograd, without_modes


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
    """The digest of each tensor, by name."""
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
