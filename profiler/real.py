"""The step that is profiled: run phase by phase, timed, and captured."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from poochplan.formats.profile import Kind, Phase
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.clock import Clock
from poochplan.profiler.capture.garbage import collected_after
from poochplan.profiler.capture.kinds import Kinds
from poochplan.profiler.step.forward_only import check_trains, checked_loss, forward_only, inputs_explained
from poochplan.profiler.trials.swap_all import SwapAll
from poochplan.runtime.arena.repeated_step import RepeatedStep


class Runner:
    """One training step, phase by phase, timed."""

    def __init__(
        self,
        step: Callable[[], torch.Tensor],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        accumulate: bool,
        clock: Clock,
        beside: Sequence[torch.Tensor] = (),
    ) -> None:
        self.step = step
        self.model = model
        self.optimizer = optimizer
        self.accumulate = accumulate
        self._clock = clock
        self.beside = beside
        """What lives beside the step and no op of it meets."""
        self.swap_all: SwapAll | None = None
        """What takes saved values to the host in :meth:`one_step`; None when they stay."""
        self.arena: RepeatedStep | None = None
        """From what each step has its memory; None for the ordinary allocator."""
        self.loss: torch.Tensor | None = None
        """Of the last step: it lives on through the next forward, as it does in ``loss = step()`` of a user's loop."""
        self._checked = False

    def one_step(self, enter: Callable[[Phase], Any] = lambda _: None) -> PhaseSeconds:
        """Runs it, swapping where it is to; ``enter`` is told each phase as it begins."""
        with self.swap_all.step() if self.swap_all is not None else contextlib.nullcontext():
            return self.bare_step(enter)

    def bare_step(self, enter: Callable[[Phase], Any] = lambda _: None) -> PhaseSeconds:
        """Runs it under nothing but what the caller has put around it."""
        if not self.accumulate:
            for parameter in self.model.parameters():
                parameter.grad = None
        with self.arena.run() if self.arena is not None else contextlib.nullcontext():
            times_s = [self._time_s()]
            enter(Phase.FORWARD)
            self.loss = self._forward()
            times_s.append(self._time_s())
            enter(Phase.BACKWARD)
            self.loss.backward()
            self._check_first()
            times_s.append(self._time_s())
            enter(Phase.OPTIMIZER)
            if self.optimizer is not None:
                self.optimizer.step()
            times_s.append(self._time_s())
        return {phase: times_s[index + 1] - times_s[index] for index, phase in enumerate(Phase)}

    def _forward(self) -> torch.Tensor:
        first = inputs_explained(self.model) if not self._checked else contextlib.nullcontext()
        with forward_only(self.model), first:
            return checked_loss(self.step(), self.model)

    def _check_first(self) -> None:
        if not self._checked:
            check_trains(self.model, set(_leaves_of(self.loss)))
            self._checked = True

    def _time_s(self) -> float:
        """Now, with all that was queued behind us, on a clock that stands still while values are swapped."""
        self._clock.synchronize()
        return time.perf_counter() - (self.swap_all.seconds if self.swap_all is not None else 0.0)


def captured(runner: Runner, capture: Capture) -> tuple[Capture, Kinds]:
    """The capture after one step of the runner's, and what kind of value each is that was there before."""
    model = runner.model
    gc.collect()  # what waits for it from the step before is not this one's
    kinds = Kinds(capture)

    def enter(phase: Phase) -> None:
        capture.phase = phase
        if phase is Phase.OPTIMIZER:
            kinds.note_gradients(model)

    kinds.note([runner.loss, *_gradients_held_by(runner.loss, set(model.parameters()))], Kind.INPUT)
    kinds.note_model(model)
    if runner.optimizer is not None:
        kinds.note_optimizer(runner.optimizer)
    if runner.accumulate:
        kinds.note_gradients(model)
    kinds.note(runner.beside, Kind.INPUT)  # last: what is also the model's is the model's
    with collected_after(capture), capture.running(model):
        runner.bare_step(enter)
    return capture, kinds


def _gradients_held_by(loss: torch.Tensor | None, parameters: set[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of what the step before made a leaf of (as wav2vec2 its input): the graph of its loss keeps them."""
    return [leaf.grad for leaf in _leaves_of(loss) if leaf not in parameters and leaf.grad is not None]


def _leaves_of(loss: torch.Tensor | None) -> list[torch.Tensor]:
    """The leaves that the loss's graph gives gradients to."""
    pending = [loss.grad_fn if loss is not None else None]
    seen: set[torch.autograd.graph.Node] = set()
    found: list[torch.Tensor] = []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        pending += [following for following, _ in node.next_functions]
    return found
