"""compile: a model compiled by Inductor with a plan inside its code, and a session whose steps follow that plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link
from poochplan.runtime.compiled.inductor import compile_in_place, why_no_graph_mode
from poochplan.runtime.session import Session
from poochplan.sessions import apply
from poochplan.tensors.modes import compiled_modules
from poochplan.torch_private.compiler_internals import uncompile


def compile(
    model: torch.nn.Module,
    step: Callable[[], Any] | None = None,
    *,
    budget: str | int | float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan | None = None,
    link: Link | None = None,
    spill_dir: str | Path | None = None,
    throttle: str | float | None = None,
    iterations: int | None = None,
    time_limit_s: float = 30.0,
    progress: Callable[[str], None] | None = None,
    **torch_compile_options: Any,
) -> Session:
    """Compiles ``model`` in place, so that its steps fit ``budget``; returns the session to train in.

    >>> with poochplan.compile(model, step, optimizer=optimizer, budget="60%"):
    ...     train()

    The step is compiled without a plan and measured. Its graphs are captured without memory and planned. They are
    compiled again, with the replays of that plan in their backwards, and measured. The remaining saved values are
    planned: keep or swap. One step is compared bit by bit with that of the model compiled without a plan. If replays
    in the graphs give other bits, a plan without replays is made. Needs torch 2.11 or newer, the CPU device, and a
    C++ compiler. Other compiled models of this process are compiled again at their next call, from the compiler's
    caches.

    Parameters
    ----------
    model: a module that is not compiled yet. It stays compiled after the session.
    step: calls the model and returns the scalar loss, as for :func:`poochplan.profile`. Its shapes
        are those of training: another shape is compiled without a plan, and its step diverges.
    budget: bytes, text such as ``"8GiB"``, or a share of the compiled model's in-core peak such as ``"60%"``.
    optimizer: stepped during the measurements, and restored.
    plan: of an earlier call (``session.plan``, or its file). Nothing is profiled or planned then, and
        with warm compiler caches little is compiled.
    link, spill_dir, throttle: as for :func:`poochplan.profile`.
    iterations: of both profiles; by default 2 without a plan, and 3 of the step with replays.
    time_limit_s: for the search of the final plan; the search for the graphs has a third of it.
    progress: called with a line of text at each stage.
    torch_compile_options: ``fullgraph``, ``mode`` and ``options``, as for ``torch.compile``.

    Raises
    ------
    UsageError
        The model is compiled already, or graph mode is not available here. Or both or neither of ``plan`` and
        ``budget`` are given, or an option that graph mode does not support.
    ModelMismatchError
        The plan is for another model.
    InfeasibleError
        No plan fits the budget.
    StepError
        As for :func:`poochplan.profile`; or the planned step gives other bits.
    """
    _check(model, step, budget, plan, torch_compile_options)
    try:
        if plan is None:
            assert step is not None
            assert budget is not None
            from .rounds import Compiling, planned_within  # here, because an earlier plan needs no planner

            say = progress or (lambda _: None)
            options = torch_compile_options
            compiling = Compiling(step, model, optimizer, options, link, spill_dir, throttle, iterations, say)
            plan = planned_within(compiling, budget, time_limit_s)
        else:
            compile_in_place(model, plan.replays, torch_compile_options)
        return apply(plan, model, spill_dir=spill_dir)
    except BaseException:
        uncompile(model)  # so that it can be called again, with a larger budget
        raise


def _check(
    model: torch.nn.Module,
    step: Callable[[], Any] | None,
    budget: str | int | float | None,
    plan: Plan | None,
    options: dict[str, Any],
) -> None:
    for name in compiled_modules(model):
        found = f"{name} compiled" if name else "a compiled one"
        raise UsageError(f"compile(): expected a model that is not compiled, found {found}; give the module itself")
    if (plan is None) == (budget is None):
        raise UsageError("compile(): expected either a budget or a plan; pass budget='60%', or plan=Plan.load(...)")
    if plan is None and step is None:
        raise UsageError("compile(): expected the training step to measure, found none; pass step, a function")
    check_options(options)
    if why := why_no_graph_mode(next((p.device.type for p in model.parameters()), "cpu")):
        raise UsageError(f"compile(): {why}")


# -- options of torch.compile ---------------------------------------------------------------------------------------

TAKEN = ("fullgraph", "mode", "options")
REFUSED = {"backend": "Inductor's, with graph mode in it", "dynamic": "one plan for each set of shapes"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for an option that graph mode does not support."""
    for name, what in REFUSED.items():
        if options.get(name) is not None:
            raise UsageError(f"compile(): expected no {name}, found {options[name]!r}; graph mode takes {what}")
    for name in options:
        if name not in (*TAKEN, *REFUSED):
            raise UsageError(f"compile(): expected {', '.join(TAKEN[:-1])} or {TAKEN[-1]}, found {name}; leave it out")
    if "reduce-overhead" in str(options.get("mode")) or (options.get("options") or {}).get("triton.cudagraphs"):
        raise UsageError("compile(): expected no CUDA graphs, whose tensors cannot be moved; leave mode out")
