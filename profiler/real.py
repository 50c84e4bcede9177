"""The step that is profiled: run phase by phase, and timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from poochplan.formats.profile import Phase
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.profiler.capture.clock import Clock
from poochplan.profiler.live.watch import Watch
from poochplan.profiler.step.forward_only import check_trains, checked_loss, forward_only, inputs_explained
from poochplan.runtime.known_steps import RepeatedStep


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
        self.arena: RepeatedStep | None = None
        """From what each step has its memory; None for the ordinary allocator."""
        self.loss: torch.Tensor | None = None
        """Of the last step: it lives on through the next forward, as it does in ``loss = step()`` of a user's loop."""
        self._checked = False

    def one_step(self, watch: Watch | None = None) -> PhaseSeconds:
        """Runs it, under nothing but what the caller has put around it; a watch is told each phase as it begins, and
        what it takes aside is not the step's.
        """
        self.let_go_of_gradients()
        with self.arena.run() if self.arena is not None else contextlib.nullcontext():
            times_s = [self._begins(Phase.FORWARD, watch)]
            self.loss = self._forward()
            times_s.append(self._begins(Phase.BACKWARD, watch))
            self.loss.backward()
            self._check_first()
            times_s.append(self._begins(Phase.OPTIMIZER, watch))
            if self.optimizer is not None:
                self.optimizer.step()
            times_s.append(self._time_s(watch))
        return {phase: times_s[index + 1] - times_s[index] for index, phase in enumerate(Phase)}

    def let_go_of_gradients(self) -> None:
        """Before a step, where they are not to live through forward."""
        if not self.accumulate:
            for parameter in self.model.parameters():
                parameter.grad = None

    def there_before(self) -> list[Any]:
        """What a step finds beside model and optimizer: the loss of the one before, and what lives beside it."""
        held = _gradients_held_by(self.loss, set(self.model.parameters()))
        return [self.loss, *held, *self.beside]

    def _forward(self) -> torch.Tensor:
        first = inputs_explained(self.model) if not self._checked else contextlib.nullcontext()
        with forward_only(self.model), first:
            return checked_loss(self.step(), self.model)

    def _check_first(self) -> None:
        if not self._checked:
            check_trains(self.model, set(_leaves_of(self.loss)))
            self._checked = True

    def _begins(self, phase: Phase, watch: Watch | None) -> float:
        time_s = self._time_s(watch)
        if watch is not None:
            watch.enter(phase)
        return time_s

    def _time_s(self, watch: Watch | None) -> float:
        """Now, with all that was queued behind us, on a clock that stands still in the hooks of a watch."""
        self._clock.synchronize()
        return time.perf_counter() - (watch.hooks_s if watch is not None else 0.0)


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
