"""StepFunction: a step that somebody has given, run under the watches that a running loop is studied with."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from poochplan.profiler.capture.clock import clock_of
from poochplan.profiler.real import Runner
from poochplan.profiler.trials.compare import under
from poochplan.runtime.devices.device import Device, Job
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.mechanism import Mechanism
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.step_policies.step_policy import StepPolicy
from poochplan.tensors.modes import around_compiled

from .watch import Scene, Watch

W = TypeVar("W", bound=Watch)


class OnTheDevice:
    """A device for steps that fit: what is copied to the host tier stays in the memory that it is in, until it is read
    back, once.
    """

    error = None
    """Copies are their own jobs here, and none fails."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copies: dict[int, torch.UntypedStorage] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        """See :class:`Device`."""
        self._copies[host_offset] = storage.clone()
        return self

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> Job:
        """See :class:`Device`."""
        storage.copy_(self._copies.pop(host_offset))
        return self


class StepFunction:
    """A context manager: the host tier is there from the first step in which something moves to its end. State: the
    watch that is on.

    ``in_core``: whether the step fits, so that what is moved may stay in the memory that it is in.
    """

    alternatives = ()

    def __init__(
        self, runner: Runner, where: torch.device, spill_dir: str | Path | None = None, *, in_core: bool = True
    ) -> None:
        optimizers = [] if runner.optimizer is None else [runner.optimizer]
        clock, there = clock_of(where), runner.there_before
        self.runner = runner
        self.scene = Scene(runner.model, where, clock, spill_dir, optimizers, there_before=there)
        self._in_core = in_core
        self._watch: Watch | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StepFunction:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def _engine(self) -> Engine:
        device = self._stack.enter_context(closing(open_device(self.scene.where, self.scene.spill_dir)))
        copies = cast(Device, OnTheDevice(device)) if self._in_core else device
        engine = Engine(self, copies, self.scene.model, rebuild=self._rebuild)
        engine.fallbacks.silent = True  # of steps that differ, as the profile says
        return engine

    def choose(self, segment: Segment) -> StepPolicy:
        """The watch's; see :class:`~poochplan.runtime.step_policies.step_policy.Chooser`."""
        assert self._watch is not None, "steps are run under watches"
        return self._watch.policy

    def _rebuild(self, value: SavedValue, mechanism: Mechanism) -> None:
        assert self._watch is not None, "steps are run under watches"
        self._watch.rebuild(value, mechanism)

    def run(self, watch: W, *, moves: bool = True) -> W:
        """The watch, behind one step that ran under it; without ``moves`` autograd saves what it saves by itself."""
        self.runner.let_go_of_gradients()
        self._watch, model = watch, self.scene.model
        with ExitStack() as stack:
            if moves:
                engine = self._engine
                pack, unpack = partial(_pack, watch, engine), partial(_unpack, watch, engine)
                stack.enter_context(under(engine, model, pack, unpack, watch.around_call))
                segment = engine.segment
            else:
                stack.enter_context(around_compiled(model, watch.around_call))
                segment = Segment(0, 0)
            watch.begin(segment)
            try:
                seconds = self.runner.one_step(watch)
            finally:
                watch.end(stepped=True)
        watch.seconds = seconds
        return watch


def _pack(watch: Watch, engine: Engine, tensor: torch.Tensor) -> object:
    return watch.pack(tensor, engine.pack)


def _unpack(watch: Watch, engine: Engine, handle: object) -> torch.Tensor:
    return watch.unpack(handle, engine.unpack)  # type: ignore[arg-type]
