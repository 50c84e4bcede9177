"""Training steps under an outside meter: bits, and bytes that torch has of the C library, with the arena whole on top.

The meter is the allocator hook of the tests (``tests/allocated_bytes.py``), which shares no code with the package and
counts what every thread takes. Processes are forked from one that has installed it and otherwise done nothing but
import, so that each begins at the same bytes. Bits are told by digests, which take nothing of torch's memory.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.processes import import_all
from poochplan.runtime.session import Session
from poochplan.workload import Workload
from tests.allocated_bytes import allocated_bytes

LARGE_BYTES = 64 << 10
"""An allocation of so much that lies outside the arena against the plan is one too many."""


@dataclass
class Trained:
    """What is told of some steps, in order."""

    parts: list[dict[str, str]] = field(default_factory=list)
    """Digests after each, by what they are of: loss and ``gradients``, ``buffers``, ``parameters``, ``generator``."""
    losses: list[float] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    """Most bytes that torch had of the C library at once in each, but for the small blocks."""
    small: int = 0
    """Most bytes at once of blocks of less than 64 bytes, which no budget counts."""
    arenas: list[int] = field(default_factory=list)
    """Bytes of the arena that was there when each ended."""
    metered: list[int | None] = field(default_factory=list)
    """What the session's own meter tells."""
    served: list[int] = field(default_factory=list)
    """Bytes of the blocks that the arena served."""
    unplanned: list[int] = field(default_factory=list)
    """Bytes of blocks that lay outside the arena against its layout; without an arena none do."""
    large: list[int] = field(default_factory=list)
    """How many of these have ``LARGE_BYTES`` or more."""
    larger_bytes: int = 0
    """By how much an arena was too large to be used."""
    fallbacks: int = 0

    @property
    def peaks(self) -> list[int]:
        """Most bytes of each step, the arena whole."""
        return [outside + arena for outside, arena in zip(self.outside, self.arenas, strict=True)]

    @property
    def digests(self) -> list[str]:
        """Of all that each left."""
        return [_together(part) for part in self.parts]

    @property
    def gradients(self) -> list[str]:
        """Digests of loss and gradients after each."""
        return [part["gradients"] for part in self.parts]

    @property
    def large_once_learned(self) -> int:
        """Of the steps behind the first that was served."""
        first = next((index for index, arena in enumerate(self.arenas) if arena), len(self.arenas))
        return sum(self.large[first + 1 :])

    def note(self, outside_bytes: int, session: Session | None) -> None:
        """The bytes of a step that has ended, and what a session tells of it."""
        report = session.report() if session is not None else None
        arena = report.arena if report is not None else None
        self.outside.append(outside_bytes)
        self.arenas.append(arena.size_bytes if arena is not None else 0)
        self.metered.append(report.last_step.peak_bytes if report is not None else None)
        self.served.append(arena.served_bytes if arena is not None else 0)
        self.unplanned.append(arena.unplanned_bytes + arena.taken_bytes if arena is not None else 0)
        misses = arena.unserved if arena is not None else []
        self.large.append(sum(one.size_bytes >= LARGE_BYTES for one in misses))
        if report is not None:
            self.larger_bytes = arena.larger_bytes if arena is not None else 0
            self.fallbacks = report.total.fallbacks

    def facts(self) -> dict[str, Any]:
        """For a file of results."""
        return {
            "peaks": self.peaks,
            "small_blocks_bytes": self.small,
            "arena_bytes": self.arenas[-1],
            "larger_bytes": self.larger_bytes,
            "metered_peaks": self.metered,
            "served_bytes": self.served[-1],
            "unplanned_bytes": self.unplanned,
            "large_once_learned": self.large_once_learned,
            "fallbacks": self.fallbacks,
        }


def ready_to_fork() -> None:
    """The meter is there, and all that training may import."""
    allocated_bytes()
    import_all()


def train(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    session: Session | None = None,
    before_bytes: int = 0,
) -> Trained:
    """So many steps. ``before_bytes``: of what was there before the workload was made, which is none of it."""
    meter, found = allocated_bytes(), Trained()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        meter.restart()  # from here on an arena is taken, and gradients lie in it
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        peak_bytes = meter.peak
        found.parts.append(digests_apart(model, loss))
        found.losses.append(loss.item())
        meter.restart()
        optimizer.step()
        found.small = max(found.small, meter.small_peak)
        found.note(max(peak_bytes, meter.peak) - before_bytes, session)
    return found


def train_anew(workload: Workload, steps: int) -> Trained:
    """So many steps, without gradients and optimizer state before them. Bytes are those of the model and of what the
    steps take.
    """
    model, optimizer = workload.model, workload.optimizer
    assert optimizer is not None
    torch.manual_seed(1)
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    own_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return train(model, workload.step, optimizer, steps, before_bytes=allocated_bytes().live - own_bytes)


def digests_apart(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, str]:
    """Of each kind of thing that a step leaves; bitwise the same steps have the same."""
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return {
        "gradients": _digest([loss, *gradients]),
        "buffers": _digest(model.buffers()),
        "parameters": _digest(model.parameters()),
        "generator": _digest([torch.get_rng_state()]),
    }


def digest(model: torch.nn.Module, loss: torch.Tensor) -> str:
    """Of all that a step leaves."""
    return _together(digests_apart(model, loss))


def _together(parts: dict[str, str]) -> str:
    return hashlib.sha256("".join(parts.values()).encode()).hexdigest()[:16]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_sparse:
            total.update(_bytes(tensor._indices()))
            tensor = tensor._values()
        total.update(_bytes(tensor))
    return total.hexdigest()[:16]


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:
        plain = plain.view(torch.int16)
    return np.asarray(plain.numpy()).tobytes()  # in numpy's memory
