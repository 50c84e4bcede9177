"""Compiled code: the memory that a call of a compiled callable, or its backward, allocates where no dispatch mode
observes it.

Modes are off in a compiled forward, and a compiler such as Inductor allocates past the dispatcher. So memory is
measured at the allocator: on the CPU from the events that it reports to a profiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from poochplan.formats.profile_parts import rounded_up
from poochplan.torch_private.compiler_internals import is_compiled_backward
from poochplan.torch_private.tensor_internals import (
    allocation_events,
    allocation_mark,
    log_allocations,
    pytree,
    sequence_number,
)

_SET_ASIDE = "poochplan.set_aside"
_FREED = "poochplan.freed:"
Event = tuple[str, str, int]
"""Kind, name and bytes."""


class CpuMeter:
    """The CPU's allocations from :meth:`begin` on, on the calling thread. State: whether it has begun."""

    def __init__(self) -> None:
        self._is_open = False

    def begin(self) -> None:
        """Starts. A measurement that was begun and never ended, for example because backward raised, is discarded."""
        self.end()
        self._is_open = log_allocations()

    def events(self) -> list[Event] | None:
        """Ends the log and returns its events. None if there is no log, for example under another profiler."""
        if not self._is_open:
            return None
        self._is_open = False
        return allocation_events()

    def end(self) -> int | None:
        """Ends the log. Returns the most bytes above those live at the start, each storage rounded up to the allocation
        unit.

        None if that is unknown.
        """
        events = self.events()
        return None if events is None else most_bytes(events)

    def mark(self, name: str) -> None:
        """Adds an event of that name."""
        if self._is_open:
            with allocation_mark(name):
                pass

    def freed(self, size_bytes: int) -> None:
        """A storage of that size dies. The allocator does not report this for one that was made before the code."""
        self.mark(f"{_FREED}{size_bytes}")

    def set_aside(self) -> contextlib.AbstractContextManager[object]:
        """A block whose allocations do not count."""
        return allocation_mark(_SET_ASIDE) if self._is_open else contextlib.nullcontext()


def most_bytes(events: list[Event]) -> int:
    """Most bytes of the running sum of (kind, name, bytes) events, without those in blocks that were set aside."""
    live = most = 0
    for change in changes(events):
        live += change
        most = max(most, live)
    return most


def changes(events: list[Event], least_bytes: int = 0) -> Iterator[int]:
    """Changes of live bytes by event, rounded; those of less than ``least_bytes`` are left out. If mark and allocator
    both report a storage's death, it counts once.

    What the allocator frees right after a mark is the marked storage, whatever size it reports: torch knows sizes by
    address, and a block from before the log may lie where an earlier log had another one.
    """
    depth, aside = 0, 0
    marked = told = 0
    """Bytes of the previous event, if it was a mark, or the allocator's."""
    is_right_after = False
    for kind, name, size_bytes in events:
        change = 0
        if kind == "push":
            depth += 1
            is_right_after = name.startswith(_FREED)
            if name == _SET_ASIDE and not aside:
                aside = depth
            if name.startswith(_FREED) and not aside:
                freed_bytes = int(name.removeprefix(_FREED))
                if told != -freed_bytes:
                    change = -_counted(freed_bytes, least_bytes)
                    marked = freed_bytes
                told = 0
        elif kind == "pop":
            aside = 0 if aside == depth else aside
            depth -= 1
        elif kind == "memory_alloc" and not aside:
            is_counted = size_bytes < 0 and bool(marked) and (is_right_after or marked == -size_bytes)
            if size_bytes > 0:
                change = _counted(size_bytes, least_bytes)
            elif not is_counted:
                change = -_counted(-size_bytes, least_bytes)
            told = size_bytes if size_bytes < 0 and not is_counted else 0
            marked = 0
        yield change


def _counted(size_bytes: int, least_bytes: int) -> int:
    return rounded_up(size_bytes) if size_bytes >= least_bytes else 0


def around_backward(
    outputs: Any,
    node_before: int,
    begins: Callable[[list[torch.Tensor]], Any],
    ends: Callable[[list[torch.Tensor]], Any],
) -> None:
    """Calls ``begins(gradients)`` before each backward of the code that a call has just compiled, with its input
    gradients, and ``ends(gradients)`` after it, with its results.

    ``outputs`` are the call's; ``node_before`` is the number of the last autograd node that was made before it.
    """
    for node in _compiled_nodes(outputs, node_before):
        node.register_prehook(lambda gradients: begins(_there(gradients)))
        node.register_hook(lambda gradients, _: ends(_there(gradients)))


def _there(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _compiled_nodes(outputs: Any, node_before: int) -> list[Any]:
    """The compiled nodes among those that were made after ``node_before`` and lead to ``outputs``."""
    pending = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or sequence_number(node) <= node_before:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return [node for node in seen if is_compiled_backward(node)]
