"""Random loops with torch's optimizers under random plans with streamed state: parameters, state, losses and buffers of
every step are bitwise those of the plain loop, and no peak is above the prediction.

A program draws an optimizer with its options and groups, and what happens between steps: accumulation, clipping, a
scheduler, a skipped step, an exception amid the step, a state dict taken or loaded, moments that are set to zero, a
group that is added, steps outside the session.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan, StateChunk
from poochplan.formats.profile import Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import simulate
from poochplan.runtime.metering.census import leave_out, live
from tests.runtime.nets import LINK
from tests.runtime.random_plans import random_plan

from .trial import WEIGHTS, Outcome, quietly

STEPS, WIDTH = 8, 144
"""A moment of a weight has 81 KiB, and so may leave the device."""
OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}),
    "Adam": ({}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}),
    "AdamW": ({}, {"amsgrad": True}, {"fused": True}),
    "NAdam": ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ({},),
    "Adamax": ({},),
    "Adagrad": ({}, {"initial_accumulator_value": 0.1}),
    "Adadelta": ({},),
    "RMSprop": ({}, {"momentum": 0.5, "centered": True}),
    "Rprop": ({},),
    "ASGD": ({},),
    "Adafactor": ({},),
}
PLAIN = "plain"
EVENTS = (
    "accumulates",
    "clips",
    "skips",
    "raises",
    "takes a state dict",
    "loads a state dict",
    "zeroes moments",
    "adds a group",
    "is away",
    "evaluates",
    "keeps gradients",
)


@dataclass(frozen=True)
class Loop:
    """One random loop."""

    seed: int
    optimizer: str
    options: dict[str, Any]
    has_groups: bool
    has_scheduler: bool
    events: tuple[str, ...]

    @staticmethod
    def draw(seed: int) -> Loop:
        chance = random.Random(seed)
        name = chance.choice(sorted(OPTIMIZERS))
        options = dict(chance.choice(OPTIMIZERS[name]))
        if name != "Adafactor" and "fused" not in options and chance.random() < 0.5:
            options["foreach"] = True
        events = [PLAIN, *(chance.choice((PLAIN, *EVENTS)) for _ in range(STEPS - 1))]
        return Loop(seed, name, options, chance.random() < 0.5, chance.random() < 0.5, tuple(events))


class Boom(Exception):
    """Raised amid a step."""


class Run:
    """A loop as it runs: model, optimizer and all that it holds."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        torch.manual_seed(loop.seed)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(5)]
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.model = nn.Sequential(*layers, self.spare)
        own = [one for layer in layers for one in layer.parameters()]
        groups = [{"params": own[:7], "lr": 1e-2}, {"params": own[7:]}] if loop.has_groups else [{"params": own}]
        self.optimizer = getattr(torch.optim, loop.optimizer)(groups, lr=1e-3, **loop.options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3) if loop.has_scheduler else None
        self.held: dict[str, Any] | None = None

    def forward(self) -> torch.Tensor:
        return self.model(torch.randn(24, WIDTH)).square().mean()

    def step(self, number: int, session: Any = None) -> list[torch.Tensor]:
        """One step: what it leaves, copied."""
        torch.manual_seed(1000 * self.loop.seed + number)
        event = self.loop.events[number]
        losses = [self._trained()]
        if event == "accumulates":
            losses.append(self._trained())
        self._before(event)
        away = session.away() if event == "is away" and session is not None else contextlib.nullcontext()
        with away:
            if event == "raises":
                with contextlib.suppress(Boom), self._raising():
                    self.optimizer.step()
            elif event != "skips":
                self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=event != "keeps gradients")
        self._after(event)
        return [*losses, *self._left()]

    def _trained(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        return loss.detach().clone()

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        """The step raises before it has changed anything."""

        def boom(*_: Any) -> None:
            raise Boom

        handle = self.optimizer.register_step_pre_hook(boom)
        try:
            yield
        finally:
            handle.remove()

    def _before(self, event: str) -> None:
        if event == "clips":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if event == "zeroes moments":
            for entries in self.optimizer.state.values():
                for one in entries.values():
                    if isinstance(one, torch.Tensor) and one.dim() > 1:
                        one.zero_()

    def _after(self, event: str) -> None:
        if event == "takes a state dict":
            self.held = copy.deepcopy(self.optimizer.state_dict())
        elif event == "loads a state dict" and self.held is not None:
            if len(self.held["param_groups"]) == len(self.optimizer.param_groups):
                self.optimizer.load_state_dict(self.held)
        elif event == "adds a group" and not any(self.spare.weight is one for one in self._parameters()):
            self.optimizer.add_param_group({"params": list(self.spare.parameters()), "lr": 1e-4})
        elif event == "evaluates":
            with torch.no_grad():
                self.model(torch.randn(24, WIDTH))

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def _left(self) -> list[torch.Tensor]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for parameter in self._parameters():
            entries = self.optimizer.state.get(parameter, {})
            tensors += [torch.as_tensor(entries[name]) for name in sorted(entries) if entries[name] is not None]
        return [one.detach().clone() for one in tensors]


def state_trial(seed: int) -> Outcome:
    """The loop of that seed under two random plans."""
    loop, outcome = Loop.draw(seed), Outcome(counts=Counter({"programs": 1}))
    with quietly():
        reference = _all(Run(loop))
        profiled = Run(loop)
        profile = poochplan.profile(
            profiled.forward, model=profiled.model, optimizer=profiled.optimizer, iterations=1, link=LINK
        )
        del profiled
        for turn in range(2):
            plan = _plan(profile, Run(loop), 10 * seed + turn)
            problems = _under(loop, plan, profile, reference, outcome.counts)
            outcome.problems += [f"{problem} [{loop}, plan {turn}]" for problem in problems]
    return outcome


def _all(run: Run) -> list[list[torch.Tensor]]:
    return [run.step(number) for number in range(STEPS)]


def _plan(profile: Profile, run: Run, seed: int) -> Plan:
    """Random decisions, and random chunks of which random ones are streamed."""
    chance = random.Random(seed)
    plan = random_plan(profile, seed, WEIGHTS[seed % len(WEIGHTS)])
    sizes = [sum(profile.values[one].size_bytes for one in state) for state in profile.optimizers[0].parameters]
    chunks, first = [], 0
    while first < len(sizes):
        count = min(chance.randint(1, 8), len(sizes) - first)
        size_bytes = sum(sizes[first : first + count])
        chunks.append(
            StateChunk(
                optimizer=0,
                first=first,
                count=count,
                size_bytes=size_bytes,
                streamed=size_bytes > 0 and chance.random() < 0.7,
            )
        )
        first += count
    return msgspec.structs.replace(plan, state=tuple(chunks) if any(one.streamed for one in chunks) else ())


def _under(
    loop: Loop, plan: Plan, profile: Profile, reference: list[list[torch.Tensor]], counts: Counter[str]
) -> Iterator[str]:
    foreseen = simulate(Problem.of(profile, plan), schedule_of(plan))
    leave_out(live(torch.Tensor))  # of earlier trials, which live as long as the collector lets them
    run = Run(loop)
    with poochplan.apply(plan, run.model, run.optimizer, meter="always", on_audit="off", arena="off") as session:
        for number, expected in enumerate(reference):
            try:
                found = run.step(number, session)
            except Exception as error:
                yield f"raises {error!r} in step {number}"
                return
            counts["steps"] += 1
            peak_bytes = session.last.peak_bytes
            if loop.events[number] == PLAIN and number > 1 and not _is_changed(loop, number) and peak_bytes is not None:
                counts["peaks compared"] += 1
                if peak_bytes > foreseen.peak_bytes:
                    yield f"peak {peak_bytes} of step {number} is above the predicted {foreseen.peak_bytes}"
            if not _same(found, expected):
                yield f"state or parameter differs after step {number}"
                return
        counts["bytes streamed"] += session._chunked._places.out_bytes
    if not _same(run._left(), reference[-1][-len(run._left()) :]):
        yield "state or parameter differs after the session"


def _is_changed(loop: Loop, number: int) -> bool:
    """Whether what came before leaves more memory than the profiled step has."""
    return bool({"adds a group", "takes a state dict", "keeps gradients", "raises"} & set(loop.events[:number]))


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return len(found) == len(expected) and all(
        one.dtype == other.dtype and one.shape == other.shape and _bits(one).equal(_bits(other)) for one, other in pairs
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
