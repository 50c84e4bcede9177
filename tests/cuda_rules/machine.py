"""The machine: one simulated GPU, and the names of ``torch.cuda`` that stand for it within a block."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import tensors
from .backward import DeviceThread
from .host_memory import CudaRuntime, HostMemory, cupy_module
from .memory import TOTAL_BYTES, DeviceMemory, is_device_address
from .rules import Rules
from .streams import COPY_BYTES_PER_S, COPY_S, CYCLES_PER_S, Host, Mark, Stream

WHERE = torch.device("cuda", 0)


FACTS = types.SimpleNamespace(
    name="stand-in",
    total_memory=TOTAL_BYTES,
    pci_domain_id=0,
    pci_bus_id=0x3B,
    pci_device_id=0,
    major=6,
    minor=0,  # older than what Triton makes kernels for, which could not run here
)


def workspace_bytes() -> int:
    """What one handle of cuBLAS takes; less than by its default, for the networks here are small."""
    asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    return sum(int(size) * int(count) << 10 for size, count in re.findall(r":(\d+):(\d+)", asked))


class Machine:
    """One GPU, its host memory, and what was seen to go wrong (``violations``).

    ``index``: its number. There are ``index`` GPUs before it, on which nobody has anything to do, and the first of all
    is current unless somebody says otherwise.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.where = torch.device("cuda", index)
        self.host = Host()
        self.violations = self.host.violations
        self.memory = DeviceMemory(self.host)
        self.host_memory = HostMemory(self.violations)
        self.default_stream = Stream(self.host)
        self.generator = torch.Generator()
        self.filled_bytes = 0
        """What deterministic mode has filled of new buffers."""
        self.blocking_copies = 0
        self.counts: Counter[str] = Counter()
        """Of calls of the driver's, by name: events made, recorded and waited for, and copies queued."""
        self.capturing = False
        self.ranges: list[str] = []
        self.blas: dict[tuple[bool, Stream], torch.UntypedStorage] = {}
        """What cuBLAS holds between ops, by thread and stream: whether backward runs there."""
        self.reads = 0
        """How often the host has waited to read something."""
        self.switches: list[tuple[int, Stream]] = []
        """From which autograd node on which stream is current, in threads that run forward."""
        self._thread = threading.local()

    # -- streams ----------------------------------------------------------------------------------------------

    @property
    def current(self) -> Stream:
        """Of the calling thread."""
        return getattr(self._thread, "stream", self.default_stream)

    @property
    def runs_backward(self) -> bool:
        """Whether the calling thread is the one that runs backward."""
        return getattr(self._thread, "backward", False)

    @property
    def current_device(self) -> int:
        """Of the calling thread: autograd's is its own device's."""
        return getattr(self._thread, "device", self.index if self.runs_backward else 0)

    @current_device.setter
    def current_device(self, number: int) -> None:
        self._thread.device = number

    def number(self, device: Any) -> int:
        """Which GPU that is."""
        if device is None or isinstance(device, int):
            return self.current_device if device is None else device
        found = torch.device(device).index
        return self.current_device if found is None else found

    def is_asked(self, device: Any, what: str) -> None:
        """Tells where another GPU than the one in use was asked for something."""
        if self.number(device) != self.index:
            self.violations.append(f"{what} of cuda:{self.number(device)}, where all is on cuda:{self.index}")

    def stream_on(self, device: Any) -> Stream:
        self.is_asked(device, "the current stream was asked for")
        return self.current

    def make_current(self, stream: Stream) -> None:
        self._thread.stream = stream
        self.switches.append((int(torch.autograd._get_sequence_nr()), stream))  # type: ignore[attr-defined]

    def multiplies(self, stream: Stream) -> None:
        """A matrix product begins: the first of a thread on a stream takes memory for all that follow."""
        place = self.runs_backward, stream
        if place not in self.blas:
            self.blas[place] = self.memory.allocate(workspace_bytes(), stream)

    def poll(self, mark: Mark) -> bool:
        """Whether the host sees that the mark has been passed. Time goes by while it looks."""
        if mark.has_run:
            self.host.learns(mark)
            return True
        mark.stream.run_next()
        return False

    def synchronise(self) -> None:
        for stream in list(self.host.streams):
            stream.synchronise()

    # -- accesses and copies ----------------------------------------------------------------------------------

    def access(
        self, stream: Stream, work: tuple[int, int], address: int, what: str, *, writes: bool, of: str = ""
    ) -> None:
        block = self.memory.block_at(address)
        if block is not None:
            found = block.accesses.note(stream, work, what, writes=writes)
            self.violations += [f"{one} ({block.size_bytes} bytes{of})" for one in found]

    def queue_copy(self, to: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Between the device and pinned memory; once pinning was refused, also ordinary memory, of which a copy out is
        waited for.
        """
        out = is_device_address(source)
        on_device, on_host = (source, to) if out else (to, source)
        is_pinned = self.host_memory.is_pinned(on_host)
        if not (is_pinned or self.host_memory.has_refused):
            raise RuntimeError("the stand-in copies between the device and pinned memory")
        self.counts["copies"] += 1
        what = f"a copy {'out' if out else 'in'} on stream {stream.number}"
        self.access(stream, stream.begins(), on_device, what, writes=not out)
        pending = self.host_memory.pending
        key = self.counts["copies"]
        pending[key] = (on_host, size_bytes)

        def run() -> None:
            if pending.pop(key, None) is not None:
                ctypes.memmove(to, source, size_bytes)

        stream.put(COPY_S + size_bytes / COPY_BYTES_PER_S, run)
        if out and not is_pinned:
            stream.synchronise()

    def copy_asynchronously(self, to: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        """CuPy's."""
        assert (kind == 2) is is_device_address(source), "the kind of copy is not that of its addresses"
        self.queue_copy(to, source, size_bytes, next(one for one in self.host.streams if one.number == stream))


MACHINE: list[Machine] = []
"""The one that stands for CUDA now, if any."""


def machine() -> Machine:
    return MACHINE[-1]


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        machine().counts["events"] += 1
        self._timed = enable_timing
        self._mark: Mark | None = None

    def record(self, stream: CudaStream | None = None) -> None:
        machine().counts["recorded"] += 1
        self._mark = (stream._stream if stream is not None else machine().stream_on(None)).mark()

    def wait(self, stream: CudaStream | None = None) -> None:
        machine().counts["waits"] += 1
        if self._mark is not None:
            (stream._stream if stream is not None else machine().stream_on(None)).wait_for(self._mark)

    def query(self) -> bool:
        return self._mark is None or machine().poll(self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            self._mark.stream.run_until(self._mark)
            machine().host.learns(self._mark)

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._mark is None or end._mark is None or not (self._mark.has_run and end._mark.has_run):
            raise RuntimeError("CUDA error: device not ready")
        return (end._mark.at_s - self._mark.at_s) * 1e3


class CudaStream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream: Stream | None = None) -> None:
        self._stream = Stream(machine().host) if stream is None else stream
        if stream is None:
            machine().is_asked(device, "a stream was made")
        self.device, self.device_index = machine().where, machine().index

    @property
    def cuda_stream(self) -> int:
        return self._stream.number

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: CudaStream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return machine().poll(self._stream.mark())

    def synchronize(self) -> None:
        self._stream.synchronise()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self._stream is other._stream

    def __hash__(self) -> int:
        return hash(self._stream)


class DeviceBlock:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self.idx = machine().number(device)

    def __enter__(self) -> None:
        self._before, machine().current_device = machine().current_device, self.idx

    def __exit__(self, *_: object) -> None:
        machine().current_device = self._before


@contextlib.contextmanager
def _stream_block(stream: CudaStream | None) -> Iterator[None]:
    before = machine().current
    machine().make_current(before if stream is None else stream._stream)
    try:
        yield
    finally:
        machine().make_current(before)


@contextlib.contextmanager
def _capture(*_: object) -> Iterator[None]:
    machine().capturing = True
    try:
        yield
    finally:
        machine().capturing = False


def _names(gpu: Machine, runtime: CudaRuntime) -> dict[str, Any]:
    """``torch.cuda``, as far as anybody here asks."""
    memory = gpu.memory

    def asked_of(device: Any) -> None:
        if isinstance(device, torch.device) and device.index is None:
            raise ValueError("Expected a torch.device with a specified index or an integer, but got:cuda")
        gpu.is_asked(device, "the limit")

    def set_fraction(fraction: float, device: Any = None) -> None:
        asked_of(device)
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        memory.limit_bytes = int(fraction * TOTAL_BYTES)

    def fraction(device: Any = None) -> float:
        """That of ``cudaMallocAsync`` begins as the largest number there is."""
        asked_of(device)
        has_none = memory.backend == "cudaMallocAsync" and memory.limit_bytes == TOTAL_BYTES
        return (1 << 64) / TOTAL_BYTES if has_none else memory.limit_bytes / TOTAL_BYTES

    return {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_sleep": lambda cycles: gpu.stream_on(None).put(cycles / CYCLES_PER_S),
        "Event": Event,
        "Stream": CudaStream,
        "CUDAGraph": object,
        "cudart": lambda: runtime,
        "current_device": lambda: gpu.current_device,
        "current_stream": lambda device=None: CudaStream(stream=gpu.stream_on(device)),
        "default_generators": (*(torch.Generator() for _ in range(gpu.index)), gpu.generator),
        "device": DeviceBlock,
        "device_count": lambda: gpu.index + 1,
        "empty_cache": memory.empty_cache,
        "graph": _capture,
        "get_allocator_backend": lambda: memory.backend,
        "get_device_name": lambda device=None: "stand-in",
        "get_device_properties": lambda device=None: FACTS,
        "get_per_process_memory_fraction": fraction,
        "get_rng_state": lambda device=None: torch.cuda.default_generators[gpu.number(device)].get_state(),
        "host_memory_stats": lambda: {"allocated_bytes.current": 0},
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: gpu.capturing,
        "is_initialized": lambda: True,
        "manual_seed_all": gpu.generator.manual_seed,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - memory.reserved_bytes, TOTAL_BYTES),
        "nvtx": types.SimpleNamespace(range_push=gpu.ranges.append, range_pop=gpu.ranges.pop),
        "set_per_process_memory_fraction": set_fraction,
        "set_rng_state": lambda state, device=None: torch.cuda.default_generators[gpu.number(device)].set_state(state),
        "stream": _stream_block,
        "synchronize": lambda device=None: gpu.synchronise(),
    }


def _allocator_statistics(gpu: Machine) -> dict[str, Any]:
    """What ``torch.cuda`` and ``torch.accelerator`` ask for the allocator's statistics, by a GPU's number."""

    def stats(index: int) -> dict[str, Any]:
        gpu.is_asked(index, "statistics")
        return gpu.memory.statistics()

    def reset(index: int) -> None:
        gpu.is_asked(index, "a peak was begun anew")
        gpu.memory.begin_peaks()

    return {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset,
        "_cuda_memorySnapshot": lambda *_: gpu.memory.snapshot(),
        "_cuda_clearCublasWorkspaces": gpu.blas.clear,
        "_cuda_getCurrentRawStream": lambda index: gpu.stream_on(index).number,
        "_accelerator_getDeviceIndex": lambda: gpu.current_device,
        "_accelerator_getDeviceStats": stats,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_resetPeakStats": reset,
        "_accelerator_setAllocatorSettings": lambda settings: gpu.memory.set(settings),
    }


def _hide_what_is_built_for_cuda(patch: pytest.MonkeyPatch) -> None:
    """A build of torch for CUDA has libraries that would look for the GPU."""
    patch.setattr(torch.version, "cuda", None)
    patch.setattr(torch.backends.cudnn, "version", lambda: None)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def _survive_disabled_modes(patch: pytest.MonkeyPatch, rules: Rules) -> None:
    """A GPU stays one where no dispatch mode is on."""

    @contextlib.contextmanager
    def without_others() -> Iterator[None]:
        with _disable_current_modes(), rules:
            yield

    for name, module in sys.modules.copy().items():  # other threads import
        if name.startswith(("poochplan", "tests", "benchmarks")):
            for key, thing in list(vars(module).items()):
                if thing is _disable_current_modes and name != __name__:
                    patch.setattr(module, key, without_others)


@contextlib.contextmanager
def on_stand_in(*, cupy: bool = True, index: int = 0) -> Iterator[Machine]:
    """Within the block there is a GPU of that number. Nothing that a test left on it outlives the block usefully."""
    gpu = Machine(index)
    rules = Rules(gpu)
    thread = DeviceThread(gpu)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, thing in _names(gpu, CudaRuntime(gpu.host_memory)).items():
            patch.setattr(torch.cuda, name, thing)
        for name, thing in (("get_rng_state", torch.cuda.get_rng_state), ("set_rng_state", torch.cuda.set_rng_state)):
            patch.setattr(f"torch.cuda.random.{name}", thing)
        for name, thing in _allocator_statistics(gpu).items():
            patch.setattr(torch._C, name, thing, raising=False)
        _hide_what_is_built_for_cuda(patch)
        # What the stand-in's own Python takes is no machine's time, and telling it takes 20 s.
        patch.setattr("poochplan.profiler.trials.machine_facts.measured_on", lambda where, key: None)
        # The compiled tape sees the memory of the host that the stand-in's tensors have.
        patch.setattr("poochplan.runtime.replays.compiled_tape.IS_WANTED", False)
        if cupy:
            patch.setitem(sys.modules, "cupy", cupy_module(gpu.host_memory, gpu.copy_asynchronously))
        else:
            patch.setitem(sys.modules, "cupy", None)
        tensors.patch(patch, gpu)
        _survive_disabled_modes(patch, rules)
        MACHINE.append(gpu)
        stack.callback(MACHINE.pop)
        stack.enter_context(thread.running(patch))
        stack.enter_context(rules)
        yield gpu
