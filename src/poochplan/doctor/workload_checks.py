"""Checks of a workload: what about its model and step makes plans poorer than they could be."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from poochplan.profiler.assembly.notes import model_notes
from poochplan.profiler.backward.node_hooks import name_of, nodes_behind
from poochplan.profiler.capture.clock import clock_of
from poochplan.profiler.fake.estimate import needed_without_memory
from poochplan.profiler.real import Runner
from poochplan.tensors.host_memory import available_bytes
from poochplan.tensors.modes import compiled_modules
from poochplan.torch_private.tensor_internals import intercept_autograd
from poochplan.units import format_bytes
from poochplan.workload import Workload

from .finding import Finding, Status, judged


def workload_findings(workload: Workload) -> Iterator[Finding]:
    """All of them. The step runs twice without memory (on fake tensors) where it can; nothing of it is changed."""
    model = workload.model
    where = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    count, size_bytes = _parameters(model)
    found = f"{type(model).__name__} on {where}, {count:,} parameters ({format_bytes(size_bytes)})"
    yield Finding(name="model", status=Status.OK, found=found)
    yield training(model)
    yield compiled_parts(model)
    nodes: set[str] = set()
    with CheckpointCalls() as calls, intercept_autograd(lambda run: _noting(run, nodes)):
        needed_bytes = None if where.type != "cpu" else _needed_bytes(workload, where)
    yield checkpointing(model, calls.count)
    if nodes:  # else the step has not run
        yield other_formulas(nodes)
    yield optimizer(workload.optimizer)
    if where.type == "cpu":
        yield memory(needed_bytes, available_bytes())


def training(model: torch.nn.Module) -> Finding:
    """Whether it, or a part of it, rests."""
    notes = model_notes(model)
    return judged("train mode", not notes, notes[0] if notes else "every module", "call model.train() before profiling")


def compiled_parts(model: torch.nn.Module) -> Finding:
    """What a compiled region saves is decided about at its edges only."""
    found = compiled_modules(model)
    if not found:
        return Finding(name="compiled parts", status=Status.OK, found="none")
    if "" in found:
        return judged(
            "compiled parts",
            False,
            "the whole model is one compiled region",
            "have poochplan.compile compile it with a plan inside (pooch run --compile), or compile its blocks instead "
            "(block.compile() for each): a plan decides about what lies between regions",
        )
    some = ", ".join(list(found)[:3])
    return Finding(
        name="compiled parts",
        status=Status.OK,
        found=f"{len(found)}, first {some}; what they save is swapped or kept, not recomputed",
    )


def checkpointing(model: torch.nn.Module, calls: int) -> Finding:
    """``calls`` of ``torch.utils.checkpoint`` were seen in a step; modules may say that they do it as well."""
    modules = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    if not calls and not modules:
        return Finding(name="activation checkpointing", status=Status.OK, found="off")
    where = f"in {modules[0] or 'the model'} and {len(modules) - 1} more" if modules else f"{calls} calls in a step"
    return judged(
        "activation checkpointing",
        False,
        f"on, {where}",
        "switch it off: a plan recomputes what is worth it, and decides nothing about what is checkpointed already",
    )


OTHER_FORMULAS = ("Prod", "LinalgLstsq", "LinalgPinv")
"""Of torch's database of operators, those whose results or gradients have other bits where a dispatch mode looks on."""


def other_formulas(nodes: Collection[str]) -> Finding:
    """Which of the step's ``nodes`` compute by other formulas under a dispatch mode. No session has one there."""
    found = sorted(one for one in nodes if one.removeprefix("autograd.").startswith(OTHER_FORMULAS))
    return Finding(
        name="under a mode",
        status=Status.OK,
        found=f"{', '.join(found)}: torch has another formula where a dispatch mode of yours looks on, as a FLOP "
        "counter does; sessions have none there"
        if found
        else "no operator of the step is known to have other bits where a dispatch mode looks on",
    )


def _noting(run: Callable[..., Any], nodes: set[str]) -> Callable[..., Any]:
    def noted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nodes.update(map(name_of, nodes_behind(outputs)))
        return run(outputs, *args, **kwargs)

    return noted


def optimizer(found: torch.optim.Optimizer | None) -> Finding:
    """Its state is part of every peak; one that calls the step again is no single step."""
    if found is None:
        return judged(
            "optimizer", False, "none", "return it in the Workload: its state is part of the peak that is planned for"
        )
    name = type(found).__name__
    is_lbfgs = isinstance(found, torch.optim.LBFGS)
    advice = "it runs the step several times for one update, each is planned; its history beside them is not"
    return judged("optimizer", not is_lbfgs, name, advice)


def memory(needed_bytes: int | None, there_bytes: int) -> Finding:
    """Whether the in-core step fits, as far as a step without memory tells."""
    if needed_bytes is None:
        found = "the step only runs with data: what it takes is told by pooch profile"
        return Finding(name="in-core step", status=Status.OK, found=found)
    found = f"takes {format_bytes(needed_bytes)} beside model and data, {format_bytes(there_bytes)} are free"
    return judged("in-core step", needed_bytes < there_bytes, found, "profile it with --mode swap-all, or auto")


class CheckpointCalls:
    """Counts calls of ``torch.utils.checkpoint.checkpoint`` on this thread within a block, whoever imported it.

    State: the count, and the profile function that was set before.
    """

    _code: CodeType = inspect.unwrap(checkpoint).__code__

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> CheckpointCalls:
        self._before = sys.getprofile()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is self._code:
            self.count += 1


def _needed_bytes(workload: Workload, where: torch.device) -> int | None:
    runner = Runner(workload.step, workload.model, workload.optimizer, False, clock_of(where))
    return needed_without_memory(runner)


def _parameters(model: torch.nn.Module) -> tuple[int, int]:
    every = list(model.parameters())
    return sum(one.numel() for one in every), sum(one.numel() * one.element_size() for one in every)
