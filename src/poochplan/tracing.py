"""traced_step: runs one planned step and records the times of its ops, copies, waits and replays, and its live
bytes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from poochplan.formats.occupancy import COMPUTE, IN_LINK, OUT_LINK, STEP, THREAD, Bar, MemoryCurve, StepTrace
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet, plans_of
from poochplan.formats.profile import Phase
from poochplan.formats.profile_parts import rounded_up
from poochplan.profiler.capture.clock import Clock, clock_of
from poochplan.profiler.step.forward_only import checked_loss
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.runtime.applying import apply
from poochplan.runtime.devices.accelerator import AcceleratorDevice, QueueStream
from poochplan.runtime.devices.backend import backend_of, synchronize
from poochplan.runtime.devices.cpu import CallingThread, CpuDevice, SpillCopy
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.device import DeviceStopwatch, Event
from poochplan.runtime.devices.opening import model_device
from poochplan.runtime.devices.pinned import Part
from poochplan.tensors.modes import ToggledMode, around_compiled
from poochplan.tensors.operators import traits
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import pytree, storage_identity
from poochplan.verify import METERED_STEPS, drop_gradients, seed_everything
from poochplan.workload import Workload

_QUEUED = {"swap out": OUT_LINK, "prefetch": IN_LINK}


def traced_step(
    build: Callable[[], Workload],
    plan: Plan | PlanSet,
    *,
    seed: int = 0,
    spill_dir: str | Path | None = None,
    force: bool = False,
) -> StepTrace:
    """Builds the workload, trains it under ``plan`` until steps are alike, and measures one further step.

    Measuring takes about 10 us an op, so the traced step is slower than others; ``pooch run`` has timed steps before.
    On an accelerator, events on their streams time compute and copies. Raises what ``poochplan.apply`` raises.
    """
    seed_everything(seed)
    workload = build()
    first = plans_of(plan)[0]
    where = model_device(workload.model, first.device)
    log, tracker = StepLog(where), LayerTracker()
    meter = TracingMeter(where.type, log, tracker)

    def opened() -> CpuDevice | AcceleratorDevice:
        if where.type == "cpu":
            return TracedCpuDevice(spill_dir, first.link.throttle_bytes_per_s, log)
        return (TracedCudaDevice if where.type == "cuda" else TracedDevice)(where, log)

    with contextlib.ExitStack() as stack:
        session = stack.enter_context(
            apply(plan, workload.model, workload.optimizer, device=opened, meter="always", force=force)
        )
        stack.enter_context(tracker.on(workload.model))
        stack.enter_context(around_compiled(workload.model, meter.compiled))
        meter.switch_on()
        stack.callback(meter.switch_off)
        for tensor in (*workload.model.parameters(), *workload.model.buffers()):
            meter.watch(tensor)
        for _ in range(METERED_STEPS):
            _train(workload, log)
        log.start()
        log.live(meter.live_bytes)
        _train(workload, log)
        end = log.clock.mark()
        log.is_on = False
        synchronize(where)
        step_s, report, followed = log.since_origin(log.clock, end), session.report().last_step, session.plan
        assert followed is not None, "it was given"
        memory = log.memory(step_s)
        facts: dict[str, str | int | float] = {
            "peak_bytes": memory.peak_bytes,
            "predicted_peak_bytes": followed.prediction.peak_bytes,
            "out_bytes": report.out_bytes,
            "in_bytes": report.in_bytes,
            "fallbacks": report.fallbacks,
        }
        return StepTrace(followed.workload, "measured", followed.budget_bytes, step_s, log.bars(), memory, facts)


def _train(workload: Workload, log: StepLog) -> None:
    """One step, as ``pooch run`` trains."""
    drop_gradients(workload)
    with log.block(STEP, Phase.FORWARD, ""):
        loss = checked_loss(workload.step(), workload.model)
    with log.block(STEP, Phase.BACKWARD, ""):
        loss.backward()  # type: ignore[no-untyped-call]
    loss = loss.detach()
    with log.block(STEP, Phase.OPTIMIZER, ""):
        if workload.optimizer is not None:
            workload.optimizer.step()


class StepLog:
    """State: whether it records, its records, and the value of the mechanism's innermost action (``label``).

    ``clock`` is the compute stream's, ``host`` the thread's.
    """

    def __init__(self, where: torch.device) -> None:
        self.host = Clock()
        self.clock = self.host if where.type == "cpu" else clock_of(where)
        self._origins: dict[Clock, Any] = {}
        self.is_on, self.label = False, ""
        self._entries: list[tuple[str, str, str, Callable[[], tuple[float, float]]]] = []
        self._sizes: list[tuple[Any, int]] = []

    def start(self) -> None:
        self._origins = {clock: clock.mark() for clock in (self.host, self.clock)}
        self.is_on = True

    def since_origin(self, clock: Clock, mark: Any) -> float:
        """Seconds from the beginning of the record to a mark that has been passed."""
        return clock.seconds(self._origins[clock], mark)

    @contextlib.contextmanager
    def block(self, row: str, what: str, label: str) -> Iterator[None]:
        """The block's work on the compute stream, or, for the thread's row, the thread's work in the block."""
        if not self.is_on:
            yield
            return
        clock = self.host if row == THREAD else self.clock
        begin = clock.mark()
        try:
            yield
        finally:
            self.between(row, what, label, begin, clock.mark(), clock)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """An action: ``"swap out NAME"``, ``"prefetch NAME"`` or ``"replay NAME"``. The thread queues it inside, except
        for a replay, which runs on the compute stream.
        """
        what = next((known for known in (*_QUEUED, "replay") if name.startswith(known)), name)
        outer, self.label = self.label, name.removeprefix(what).strip()
        row, shown = (COMPUTE, "replay") if what == "replay" else (THREAD, f"queue {_QUEUED.get(what, what)}")
        try:
            with self.block(row, shown, self.label):
                yield
        finally:
            self.label = outer

    def took(self, row: str, what: str, label: str, seconds: Callable[[], tuple[float, float]]) -> None:
        """Work that may not have run yet: ``seconds`` is called for its beginning and end, in seconds since the origin,
        when the step is over.
        """
        if self.is_on:
            self._entries.append((row, what, label, seconds))

    def between(self, row: str, what: str, label: str, begin: Any, end: Any, clock: Clock | None = None) -> None:
        """Work ran between two marks of a clock, by default the compute stream's."""
        since = partial(self.since_origin, clock or self.clock)
        self.took(row, what, label, lambda: (since(begin), since(end)))

    def live(self, size_bytes: int) -> None:
        """That many bytes are live from here on."""
        if self.is_on:
            self._sizes.append((self.clock.mark(), size_bytes))

    def bars(self) -> tuple[Bar, ...]:
        """All recorded bars, in order of their beginnings. None begins before the step."""
        times = ((row, what, label, seconds()) for row, what, label, seconds in self._entries)
        read = [Bar(row, what, max(0.0, start_s), end_s, label) for row, what, label, (start_s, end_s) in times]
        return tuple(sorted((bar for bar in read if bar.end_s >= bar.start_s), key=lambda bar: bar.start_s))

    def memory(self, end_s: float) -> MemoryCurve:
        """Live bytes from the first mark on to the end of the step."""
        times_s = [max(0.0, self.since_origin(self.clock, mark)) for mark, _ in self._sizes]
        sizes = [size for _, size in self._sizes]
        order = np.argsort(times_s, kind="stable")
        times = np.append(np.asarray(times_s)[order], end_s) if times_s else np.zeros(0)
        return MemoryCurve(np.maximum.accumulate(times), np.asarray(sizes, dtype=np.int64)[order])


class TracingMeter(ToggledMode):
    """Reports each op that takes time to a log, with its layer, and live bytes whenever they change: those of device
    storages, each rounded up to the allocation unit. State: these storages.

    A storage that is first seen as an argument existed before. It is only for steps whose gradients are discarded:
    under a mode autograd uses other formulas.
    """

    def __init__(self, device_type: str, log: StepLog, tracker: LayerTracker) -> None:
        super().__init__()
        self._device_type, self._log, self._tracker = device_type, log, tracker
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = 0

    def watch(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage from now on, once."""
        if not has_storage(tensor, self._device_type):
            return
        storage = tensor.untyped_storage()
        key, size_bytes = storage_identity(storage), rounded_up(storage.nbytes())
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._died(key, size_bytes))
            self.live_bytes += size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, facts = kwargs or {}, traits(func)
        is_told = self._log.is_on and not facts.pure_view
        begin = self._log.clock.mark() if is_told else None
        self._watch_all((args, kwargs))
        outputs = self.run_op(func, args, kwargs)
        if not facts.pure_view:
            self._watch_all(outputs)
        if is_told:
            self._log.between(COMPUTE, facts.name, self._tracker.current(), begin, self._log.clock.mark())
            self._log.live(self.live_bytes)
        return outputs

    def compiled(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """One bar for a compiled callable, inside of which there are no ops."""

        def region(*args: Any, **kwargs: Any) -> Any:
            with self.away(), self._log.block(COMPUTE, "compiled region", path):
                return call(*args, **kwargs)

        return region

    def _watch_all(self, tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)

    def _died(self, key: int, size_bytes: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live_bytes -= size_bytes
            self._log.live(self.live_bytes)


class WaitingThread(CallingThread):
    """The compute stream of the CPU, which reports each wait. State: the name of each copy's value."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.labels: weakref.WeakKeyDictionary[Event, str] = weakref.WeakKeyDictionary()

    def wait(self, event: Event) -> float:
        if event.done():
            return 0.0
        with self._log.block(COMPUTE, "stall", self.labels.get(event, "")):
            return super().wait(event)


class TracedCpuDevice(CpuDevice):
    spans = True

    def __init__(self, spill_dir: str | Path | None, throttle_bytes_per_s: float | None, log: StepLog) -> None:
        super().__init__(spill_dir, throttle_bytes_per_s=throttle_bytes_per_s)
        self.compute: WaitingThread = WaitingThread(log)
        self._log = log

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._log.span(name)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self._told("swap out", super().copy_out(storage, host_offset))

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self._told("swap in", super().copy_in(storage, host_offset))

    def _told(self, what: str, job: SpillCopy) -> SpillCopy:
        self.compute.labels[job] = self._log.label
        log, row = self._log, OUT_LINK if what == "swap out" else IN_LINK
        read = partial(log.since_origin, log.host)
        log.took(row, what, log.label, lambda: (read(job.began_s), read(job.ended_s)))
        return job


class TracedDevice(AcceleratorDevice):
    """An accelerator's device: marks are events on the streams themselves."""

    def __init__(self, where: torch.device, log: StepLog) -> None:
        super().__init__(where, spans=True)
        self._log = log

    def span(self, name: str) -> contextlib._GeneratorContextManager[None]:
        return self._log.span(name)

    def stopwatch(self) -> DeviceStopwatch:
        return TracedStopwatch(self._log, self.where)

    def _queue(self, storage: torch.UntypedStorage, parts: list[Part], kind: int, stream: QueueStream) -> None:
        if not self._log.is_on:
            super()._queue(storage, parts, kind, stream)
            return
        what, row = ("swap out", OUT_LINK) if stream is self.outward else ("swap in", IN_LINK)
        begin = self._log.clock.mark(stream.stream)
        super()._queue(storage, parts, kind, stream)
        self._log.between(row, what, self._log.label, begin, self._log.clock.mark(stream.stream))


class TracedCudaDevice(TracedDevice, CudaDevice):
    """The same of CUDA."""


class TracedStopwatch(DeviceStopwatch):
    """Reports waits. Waits inside replays, which have their own names, are reported too."""

    def __init__(self, log: StepLog, where: torch.device) -> None:
        there = backend_of(where)
        super().__init__(there.current_stream, lambda: there.new_event(timed=True))
        self._log = log

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with super().running(), self._log.block(COMPUTE, "stall", ""):
            yield
