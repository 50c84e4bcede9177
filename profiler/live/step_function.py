"""StepFunction: a user's step function, run alone or under the observers of a study."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from poochplan.formats.profile import Phase, Profile
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.profiler.capture.clock import clock_of
from poochplan.profiler.step.forward_only import check_trains, checked_loss, forward_only, inputs_explained
from poochplan.profiler.trials.compare import under
from poochplan.runtime.devices.device import ComputeDevice, Interval, Job
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.mechanism import Mechanism
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.step_policies.step_policy import StepPolicy
from poochplan.tensors.modes import around_compiled
from poochplan.tensors.operators import past_first_calls
from poochplan.torch_private.tensor_internals import nodes_behind, without_modes

from .after_capture import PhaseTiming
from .segment_observer import SegmentObserver, Studied, StudyContext

W = TypeVar("W", bound=SegmentObserver)


class StepFunction(contextlib.AbstractContextManager["StepFunction"]):
    """A context manager: the host tier exists from the first move of a value to the end. State: the active observer.

    Parameters
    ----------
    step: runs forward and returns the loss; backward and the optimizer's step are called here.
    accumulate: whether gradients of the previous step live through forward.
    beside: memory outside the step that no op of it uses.
    in_core: whether the step fits, so that moved values may stay in the same memory.
    """

    alternatives = ()

    def __init__(
        self,
        step: Callable[[], torch.Tensor],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        where: torch.device,
        *,
        accumulate: bool = False,
        beside: Sequence[torch.Tensor] = (),
        spill_dir: str | Path | None = None,
        in_core: bool = True,
    ) -> None:
        past_first_calls()
        self.step, self.model, self.optimizer = step, model, optimizer
        optimizers = [] if optimizer is None else [optimizer]
        self.context = StudyContext(
            model, where, clock_of(where), spill_dir, optimizers, there_before=self._there_before
        )
        self.loss: torch.Tensor | None = None
        """The loss of the last step. It lives through the next forward, as ``loss = step()`` in a user's loop."""
        self._accumulates, self._beside, self._in_core = accumulate, beside, in_core
        self._checked = False
        self._observer: SegmentObserver | None = None
        self._stack = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- steps ------------------------------------------------------------------------------------------------

    def run(self, observer: W) -> W:
        self._let_go_of_gradients()
        self._observer = observer
        with self._under(observer) as segment:
            observer.begin(segment)
            try:
                self.one_step()
            finally:
                observer.end(stepped=True)
                self._observer = None
        return observer

    def one_step(self) -> None:
        """Runs the step, under nothing except what the caller has installed."""
        self._let_go_of_gradients()
        first = inputs_explained(self.model) if not self._checked else contextlib.nullcontext()
        with forward_only(self.model), first:
            self.loss = checked_loss(self.step(), self.model)
        if self._observer is not None:  # the op that makes the first gradient belongs to backward
            self._observer.enter(Phase.BACKWARD)
        self.loss.backward()
        if not self._checked:
            check_trains(self.model, set(_leaves_of(self.loss)))
            self._checked = True
        if self.optimizer is not None:
            self.optimizer.step()

    def timed(self) -> PhaseSeconds:
        """Seconds of one step by PyTorch alone."""
        return self.run(PhaseTiming(self.context, None)).seconds

    def studied(self, study: Studied) -> Profile:
        """The study's profile, by steps run now."""
        with closing(study):
            new_observer = next(study)
            while True:
                observer = self.run(new_observer())
                try:
                    new_observer = study.send(observer)
                except StopIteration as profiled:
                    return cast(Profile, profiled.value)

    def _let_go_of_gradients(self) -> None:
        """Called before a step whose gradients must not live through forward."""
        if not self._accumulates:
            for parameter in self.model.parameters():
                parameter.grad = None

    def _there_before(self) -> list[Any]:
        """The memory before a step, besides model and optimizer: the previous loss, the gradients of tensors that the
        previous step made leaves, as wav2vec2 does with its input (the loss's graph keeps them), and memory outside
        the step.
        """
        parameters = set(self.model.parameters())
        return [self.loss, *(one.grad for one in _leaves_of(self.loss) if one not in parameters), *self._beside]

    # -- their surroundings -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _under(self, observer: SegmentObserver) -> Iterator[Segment]:
        """A block that is one step of the engine, if the observer has a policy."""
        if observer.policy is None:
            with around_compiled(self.model, observer.around_call):
                yield Segment(0, 0)
            return
        engine = self._engine
        pack, unpack = partial(observer.pack, pack=engine.pack), partial(observer.unpack, unpack=engine.unpack)
        with under(engine, self.model, pack, unpack, observer.around_call):
            yield engine.segment
        if self._in_core:
            engine.device.trim_host(engine.host.taken())

    @cached_property
    def _engine(self) -> Engine:
        device = self._stack.enter_context(closing(open_device(self.context.where, self.context.spill_dir)))
        copies = cast(ComputeDevice, OnTheDevice(device)) if self._in_core else device
        engine = Engine(self, copies, self.context.model)
        engine.mechanism.rebuild = self._rebuild
        engine.fallbacks.silent = True  # the profile reports steps that differ
        return engine

    def choose(self, segment: Segment) -> StepPolicy | None:
        """The observer's policy; see :class:`~poochplan.runtime.step_policies.step_policy.Chooser`."""
        assert self._observer is not None, "steps of the engine's are run under observers"
        return self._observer.policy

    def _rebuild(self, value: SavedValue, mechanism: Mechanism) -> None:
        assert self._observer is not None, "steps of the engine's are run under observers"
        self._observer.rebuild(value, mechanism)


class OnTheDevice:
    """A device for steps that fit: copies to the host tier stay on the device until step or value ends."""

    error = None
    """Copies are their own jobs here, and none fails."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._copies: dict[int, torch.UntypedStorage] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        with without_modes():  # otherwise recording would count the copy as part of the step
            self._copies[host_offset] = storage.clone()
        return self

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        with without_modes():
            storage.copy_(self._copies[host_offset])  # it is kept, because a retained graph reads it again
        return self

    def trim_host(self, taken: Sequence[Interval]) -> None:
        live = {at for at in self._copies if any(first <= at < behind for first, behind in taken)}
        self._copies = {at: copy for at, copy in self._copies.items() if at in live}


def _leaves_of(loss: torch.Tensor | None) -> list[torch.Tensor]:
    """The leaves to which the loss's graph gives gradients."""
    outputs = [loss] if loss is not None and loss.grad_fn is not None else []
    leaves = (getattr(node, "variable", None) for node in nodes_behind(outputs))
    return [leaf for leaf in leaves if leaf is not None]
