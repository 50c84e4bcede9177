"""What a user would pick: each method takes a network's step as it is and gives it back under the method."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import poochplan
from benchmarks.measured_steps import arena_bytes
from poochplan.formats.plan import Plan
from poochplan.planner.policies import policy_names
from poochplan.runtime.session import Session
from poochplan.workload import Workload

from .asking import COMPILED, IN_CORE, KEPT, OURS, Ask
from .compared_networks import blocks_of

BROKEN_CHECKPOINT = "checkpoint-without-rng"
"""Checkpointing that draws other dropout masks in backward; the harness has to find it out."""
COMPILED_CHECKPOINT = "compiled-checkpoint"
WITHOUT_A_BUDGET = ("checkpoint", "sac", "save-on-cpu", "offload-activations", "rockmate")
CHECKPOINT, SAC, SAVE_ON_CPU, OFFLOAD, ROCKMATE = WITHOUT_A_BUDGET
SAVED_BY_SAC = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer"),
    "_scaled_dot_product_flash_attention_for_cpu",
)


class NotRunError(Exception):
    """A method that cannot run here, and why."""


@dataclass
class Running:
    """A network's step under a method."""

    workload: Workload
    session: Session | None = None
    moved: list[int] = field(default_factory=lambda: [0, 0])
    """Bytes that the last step has copied out and in; of a session, its report tells them."""

    def facts(self) -> dict[str, Any]:
        """Of the last step: bytes moved, the allocator that served it, and how often a plan was not followed."""
        if self.session is None:
            return {"out_bytes": self.moved[0], "in_bytes": self.moved[1], "allocator": "glibc", "fallbacks": 0}
        report = self.session.report()
        return {
            "out_bytes": report.last_step.out_bytes,
            "in_bytes": report.last_step.in_bytes,
            "allocator": "arena" if arena_bytes(self.session) else "glibc, set by the session",
            "fallbacks": report.total.fallbacks,
        }


Method = Callable[[Workload, Ask], AbstractContextManager[Running]]


def method_of(name: str) -> Method:
    """The method of that name: one of :data:`METHODS`, a policy of ours, or ``compile:BUDGET`` and ``graph:BUDGET``
    (0 to 1): of what torch's partitioner may save, and of the compiled step's own peak.
    """
    if name.startswith("graph:"):
        return functools.partial(_in_graphs, share=float(name.removeprefix("graph:")))
    if name.startswith("compile:"):
        return functools.partial(_compiled, memory_budget=float(name.removeprefix("compile:")))
    if name in policy_names():
        return _planned
    return METHODS[name]


@contextlib.contextmanager
def _in_core(workload: Workload, _: Ask) -> Iterator[Running]:
    yield Running(workload)


@contextlib.contextmanager
def _planned(workload: Workload, ask: Ask) -> Iterator[Running]:
    with poochplan.apply(Plan.load(Path(ask.folder) / ask.plan), workload.model) as session:
        yield Running(workload, session)


@contextlib.contextmanager
def _checkpointed(workload: Workload, ask: Ask, **options: Any) -> Iterator[Running]:
    """Each block under ``torch.utils.checkpoint``, as ``gradient_checkpointing_enable`` of transformers has it."""
    for block in blocks_of(ask.network, workload.model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    yield Running(workload)


def _selective(workload: Workload, ask: Ask) -> AbstractContextManager[Running]:
    """As checkpointing, but what matrix products, convolutions and attention give is saved."""
    found = [getattr(torch.ops.aten, name).default for name in SAVED_BY_SAC if hasattr(torch.ops.aten, name)]
    contexts = functools.partial(create_selective_checkpoint_contexts, found)
    return _checkpointed(workload, ask, context_fn=contexts)


@contextlib.contextmanager
def _saved_on_cpu(workload: Workload, _: Ask) -> Iterator[Running]:
    """Every saved tensor is copied, and comes back without a copy: on a CPU there is nowhere else to go.

    Without ``pin_memory`` the copy of a tensor that is on the CPU is the tensor itself, and nothing happens.
    """
    moved = [0, 0]

    def step() -> torch.Tensor:
        moved[:] = [0, 0]
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=True)
        pack = hooks.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            moved[0] += tensor.nbytes
            return pack(tensor)

        hooks.pack_hook = counted
        with hooks:
            return workload.step()

    yield Running(Workload(workload.model, step, workload.optimizer), moved=moved)


@contextlib.contextmanager
def _offloaded(workload: Workload, _: Ask) -> Iterator[Running]:
    """``OffloadActivations`` of TRL, else of torchtune, around the step."""
    offload = _first_of(
        (("trl.models.activation_offloading", "OffloadActivations"), ("torchtune.training", "OffloadActivations"))
    )
    try:
        context = offload()
    except (AttributeError, RuntimeError, ValueError) as error:
        raise NotRunError(f"{offload.__module__} expects an accelerator: {error}") from error

    def step() -> torch.Tensor:
        with context:
            return workload.step()

    yield Running(Workload(workload.model, step, workload.optimizer))


def _first_of(choices: Sequence[tuple[str, str]]) -> Any:
    reasons = []
    for module, name in choices:
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError as error:
            reasons.append(f"{module.split('.')[0]}: {' '.join(str(error).split())}")
    raise NotRunError("; ".join(reasons))


@contextlib.contextmanager
def _compiled(workload: Workload, _: Ask, memory_budget: float = 1.0) -> Iterator[Running]:
    """``torch.compile``, with the share of the saved bytes that its partitioner may keep."""
    config: Any = importlib.import_module("torch._functorch.config")
    with config.patch(activation_memory_budget=memory_budget):
        workload.model.forward = torch.compile(workload.model.forward)
        yield Running(workload)
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    if not counters["stats"]["unique_graphs"]:
        raise NotRunError("torch.compile compiled nothing; its steps were eager ones")


@contextlib.contextmanager
def _compiled_checkpoint(workload: Workload, ask: Ask) -> Iterator[Running]:
    """Each block under ``torch.utils.checkpoint``, all of it compiled."""
    with _checkpointed(workload, ask) as under, _compiled(under.workload, ask) as running:
        yield running


@contextlib.contextmanager
def _in_graphs(workload: Workload, _: Ask, share: float) -> Iterator[Running]:
    """``poochplan.compile``: the plan inside what is compiled."""
    compiled = poochplan.compile(
        workload.model, workload.step, optimizer=workload.optimizer, budget=f"{share:.0%}", time_limit_s=12.0
    )
    with compiled as session:
        yield Running(workload, session)


@contextlib.contextmanager
def _rockmate(_: Workload, __: Ask) -> Iterator[Running]:
    """Only why it does not run. Installed with pulp 2.7.0, in an environment of its own, it cannot be imported."""
    raise NotRunError("rockmate 2.0.0 of the registry: its rkgb 2.0.0 ends with No module named 'rkgb.core'")
    yield


METHODS: dict[str, Method] = {
    IN_CORE: _in_core,
    KEPT: _planned,
    OURS: _planned,
    CHECKPOINT: _checkpointed,
    BROKEN_CHECKPOINT: functools.partial(_checkpointed, preserve_rng_state=False),
    SAC: _selective,
    SAVE_ON_CPU: _saved_on_cpu,
    OFFLOAD: _offloaded,
    ROCKMATE: _rockmate,
    COMPILED: _compiled,
    COMPILED_CHECKPOINT: _compiled_checkpoint,
}
