"""The engine's waits and releases on the stand-in: without any single one some training step goes wrong there too."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import warnings
from collections.abc import Iterator

import pytest
import torch

import poochplan
import poochplan.runtime.engine
from poochplan.formats.plan import Plan
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in
from tests.gpu.cases import CASES
from tests.runtime.mutants import Mutant, mutants_of
from tests.runtime.nets import Case, equal, gated, gradients
from tests.runtime.random_plans import fetched_early, gate_replayed_early, random_plan

_MODULES = [
    importlib.import_module(f"poochplan.runtime.engine.{found.name}")
    for found in pkgutil.iter_modules(poochplan.runtime.engine.__path__)
]
MUTANTS = [mutant for mutant in mutants_of(*_MODULES) if mutant.name != "arrived"]
"""Without those of a read that fails: a disk's may, and pinned memory's does not."""
CASE, STREAMS = CASES["residual"], CASES["two_streams"]


class Judge:
    """Steps on the stand-in under plans made before; remembers what the allocator had when each gradient came."""

    def __init__(self) -> None:
        with on_stand_in():
            gates = gated(WHERE)
            swaps = random_plan(CASE.profile(), 1, (0, 1, 0))
            self.plans = [
                (CASE, random_plan(CASE.profile(), 0, (1, 2, 2))),
                (CASE, swaps),
                (CASE, random_plan(CASE.profile(), 2, (0, 1, 3))),
                (STREAMS, random_plan(STREAMS.profile(), 1, (0, 1, 1))),
                (gates, gate_replayed_early(gates.profile())),
            ]
            self.fetched_early = fetched_early(swaps)
        self.held: dict[int, list[int]] = {}
        assert list(self.complaints()) == []

    def complaints(self) -> Iterator[str]:
        for number, (case, plan) in enumerate(self.plans):
            with on_stand_in() as gpu, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reference, _ = _gradients(gpu, case, None)
                try:
                    planned, held = _gradients(gpu, case, plan)
                    wrong = [] if equal([reference], [planned]) else ["gradients differ"]
                    wrong += [] if held == self.held.setdefault(number, held) else ["other bytes are held"]
                except Exception as error:
                    wrong = [repr(error)]
            yield from (f"{number}: {one}" for one in (*wrong, *gpu.violations))
        yield from self._part_of_the_graph()
        yield from self._full()

    def _part_of_the_graph(self) -> Iterator[str]:
        """What was prefetched for the rest of it goes unused."""
        with on_stand_in() as gpu:
            model, step, _ = CASE.fresh()
            reference = torch.autograd.grad(step(), [model.get_parameter("head.weight")])
            model, step, _ = CASE.fresh()
            with poochplan.apply(self.fetched_early, model):
                found = torch.autograd.grad(step(), [model.get_parameter("head.weight")])
            if not torch.equal(reference[0], found[0]):
                yield "gradients differ"
        yield from gpu.violations

    def _full(self) -> Iterator[str]:
        """Values for which there is no pinned memory are kept."""
        with on_stand_in() as gpu, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference, _ = _gradients(gpu, CASE, None)
            gpu.host_memory.most_bytes = 1
            try:
                planned, _ = _gradients(gpu, *self.plans[1])
                wrong = [] if equal([reference], [planned]) else ["gradients differ"]
            except Exception as error:
                wrong = [repr(error)]
        yield from (*wrong, *gpu.violations)


def _gradients(gpu: Machine, case: Case, plan: Plan | None) -> tuple[list[torch.Tensor], list[int]]:
    model, step, _ = case.fresh()
    held: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: held.append(gpu.memory.allocated_bytes))
    torch.manual_seed(3)
    with contextlib.nullcontext() if plan is None else poochplan.apply(plan, model):
        step().backward()
    return gradients(model), held


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.mark.deep
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_without_it_something_fails(judge: Judge, mutant: Mutant) -> None:
    with mutant.in_place():
        assert next(judge.complaints(), None) is not None
