"""A small training step with a clock, and an arena for it: recorded once, packed by the planner's packing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile_parts import LEAST_PLACED_BYTES
from poochplan.planner.arena.packing import Block, pack
from poochplan.runtime.arena.arena import Arena, Places
from poochplan.runtime.arena.library import AllocationLog, ThreadScope, lifetimes

Clock = Callable[[int], None]


def no_clock(point: int) -> None:
    pass


class Net:
    """Layers whose step tells a clock of each; gradients are kept and zeroed, so that every block dies in its step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.GELU()) for i in range(4)]
        self.layers = nn.ModuleList([*parts, nn.Sequential(nn.Flatten(), nn.Linear(16 * 256, 10))])
        self.inputs, self.labels = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
        for parameter in self.layers.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, clock: Clock = no_clock) -> float:
        for parameter in self.layers.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        x = self.inputs
        for number, layer in enumerate(self.layers, start=1):
            clock(number)
            x = layer(x)
        loss = nn.functional.cross_entropy(x, self.labels)
        del x
        clock(len(self.layers) + 1)
        loss.backward()
        return loss.item()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad.clone() for parameter in self.layers.parameters() if parameter.grad is not None]


def resident_bytes(arena: Arena) -> int | None:
    """The arena's resident bytes now, in whole pages; None if the kernel does not give them."""
    found: int = arena._library.arena_resident_bytes(arena._handle)
    return None if found < 0 else found


def recorded(step: Callable[[Clock], object], scope: ThreadScope) -> np.ndarray:
    """The events of one step."""
    with AllocationLog(scope) as log:
        step(log.mark)
    return log.events


def arena_of(events: np.ndarray, smallest_bytes: int = LEAST_PLACED_BYTES) -> Arena:
    """An arena for what a log recorded; what outlived the log lies outside."""
    found = lifetimes(events, smallest_bytes)
    dies = np.flatnonzero(found["death"] >= 0)
    blocks = [Block(int(one["birth"]), int(one["death"]), int(one["size_bytes"])) for one in found[dies]]
    packing = pack(blocks)
    offsets = np.full(len(found), OUTSIDE)
    offsets[dies] = packing.offsets
    return Arena(Places(found["size_bytes"], offsets, found["point"]), packing.arena_bytes, smallest_bytes)


def places(*rows: tuple[int, int, int]) -> Places:
    """Places of (bytes, offset, point)."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Places(columns[0], columns[1], columns[2])


def filled(size_bytes: int, value: int) -> torch.Tensor:
    """A block of that many bytes, all of that value."""
    return torch.empty(size_bytes, dtype=torch.uint8).fill_(value)


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def on_another_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor.numpy() == value).all())  # by numpy, whose memory is not torch's
