"""Devices that tell a log when copies run, when the compute stream waits for them, and when it recomputes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from poochplan.report.inspection.step_trace import COMPUTE, IN_LINK, OUT_LINK, THREAD
from poochplan.runtime.devices.cpu import CallingThread, CpuDevice, SpillCopy
from poochplan.runtime.devices.cuda import CudaDevice, CudaStream
from poochplan.runtime.devices.device import Device, Event
from poochplan.runtime.devices.pinned import PinnedMemory
from poochplan.runtime.devices.pinned_tier import Part
from poochplan.runtime.devices.stopwatch import CudaStopwatch

from .step_log import StepLog

_QUEUED = {"swap out": OUT_LINK, "prefetch": IN_LINK}


def traced_device(
    where: torch.device, spill_dir: str | Path | None, throttle_bytes_per_s: float | None, log: StepLog
) -> Device:
    """The device that runs on ``where``, telling ``log``."""
    if where.type == "cpu":
        return TracedCpuDevice(spill_dir, throttle_bytes_per_s, log)
    return TracedCudaDevice(where, log)


class Named:
    """What the mechanism is at: ``"swap out NAME"``, ``"prefetch NAME"`` or ``"replay NAME"``. State: the innermost."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.label = ""

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The thread queues it inside, but for a replay: that runs on the compute stream."""
        what = next((known for known in (*_QUEUED, "replay") if name.startswith(known)), name)
        outer, self.label = self.label, name.removeprefix(what).strip()
        row, shown = (COMPUTE, "replay") if what == "replay" else (THREAD, f"queue {_QUEUED.get(what, what)}")
        try:
            with self._log.block(row, shown, self.label):
                yield
        finally:
            self.label = outer


class WaitingThread(CallingThread):
    """The compute stream of the CPU, which tells of each wait. State: the name of each copy's value."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.labels: weakref.WeakKeyDictionary[Event, str] = weakref.WeakKeyDictionary()

    def wait(self, event: Event) -> float:
        if event.done():
            return 0.0
        with self._log.block(COMPUTE, "stall", self.labels.get(event, "")):
            return super().wait(event)


class TracedCpuDevice(CpuDevice):
    """The CPU device."""

    spans = True

    def __init__(self, spill_dir: str | Path | None, throttle_bytes_per_s: float | None, log: StepLog) -> None:
        super().__init__(spill_dir, throttle_bytes_per_s=throttle_bytes_per_s)
        self.compute: WaitingThread = WaitingThread(log)
        self._log, self._named = log, Named(log)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._named.span(name)

    def copy_out(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self._told("swap out", super().copy_out(storage, host_offset))

    def copy_in(self, storage: torch.UntypedStorage, host_offset: int) -> SpillCopy:
        return self._told("swap in", super().copy_in(storage, host_offset))

    def _told(self, what: str, job: SpillCopy) -> SpillCopy:
        self.compute.labels[job] = self._named.label
        read = self._log.host.seconds
        row = OUT_LINK if what == "swap out" else IN_LINK
        self._log.took_later(row, what, self._named.label, lambda: read(job.began_s), lambda: read(job.ended_s))
        return job


class TracedCudaDevice(CudaDevice):
    """The CUDA device: marks are events on the streams themselves."""

    def __init__(self, where: torch.device, log: StepLog) -> None:
        super().__init__(where, spans=True)
        self._log, self._named = log, Named(log)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self._named.span(name):
            yield

    def stopwatch(self) -> CudaStopwatch:
        return TracedStopwatch(self._log, self.where)

    def _queue(
        self, storage: torch.UntypedStorage, parts: list[Part[PinnedMemory]], kind: int, stream: CudaStream
    ) -> None:
        if not self._log.is_on:
            super()._queue(storage, parts, kind, stream)
            return
        what, row = ("swap out", OUT_LINK) if stream is self.outward else ("swap in", IN_LINK)
        begin = self._log.clock.mark(stream.stream)
        super()._queue(storage, parts, kind, stream)
        self._log.took(row, what, self._named.label, begin, self._log.clock.mark(stream.stream))


class TracedStopwatch(CudaStopwatch):
    """Around waits; those of replays, which have a name of their own, are told too and lie inside of these."""

    def __init__(self, log: StepLog, where: torch.device) -> None:
        super().__init__(lambda: torch.cuda.current_stream(where))
        self._log = log

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with super().running(), self._log.block(COMPUTE, "stall", ""):
            yield
