"""Arrivals: where a compiled backward first needs a saved tensor, and asks for it, in place of at its begin.

Our partitioner has put an op there. At the begin autograd hands out a *hollow*: a tensor that lies as the saved one
does, on torch's device without memory. The op is given it, has the saved tensor unpacked, and returns that. A hollow is
only made where the code that is about to run was read to have the op (``generated_code.py``). Given any other tensor,
the op returns it.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx.node import has_side_effect

from poochplan.runtime.metering.allocated import joined_count
from poochplan.tensors.modes import compiled_modules, in_compiled_call
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.compiler_internals import is_compiled_backward
from poochplan.torch_private.tensor_internals import backward_node, graph_task

from .generated_code import arriving_positions
from .hollows import filled, hollow_for, is_hollow

Packed = TypeVar("Packed")
Unpack = Callable[[Packed], torch.Tensor]

NAMESPACE, OP = "poochplan", "arrive"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
LIBRARY.define(f"{OP}(Tensor(a) value, Tensor? after=None) -> Tensor(a)", tags=(torch.Tag.flexible_layout,))
"""``after`` only says behind which op of the graph it comes."""

Listener = Callable[[], contextlib.AbstractContextManager[None]]
_LISTENERS: list[tuple[int, Listener]] = []
"""Each with the thread that it is told of."""


def arrive(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that a hollow stands for, at its first use; any other tensor as it is."""
    unpack = filled(value)
    if not _LISTENERS:
        return value if unpack is None else unpack()
    with listening():
        return value if unpack is None else unpack()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """A block at a point of compiled code: who is told of points on this thread is told of it."""
    with contextlib.ExitStack() as stack:
        for thread, listener in _LISTENERS:
            if thread == threading.get_ident():
                stack.enter_context(listener())
        yield


def _traced(value: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """The op under fake tensors; hollows lie where those do, but none is traced with."""
    return arrive(value) if type(value) is torch.Tensor else value


LIBRARY.impl(OP, arrive, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{OP}", _traced, lib=LIBRARY)
ARRIVE: Any = getattr(getattr(torch.ops, NAMESPACE), OP).default
has_side_effect(ARRIVE)


def parts_are_measured(device_type: str) -> bool:
    """Whether it can be known what the parts of a backward take, between two arrivals: only the log of the compiled
    allocator tells what one part makes and another lets go of.
    """
    return device_type == "cpu" and joined_count() is not None


@contextlib.contextmanager
def told_of_points(around: Listener, device_type: str) -> Iterator[None]:
    """Enters ``around()`` around what happens at each arrival and save point on this thread, for the length of a block.

    Never where the parts of a region cannot be measured.
    """
    if not parts_are_measured(device_type):
        yield
        return
    told = threading.get_ident(), around
    _LISTENERS.append(told)
    try:
        yield
    finally:
        _LISTENERS.remove(told)


class _Run:
    """One run of a compiled backward: how many tensors it has unpacked. Kept on its node."""

    __slots__ = ("task", "unpacked")

    def __init__(self, task: int) -> None:
        self.task, self.unpacked = task, 0


_RUN = "poochplan_run"


def _next_position(node: Any) -> int:
    """Which of its saved tensors the node unpacks now, in the order of unpacking."""
    run, task = getattr(node, _RUN, None), graph_task()
    if run is None or run.task != task:
        run = _Run(task)
        setattr(node, _RUN, run)
    run.unpacked += 1
    return run.unpacked - 1


class _Here(threading.local):
    saving = False


_here = _Here()


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """A block in which a tensor is packed at its save point in compiled code, which makes the hollow for it."""
    _here.saving = True
    try:
        yield
    finally:
        _here.saving = False


class _Saved:
    """What was packed inside a compiled callable. What else is unpacked while a compiled backward runs, such as the
    input of a checkpoint around it, is none of its saved tensors.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: Any) -> None:
        self.packed = packed


class _Handed:
    """What stands for a tensor that was packed at its save point."""

    __slots__ = ("hollow",)

    def __init__(self, hollow: torch.Tensor) -> None:
        self.hollow = hollow


def arriving(
    pack: Callable[[torch.Tensor], Packed],
    unpack: Unpack[Packed],
    may_wait: Callable[[Packed], Geometry | None],
    model: torch.nn.Module,
    device_type: str,
) -> tuple[Callable[[torch.Tensor], Any], Unpack[Any]]:
    """The hooks that leave to their arrivals what compiled backwards of ``model`` need later; ``pack`` and ``unpack``
    themselves where none is compiled, or parts cannot be measured.

    ``may_wait`` tells how the tensor lies that a packed one stands for; None for what is to be unpacked at once.
    """
    if not compiled_modules(model) or not parts_are_measured(device_type):
        return pack, unpack

    def pack_or_mark(tensor: torch.Tensor) -> Any:
        if is_hollow(tensor):  # it was saved at its save point
            return _Saved(_Handed(tensor))
        packed = pack(tensor)
        return _Saved(packed) if in_compiled_call() and not _here.saving else packed

    def unpack_or_wait(found: Any) -> torch.Tensor:
        if type(found) is not _Saved:
            return unpack(found)
        packed, node = found.packed, backward_node()
        if node is None or not is_compiled_backward(node):
            return packed.hollow if type(packed) is _Handed else unpack(packed)
        position = _next_position(node)
        if type(packed) is _Handed:
            return packed.hollow
        if position not in arriving_positions(node):
            return unpack(packed)
        geometry = may_wait(packed)
        return unpack(packed) if geometry is None else hollow_for(geometry, partial(unpack, packed))

    _MARKING.add(pack_or_mark)
    return pack_or_mark, unpack_or_wait


_MARKING: weakref.WeakSet[Callable[[torch.Tensor], Any]] = weakref.WeakSet()


def marks(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Whether that hook is one of :func:`arriving`, which knows a hollow when it is given one."""
    return inspect.unwrap(pack) in _MARKING
