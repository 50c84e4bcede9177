"""What torch offers for a type of device, without opening one: streams, events, memory and generators.

``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` have it for every type that follows torch's own protocol:
:class:`Accelerator`. For CUDA the same is asked of ``torch.cuda``, which costs less: :class:`Cuda`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from poochplan.errors import UsageError
from poochplan.tensors.host_memory import available_bytes
from poochplan.torch_private.cuda_internals import gpu_sleep, memory_stats_calls, raw_stream

Stream: TypeAlias = "torch.Stream"
Event: TypeAlias = "torch.Event"


class Generator(Protocol):
    """Random numbers of a device: a ``torch.Generator``, or what has its state."""

    def get_state(self) -> torch.Tensor:
        """A tensor of bytes on the host."""

    def set_state(self, new_state: torch.Tensor, /) -> Any:
        """Puts it into a state that it has had."""


class DefaultGenerator:
    """The generator from which a device's ops draw if none is given, through the module of its type of device."""

    def __init__(self, where: torch.device) -> None:
        self._where, self._module = where, torch.get_device_module(where)

    def get_state(self) -> torch.Tensor:
        found: torch.Tensor = self._module.get_rng_state(self._where)
        return found

    def set_state(self, new_state: torch.Tensor, /) -> None:
        self._module.set_rng_state(new_state, self._where)


class Accelerator:
    """A device by torch's own protocol for all types. ``where`` may have no index: then it is the current one."""

    def __init__(self, where: torch.device) -> None:
        self.index = self._current_index() if where.index is None else where.index
        self.where = torch.device(where.type, self.index)

    def _current_index(self) -> int:
        return torch.accelerator.current_device_index()

    def here(self) -> AbstractContextManager[Any]:
        """A block in which it is the current device, for calls that name no other."""
        return torch.accelerator.device_index(self.index)

    # -- streams and events -----------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        return torch.Stream(self.where)

    def new_event(self, *, timed: bool = False) -> Event:
        return torch.Event(self.where, enable_timing=timed)

    def current_stream(self) -> Stream:
        """The calling thread's."""
        return torch.accelerator.current_stream(self.where)

    def current_address(self) -> int:
        """A number that only the calling thread's stream has."""
        return self.current_stream().stream_id

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """A block whose work is queued on that stream."""
        return stream

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.where)

    def keep_busy(self, cycles: int) -> None:
        """Work of that many cycles on the current stream, behind which others can be queued; torch has it for CUDA."""

    # -- memory -----------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Bytes of it that nobody has taken."""
        return self._free_and_total_bytes()[0]

    def left_bytes(self) -> int:
        """Bytes that its allocator may still take from it."""
        return self.free_bytes()

    def total_bytes(self) -> int:
        return self._free_and_total_bytes()[1]

    def _free_and_total_bytes(self) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self.where)

    def allocated_bytes(self) -> int:
        """Bytes that its allocator has given out."""
        return torch.accelerator.memory_allocated(self.where)

    def statistics(self) -> dict[str, Any]:
        """Those of its allocator, by name and pool."""
        return memory_stats_calls(self.where.type)[0](self.index)

    def empty_cache(self) -> None:
        with self.here():
            torch.accelerator.empty_cache()

    # -- the rest ---------------------------------------------------------------------------------------------

    def generator(self) -> Generator:
        """The one from which its ops draw if none is given."""
        return DefaultGenerator(self.where)

    def name(self) -> str:
        """What it is called by its maker, if the module of its type knows that."""
        asked = getattr(torch.get_device_module(self.where), "get_device_name", None)
        return str(asked(self.where)) if asked is not None else self.where.type


class Cuda(Accelerator):
    """A GPU."""

    def _current_index(self) -> int:
        return torch.cuda.current_device()

    def here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.where)

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.where)

    def new_event(self, *, timed: bool = False) -> Event:
        return torch.cuda.Event(enable_timing=True) if timed else torch.cuda.Event()

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.where)

    def current_address(self) -> int:
        return raw_stream(self.index)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def keep_busy(self, cycles: int) -> None:
        gpu_sleep(cycles, self.where)

    def left_bytes(self) -> int:
        """Also by the allocator's limit, of which the GPU knows nothing."""
        free_bytes, total_bytes = self._free_and_total_bytes()
        limit_bytes = int(torch.cuda.get_per_process_memory_fraction(self.index) * total_bytes)
        return max(0, min(free_bytes, limit_bytes - torch.cuda.memory_reserved(self.index)))

    def _free_and_total_bytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.index)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.where)

    def statistics(self) -> dict[str, Any]:
        return torch.cuda.memory_stats_as_nested_dict(self.where)

    def empty_cache(self) -> None:
        with self.here():
            torch.cuda.empty_cache()

    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.index]


def backend_of(where: torch.device) -> Accelerator:
    """That of a device other than the CPU."""
    return Cuda(where) if where.type == "cuda" else Accelerator(where)


def memory_left(where: torch.device) -> int:
    """Bytes that may still be taken there."""
    return available_bytes() if where.type == "cpu" else backend_of(where).left_bytes()


def synchronize(where: torch.device) -> None:
    """Blocks the calling thread until all work queued there has ended; on the CPU it has."""
    if where.type != "cpu":
        backend_of(where).synchronize()


def backends_in_use() -> list[Accelerator]:
    """The devices of this machine's accelerator, once it is in use."""
    if torch.cuda.is_initialized():
        return [Cuda(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    found = torch.accelerator.current_accelerator()  # by what torch is built for: this starts no driver
    if found is None or found.type == "cuda":
        return []
    return [Accelerator(torch.device(found.type, index)) for index in range(torch.accelerator.device_count())]


def accelerator_type() -> str:
    """The type of this machine's accelerator, such as ``"cuda"`` or ``"xpu"``; empty if there is none."""
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def check_accelerator(where: torch.device) -> None:
    """Raises ``UsageError`` for one whose allocator does not tell what a step takes, or whose state cannot be kept."""
    module: Any = torch.get_device_module(where)
    if not (hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")):
        raise UsageError(
            f"device: expected torch.{where.type}.get_rng_state and set_rng_state, by which random numbers are drawn "
            "again, found none; run on the CPU or on another device"
        )
    try:
        Accelerator(where).statistics()
    except (RuntimeError, NotImplementedError):
        raise UsageError(
            f"device: expected an allocator of {where.type} that tells what a step takes "
            "(torch.accelerator.memory_stats), found one that keeps no statistics; run on the CPU or on another device"
        ) from None
