"""No wait and no release of the runtime can go: without any single one of them something here fails."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import msgspec
import pytest
import torch

import poochplan
from poochplan.errors import SpillError
from poochplan.formats.plan import Plan
from poochplan.runtime.arena.library import why_unavailable
from poochplan.runtime.devices import transfers
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.engine import mechanism, saved_value
from poochplan.runtime.metering.allocated import joined_count
from tests.runtime.adversarial import AdversarialDevice, OpClock
from tests.runtime.mutants import Mutant, mutants_of
from tests.runtime.nets import CASES, equal, gated, gradients
from tests.runtime.random_plans import fetched_early, gate_replayed_early, random_plan

pytestmark = pytest.mark.cpu_device
CASE = CASES["residual"]
BATCH = torch.linspace(-1, 1, 4 * 8 * 16 * 16).view(4, 8, 16, 16)
MUTANTS = mutants_of(transfers, saved_value, mechanism)


Scenario = Callable[[AdversarialDevice], list[str]]


class Judge:
    """Runs what a runtime goes through on the adversarial device; tells what was wrong."""

    def __init__(self) -> None:
        profile = CASE.profile()
        draws = [(1, 2, 2), (0, 1, 0), (0, 1, 3)]
        self.plans = [random_plan(profile, seed, weights) for seed, weights in enumerate(draws)]
        self.gate_early = gate_replayed_early(gated().profile())
        self.fetched_early = fetched_early(self.plans[1])
        self.reference = self._gradients(None)
        self.other_batch = self._gradients(None, images=2)
        self.part = self._part(None)
        self.curves: dict[str, list[list[int]]] = {}
        assert self.complaints() == []

    def complaints(self) -> list[str]:
        scenarios: list[tuple[Scenario, dict[str, int]]] = [
            (self._training, {}),
            (self._claimed, {}),
            (self._part_of_the_graph, {}),
            (self._abandoned, {}),
            (self._diverged, {}),
            (self._copies_alone, {}),
            (self._lost, {"failing_reads": 1}),
            (self._full, {"failing_writes": 3}),
        ]
        found = []
        for scenario, faults in scenarios:
            clock = OpClock()
            device = AdversarialDevice(clock, **faults)
            try:
                with clock, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    complaints = scenario(device)
            except Exception as error:
                complaints = [repr(error)]
            found += [f"{scenario.__name__}: {complaint}" for complaint in (*complaints, *device.violations)]
        return found

    def _training(self, device: AdversarialDevice) -> list[str]:
        found, curves = [], []
        for plan in self.plans:
            live: list[int] = []
            if not equal([self.reference], [self._gradients(device, plan, live=live)]):
                found.append("gradients differ")
            curves.append(live)
        return [*found, *self._other_bytes("training", curves)]

    def _claimed(self, device: AdversarialDevice) -> list[str]:
        """What a replay needs goes once the value is back."""
        model, step, _ = gated().fresh()
        live: list[int] = []
        with poochplan.apply(self.gate_early, model, device=lambda: device):
            _note_live_bytes(model, live)
            step().backward()
        return self._other_bytes("claimed", [live])

    def _other_bytes(self, name: str, curves: list[list[int]]) -> list[str]:
        return [] if curves == self.curves.setdefault(name, curves) else ["other bytes are live"]

    def _gradients(
        self,
        device: AdversarialDevice | None,
        plan: Plan | None = None,
        *,
        images: int = 4,
        live: list[int] | None = None,
    ) -> list[torch.Tensor]:
        """Of one step; ``live`` takes the bytes live whenever a gradient has come."""
        model, _, _ = CASE.fresh()
        batch = BATCH[:images]
        torch.manual_seed(3)
        with contextlib.nullcontext() if plan is None else poochplan.apply(plan, model, device=lambda: device):
            if live is not None:
                _note_live_bytes(model, live)
            model(batch).square().sum().backward()
        return gradients(model)

    def _part(self, device: AdversarialDevice | None) -> list[torch.Tensor]:
        model, step, _ = CASE.fresh()
        plan = self.fetched_early
        with contextlib.nullcontext() if device is None else poochplan.apply(plan, model, device=lambda: device):
            return list(torch.autograd.grad(step(), [model.get_parameter("head.weight")]))

    def _part_of_the_graph(self, device: AdversarialDevice) -> list[str]:
        """What was prefetched for the rest of it goes unused."""
        return [] if equal([self.part], [self._part(device)]) else ["gradients differ"]

    def _abandoned(self, device: AdversarialDevice) -> list[str]:
        """A forward without backward."""
        model, step, _ = CASE.fresh()
        with poochplan.apply(_without("release", self.plans[1]), model, device=lambda: device):
            step()
        return []

    def _diverged(self, device: AdversarialDevice) -> list[str]:
        planned = self._gradients(device, self.plans[0], images=2)
        return [] if equal([self.other_batch], [planned]) else ["gradients differ"]

    def _copies_alone(self, device: AdversarialDevice) -> list[str]:
        """Copies that nobody waits for and that alone hold their storages."""
        for copy in (copy_out, copy_in):
            copy(device, device.allocate(64), 0)
        return []

    def _lost(self, device: AdversarialDevice) -> list[str]:
        """A value that could not be read back is an error, and nothing is used in its place."""
        model, _, _ = CASE.fresh()
        torch.manual_seed(3)
        # Each read is waited for at once: the wait for a later one would show its error too.
        with poochplan.apply(_without("prefetch", self.plans[1]), model, device=lambda: device):
            loss = model(BATCH).square().sum()
            try:
                loss.backward(retain_graph=True)
                return ["a value that could not be read was used"]
            except SpillError:
                model.zero_grad(set_to_none=True)
            loss.backward()  # the disk is well again
        return [] if equal([self.reference], [gradients(model)]) else ["gradients differ"]

    def _full(self, device: AdversarialDevice) -> list[str]:
        """Values that could not be written are kept."""
        return [] if equal([self.reference], [self._gradients(device, self.plans[1])]) else ["gradients differ"]


def _note_live_bytes(model: torch.nn.Module, live: list[int]) -> None:
    """Since forward began: what lives beside it is not of the session."""
    count = joined_count()
    assert count is not None
    began_bytes = [0]
    model.register_forward_pre_hook(lambda *_: began_bytes.__setitem__(0, count.live_bytes))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: live.append(count.live_bytes - began_bytes[0]))


def _without(what: str, plan: Plan) -> Plan:
    """The plan without its actions of one kind."""
    return msgspec.structs.replace(
        plan, schedule=tuple(msgspec.structs.replace(actions, **{what: ()}) for actions in plan.schedule)
    )


@pytest.fixture(scope="module")
def judge() -> Judge:
    if why_unavailable():
        pytest.skip(why_unavailable())
    return Judge()


def test_the_waits_and_releases_are_found() -> None:
    assert sum("no wait" in mutant.label for mutant in MUTANTS) >= 6
    assert sum("let go" in mutant.label for mutant in MUTANTS) >= 4


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_without_it_something_fails(judge: Judge, mutant: Mutant) -> None:
    with mutant.in_place():
        assert judge.complaints() != []
    assert mutant.owner.__dict__[mutant.name] is not None


def test_the_original_is_back_afterwards(judge: Judge) -> None:
    assert judge.complaints() == []
