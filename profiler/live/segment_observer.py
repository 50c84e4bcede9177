"""SegmentObserver: observes one segment of the user's loop, by a step policy and by instruments that see its ops."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from poochplan.errors import named_line
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.profile_parts import rounded_up
from poochplan.guard import guarded_around
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.clock import Clock
from poochplan.profiler.step.forward_only import is_the_compilers
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.mechanism import Rebuild, rebuild_together
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.runtime.metering.census import census, foreseen_bytes
from poochplan.runtime.step_policies.step_policy import StepPolicy
from poochplan.torch_private.tensor_internals import in_backward, intercept_autograd, storage_identity

PackHook = Callable[[torch.Tensor], SavedHandle]
UnpackHook = Callable[[SavedHandle], torch.Tensor]


@dataclass(frozen=True)
class StudyContext:
    model: torch.nn.Module
    """All of the models together."""
    where: torch.device
    clock: Clock
    spill_dir: str | Path | None
    optimizers: Iterable[torch.optim.Optimizer]
    """The optimizers that have stepped or were named."""
    there_before: Callable[[], Sequence[Any]] | None = None
    """For a step function, whose gradients are discarded: the memory before a step besides model and optimizers. None
    in a loop: there it is all live memory, and no mode may be on the stack in backward."""

    @property
    def is_repeated(self) -> bool:
        """Whether a step may be run again unchanged, because its gradients are discarded."""
        return self.there_before is not None


class SegmentObserver:
    """Base class: observes one segment, changes nothing, and knows the segment's phase.

    Phases are recognised: backward runs through autograd's one entrance; later code belongs to the optimizer.
    """

    def __init__(self, context: StudyContext, policy: StepPolicy | None) -> None:
        self.context = context
        self.policy = policy
        """None for a step of a step function in which autograd saves without hooks."""
        self.rebuild: Rebuild = rebuild_together
        self.why_not = ""
        """Why the segment has no result; empty while it may have one."""
        self.is_final = False
        """Whether the same is true of every other segment of its kind."""
        self.swaps_once = False
        """Whether values leave the device for the sake of observation, and not because memory is short."""
        self.base_bytes: int | None = None
        """Bytes that were alive when the segment began, if that was measured."""
        self.foreseen_bytes = 0
        """Bytes that will be added one day, as far as optimizers determine them."""
        self.phase = Phase.FORWARD
        self.seconds: PhaseSeconds = dict.fromkeys(Phase, 0.0)
        """Seconds of each phase, if they are timed."""
        self.instrument: Capture | None = None
        """Sees the ops, compiled callables and nodes of the segment."""
        self._thread = threading.get_ident()
        self._is_in_backward = False
        self._stack = contextlib.ExitStack()

    def begin(self, segment: Segment) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(intercept_autograd(guarded_around(self._backward)))
            stack.enter_context(self.instruments(segment))
            self._stack = stack.pop_all()

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        """The instruments are on for the length of the block."""
        yield

    def look_around(self, segment: Segment) -> None:
        """The segment is about to begin: counts live memory, and what is left over even if it is on the host now."""
        kind = self.context.where.type
        left_over = [value for value in (reference() for reference in segment.left_over) if value is not None]
        there = census(kind, 1)
        unseen = [one for one in left_over if one.storage is None or storage_identity(one.storage) not in there]
        sizes = [*(storage.nbytes() for storage in there.values()), *(value.size_bytes for value in unseen)]
        self.base_bytes = sum(map(rounded_up, sizes))
        self.foreseen_bytes = foreseen_bytes(self.context.optimizers, kind)

    def enter(self, phase: Phase) -> None:
        self.phase = phase

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return call if self.instrument is None else self.instrument.around_call(path, call)

    def pack(self, tensor: torch.Tensor, pack: PackHook) -> SavedHandle:
        handle = pack(tensor)
        self.packed(tensor, handle)
        return handle

    def packed(self, tensor: torch.Tensor, handle: SavedHandle) -> None:
        """Forward has saved a tensor."""

    def unpack(self, handle: SavedHandle, unpack: UnpackHook) -> torch.Tensor:
        return unpack(handle)

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        """The result of ``run()``, the user's backward. Its gradients are used, so no mode of ours may be on."""
        return run() if self.instrument is None or self.context.is_repeated else self.instrument.observed(outputs, run)

    @property
    def is_retained(self) -> bool:
        """Whether a handle that backward has used is still held, if that is known."""
        return False

    def runs_another(self) -> None:
        """A backward begins within a backward."""

    def end(self, *, stepped: bool) -> None:
        """The segment has ended, ``stepped`` with a step of the optimizer: removes the instruments. Idempotent."""
        self._stack.close()

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def seen(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            ran = partial(run, outputs, *args, **kwargs)
            is_here = threading.get_ident() == self._thread
            is_within = self._is_in_backward and (is_here or in_backward())  # on CUDA on autograd's thread
            if is_the_compilers(outputs) or not (is_here or is_within):
                return ran()
            if is_within:
                self.runs_another()
                return ran()
            self._is_in_backward = True
            self.enter(Phase.BACKWARD)
            try:
                return self.observed(outputs, ran)
            except BaseException:
                self.why_not = "its backward raised"
                raise
            finally:
                failure = None if self.instrument is None else self.instrument.nodes.failure
                if failure is not None:
                    self.why_not = f"looking at its backward raised {named_line(failure)}"
                self._is_in_backward = False
                self.enter(Phase.OPTIMIZER)

        return seen


NewObserver = Callable[[], SegmentObserver]
Studied = Generator[NewObserver, Any, Profile]
"""Asks for observers, receives each back when its segment has a result, and returns the profile."""
