"""compile: a model compiled by Inductor with a plan inside its code, and a session whose steps follow that plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from poochplan.errors import InfeasibleError, StepError, UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, Profile
from poochplan.planner.planning import plan as planned
from poochplan.profiler.profiling import profile as profiled
from poochplan.runtime.regions.graph_backend import GraphBackend
from poochplan.runtime.regions.installing import why_no_graphs
from poochplan.runtime.session import Session
from poochplan.sessions import apply
from poochplan.tensors.torch_private import inductor_mode, is_compiled
from poochplan.units import parse_budget

from .choosing import as_measured, beside_in_core, by_graph, graph_budget, recomputed_nodes, with_replays
from .reference import Bits, bits_of_a_step, first_unequal

ROUNDS = 3
"""Times that graphs are planned and compiled at most."""
SHARES = "5e10,1e10"
"""Flops and bytes a second, for the shares that ops have of a measured step: those of a core of a server's CPU."""
REFUSED = {"backend": "Inductor's, with graph mode in it", "dynamic": "one plan for each set of shapes"}


class Compiled(NamedTuple):
    """What one round found."""

    plan: Plan
    profile: Profile
    backend: GraphBackend


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
    time_limit_s: float = 30.0,
    progress: Callable[[str], None] | None = None,
    **torch_compile_options: Any,
) -> Session:
    """Compiles ``model`` in place, so that its steps fit ``budget``; returns the session to train in.

    >>> with poochplan.compile(model, step, optimizer=optimizer, budget="60%"):
    ...     train()

    The step is compiled as it is and measured; its graphs are captured without memory and planned; they are compiled
    again with what the plan recomputes in their backwards, and measured; and what they save is planned to be kept or
    swapped. One step is compared bit by bit with that of the model compiled without a plan. Needs Inductor of torch
    2.13, the CPU device, and a C++ compiler.

    Parameters
    ----------
    model: a module that is not compiled yet. It stays compiled behind the session.
    step: runs forward, by calling the model, and returns the scalar loss, as for :func:`poochplan.profile`. Its shapes
        are those of training: another shape is compiled without a plan, and its step leaves the plan.
    budget: bytes, text such as ``"8GiB"``, or a share of the compiled model's in-core peak such as ``"60%"``.
    optimizer: stepped while it is measured, and left as it was.
    plan: one that an earlier call has made (``session.plan``, or its file): nothing is profiled or planned then, and
        with the compiler's caches warm little is compiled.
    link, spill_dir, throttle: as for :func:`poochplan.profile`.
    time_limit_s: of each time that is planned.
    progress: called with a line of text at each stage.
    torch_compile_options: ``fullgraph``, ``mode`` and ``options``, as for ``torch.compile``.

    Raises
    ------
    UsageError
        The model is compiled already, or here nothing can be put into compiled code; both or neither of ``plan`` and
        ``budget``; an option that graph mode does not take.
    InfeasibleError
        No plan fits the budget.
    StepError
        As for :func:`poochplan.profile`; or the planned step gives other bits.
    """
    _check(model, step, budget, plan, torch_compile_options)
    say = progress or (lambda _: None)
    if plan is not None:
        model.compile(backend=_backend(plan.replays, torch_compile_options), **_given(torch_compile_options))
        return apply(plan, model, spill_dir=spill_dir)
    assert step is not None
    assert budget is not None
    taken = _Taking(step, model, optimizer, torch_compile_options, link, spill_dir, throttle, say)
    found = _planned_within(taken, budget, time_limit_s)
    return apply(found.plan, model, spill_dir=spill_dir)


class _Taking:
    """Profiles of one step, of code with and without replays. State: the link, once it was measured."""

    def __init__(
        self,
        step: Callable[[], Any],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: dict[str, Any],
        link: Link | None,
        spill_dir: str | Path | None,
        throttle: str | float | None,
        say: Callable[[str], None],
    ) -> None:
        self.step, self.model, self.optimizer, self.options = step, model, optimizer, options
        self.link, self.spill_dir, self.throttle, self.say = link, spill_dir, throttle, say

    def compile(self, replays: tuple[str, ...] | None) -> GraphBackend | None:
        """In place: as it is where ``replays`` is None, else with points and these replays in the code."""
        backend = None if replays is None else _backend(replays, self.options)
        self.model.compile(**({} if backend is None else {"backend": backend}), **_given(self.options, backend is None))
        return backend

    def bits(self) -> Bits:
        return bits_of_a_step(self.step, self.model, self.optimizer)

    def measured(self) -> Profile:
        found = profiled(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            link=self.link,
            spill_dir=self.spill_dir,
            throttle=self.throttle if self.link is None else None,
            progress=self.say,
        )
        self.link = found.link
        return found

    def graphs(self) -> Profile:
        """Of the step's graphs, without memory."""
        return profiled(self.step, model=self.model, optimizer=self.optimizer, mode="fake", roofline=SHARES)


def _planned_within(taken: _Taking, budget: str | int | float, time_limit_s: float) -> Compiled:
    say = taken.say
    say("compiling the step as it is")
    taken.compile(None)
    stock = taken.bits()
    measured = taken.measured()
    budget_bytes = parse_budget(budget, measured.in_core_peak_bytes)
    say("capturing its graphs without memory")
    graphs = as_measured(taken.graphs(), measured)
    found = _rounds(taken, graphs, measured, budget_bytes, time_limit_s)
    say("comparing one step with that of the model compiled as it is")
    with apply(found.plan, taken.model, spill_dir=taken.spill_dir, meter="never"):
        unequal = first_unequal(stock, taken.bits())
    if unequal:
        raise StepError(
            f"expected the bits of the same model compiled without a plan, found {unequal} to differ under one; "
            "kernels that are fused otherwise gave other bits: compile its blocks, or plan it without torch.compile"
        )
    return found


def _rounds(taken: _Taking, graphs: Profile, in_core: Profile, budget_bytes: int, time_limit_s: float) -> Compiled:
    """Plans the graphs, compiles and measures what comes of it, and plans that; again with a lower goal where it does
    not fit, since what the compiler makes of a graph with replays is only known then.
    """
    tried: dict[tuple[str, ...], InfeasibleError] = {}
    goal_bytes = graph_budget(budget_bytes, graphs, in_core)
    for _ in range(ROUNDS):
        taken.say("planning the graphs")
        replays = _replays(graphs, goal_bytes, time_limit_s)
        if replays in tried:
            break
        taken.say(f"compiling with {len(replays)} values recomputed in the graphs")
        backend = taken.compile(replays)
        assert backend is not None
        measured = taken.measured()
        taken.say("planning what it saves")
        try:
            plan = planned(measured, budget_bytes, time_limit_s=time_limit_s)
            return Compiled(beside_in_core(with_replays(plan, replays, graphs), in_core), measured, backend)
        except InfeasibleError as error:
            tried[replays] = error
            goal_bytes -= error.smallest_budget_bytes - budget_bytes
    raise min(tried.values(), key=lambda error: error.smallest_budget_bytes)


def _replays(graphs: Profile, goal_bytes: int, time_limit_s: float) -> tuple[str, ...]:
    """What the plan for that goal recomputes; of the smallest one that there is a plan for where that is larger."""
    try:
        return recomputed_nodes(graphs, planned(graphs, max(goal_bytes, 1), time_limit_s=time_limit_s, arena="off"))
    except InfeasibleError as error:
        smallest = error.smallest_budget_bytes
        return recomputed_nodes(graphs, planned(graphs, smallest, time_limit_s=time_limit_s, arena="off"))


def _backend(replays: tuple[str, ...], options: dict[str, Any]) -> GraphBackend:
    settings = dict(options.get("options") or {})
    if options.get("mode"):
        settings = {**inductor_mode(options["mode"]), **settings}
    return GraphBackend(by_graph(replays), settings)


def _given(options: dict[str, Any], stock: bool = False) -> dict[str, Any]:
    """What ``Module.compile`` is given: shapes are never dynamic; the backend has taken what is Inductor's own."""
    left = options if stock else {name: given for name, given in options.items() if name == "fullgraph"}
    return {**left, "dynamic": False}


def _check(
    model: torch.nn.Module,
    step: Callable[[], Any] | None,
    budget: str | int | float | None,
    plan: Plan | None,
    options: dict[str, Any],
) -> None:
    if is_compiled(model):
        raise UsageError(
            "compile(): expected a model that is not compiled, found a compiled one; give the module itself"
        )
    if (plan is None) == (budget is None):
        raise UsageError("compile(): expected either a budget or a plan; pass budget='60%', or plan=Plan.load(...)")
    if plan is None and step is None:
        raise UsageError("compile(): expected the training step to measure, found none; pass step, a function")
    for name, what in REFUSED.items():
        if options.get(name) is not None:
            raise UsageError(f"compile(): expected no {name}, found {options[name]!r}; graph mode takes {what}")
    if "reduce-overhead" in str(options.get("mode")) or (options.get("options") or {}).get("triton.cudagraphs"):
        raise UsageError("compile(): expected no CUDA graphs, whose tensors cannot be moved; leave mode out")
    if why := why_no_graphs(next((p.device.type for p in model.parameters()), "cpu")):
        raise UsageError(f"compile(): {why}")
